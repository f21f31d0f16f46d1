"""First contact with a model: can it read the graph, and does it say here what it says by itself?"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fgai.attention.state import evaluating
from fgai.cache import cached_on
from fgai.errors import InputError
from fgai.graph import Graph

Forward = Callable[[Tensor], Tensor]
"""From edges [2, E] in any order to what the model returns for them."""


def first_contact(model: nn.Module, graph: Graph, forward: Forward, arguments: tuple[str, ...]) -> None:
    """Make sure, once for a model and a graph, that fgai's call is the model's own function.

    fgai sorts edges and merges duplicates, and attacks add and remove edges. Outputs must not depend on any
    of it: a model that keeps values per edge would pair them with other edges, without a word. A model whose
    outputs differ from call to call cannot be judged here; `evaluate` warns of it.

    Args:
        model: not fgai's own.
        graph: on its device.
        forward: the model on this graph, as a function of the edges.
        arguments: by position, what it is called with.

    Raises:
        InputError: it takes other arguments, reads features of another type, or gives other outputs when the
            same edges come in another order, or when duplicates are merged.
    """
    known: WeakSet[nn.Module] = cached_on(graph, "fgai.attention.contact", WeakSet)
    if model in known:
        return
    check_arguments(model, arguments)
    check_dtype(model, graph)
    edges = graph.edge_index
    with evaluating(model), torch.no_grad(), torch.random.fork_rng(_cuda(graph.device)):
        outputs = forward(edges)
        same = forward(_shuffled(edges))
        if _differ(outputs, same) and not _differ(outputs, forward(edges)):
            raise InputError(
                f"{type(model).__name__} gives other outputs when the edges of {graph.name!r} come in another"
                " order, and fgai sorts them: it must not keep values per edge, such as `edge_attr`"
            )
        if graph.merged is not None:
            given = _shuffled(torch.cat([edges, graph.merged], dim=1))
            if _differ(outputs, forward(given)) and not _differ(outputs, forward(edges)):
                raise InputError(
                    f"{type(model).__name__} counts the {graph.merged.shape[1]} duplicate edges of"
                    f" {graph.name!r}, which fgai merges; use `data = data.coalesce()` and train it on that"
                )
    known.add(model)


def check_arguments(model: nn.Module, arguments: tuple[str, ...]) -> None:
    """Raise if `model.forward` cannot be called with these arguments, by position.

    Raises:
        InputError: it takes fewer, or needs more; says what to do.
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return  # scripted: it says nothing of its arguments
    try:
        signature.bind(*arguments)
    except TypeError:
        call = ", ".join(arguments)
        raise InputError(
            f"{type(model).__name__}.forward takes {signature}, fgai calls it as model({call}); wrap it in a"
            f" module with `def forward(self, {call})`, which may call `self.model(Data(x=x,"
            " edge_index=edge_index))`; values per edge cannot be passed on: edges are re-ordered and change"
        ) from None


def check_dtype(model: nn.Module, graph: Graph) -> None:
    """Raise if features and parameters are of different types, e.g. float64 and float32.

    Raises:
        InputError: they are; says how to convert.
    """
    wanted = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    found = None if graph.features is None else graph.features.dtype
    if wanted is not None and found is not None and found != wanted:
        raise InputError(
            f"the features of {graph.name!r} are {found}, the parameters of {type(model).__name__} {wanted};"
            f" use `data.x = data.x.to({wanted})`"
        )


def _shuffled(edges: Tensor) -> Tensor:
    order = torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(0))
    return edges[:, order.to(edges.device)]


def _differ(one: Tensor, two: Tensor) -> bool:
    """Whether outputs differ by more than rounding; what is not finite cannot be compared."""
    if one.shape != two.shape:
        return True
    if not one.numel() or not one.is_floating_point():  # nothing to round
        return not torch.equal(one, two)
    slack = torch.finfo(one.dtype).eps ** 0.5 * one.abs().max()
    return bool((one - two).abs().max() > slack)


def _cuda(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
