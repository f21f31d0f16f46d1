"""First contact with a model: can it read the graph, and does it say here what it says by itself?"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fgai.attention.calls import check_arguments, fields_of
from fgai.attention.state import evaluating
from fgai.attention.wrapped import model_name
from fgai.cache import cached_on
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.graph.edge_values import VALUES
from fgai.sparse import edge_keys

Forward = Callable[[Tensor | None], Tensor]
"""From positions of edges [K] in any order, None for the graph's own, to what the model returns for them."""

_WORDS = {"x": "features", "edge_attr": "attributes of edges", "edge_weight": "weights of edges"}


def first_contact(model: nn.Module, graph: Graph, forward: Forward) -> None:
    """Make sure, once for a model and a graph, that fgai's call is the model's own function.

    fgai sorts edges, with their values, and merges duplicates, and attacks add and remove edges. Outputs must
    not depend on any of it: a model that keeps values per edge would pair them with other edges, without a
    word. A model whose outputs differ from call to call cannot be judged here; `evaluate` warns of it.

    Args:
        model: not fgai's own.
        graph: on its device.
        forward: the model on this graph, as a function of the order of the edges.

    Raises:
        InputError: it takes other arguments, reads features of another type, or gives other outputs when the
            same edges come in another order, or when duplicates are merged.
    """
    known: WeakSet[nn.Module] = cached_on(graph, "fgai.attention.contact", WeakSet)
    if model in known:
        return
    check_arguments(model, graph, fields_of(graph))
    check_dtype(model, graph)
    every = torch.arange(graph.num_edges, device=graph.device)
    with evaluating(model), torch.no_grad(), torch.random.fork_rng(_cuda(graph.device)):
        outputs = forward(None)
        same = forward(_shuffled(every))
        if differ(outputs, same) and not differ(outputs, forward(None)):
            raise InputError(
                f"{model_name(model)} gives other outputs when the edges of {graph.name!r} come in another"
                " order, and fgai sorts them: it must not keep values per edge; give them as `data.edge_attr`"
            )
        if graph.merged is not None:
            again = torch.searchsorted(graph.keys, edge_keys(*graph.merged))
            given = _shuffled(torch.cat([every, again]))
            if differ(outputs, forward(given)) and not differ(outputs, forward(None)):
                raise InputError(
                    f"{model_name(model)} counts the {graph.merged.shape[1]} duplicate edges of"
                    f" {graph.name!r}, which fgai merges; use `data = data.coalesce()` and train it on that"
                )
    known.add(model)


def check_dtype(model: nn.Module, graph: Graph) -> None:
    """Raise if features or values on edges are of another type than the parameters, e.g. float64.

    Raises:
        InputError: they are; says how to convert.
    """
    wanted = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    on_edges = {name: values for name in VALUES if (values := getattr(graph, name)) is not None}
    found = {name: values.dtype for name, values in on_edges.items() if values.is_floating_point()}
    if graph.features is not None:
        found["x"] = graph.features.dtype
    for name, dtype in found.items():
        if wanted is not None and dtype != wanted:
            raise InputError(
                f"the {_WORDS[name]} of {graph.name!r} are {dtype}, the parameters of {model_name(model)}"
                f" {wanted}; use `data.{name} = data.{name}.to({wanted})`"
            )


def _shuffled(order: Tensor) -> Tensor:
    steps = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))
    return order[steps.to(order.device)]


def differ(one: Tensor, two: Tensor) -> bool:
    """Whether outputs differ by more than rounding; what is not finite cannot be compared."""
    if one.shape != two.shape:
        return True
    if not one.numel() or not one.is_floating_point():  # nothing to round
        return not torch.equal(one, two)
    slack = torch.finfo(one.dtype).eps ** 0.5 * one.abs().max()
    return bool((one - two).abs().max() > slack)


def _cuda(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
