"""Calls of models: fgai's own as `model(graph)`, PyG models with the fields their arguments name, or wrapped.

A PyG model gets `x` and `edge_index` by position. The other fields of the graph (`edge_attr`, `edge_weight`,
`batch`) go to the arguments of these names; `batch` is the third argument if no argument has its name.
Values on edges that no argument takes are refused. `fgai.wrap` handles all other calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fgai.alone import alone
from fgai.attention.interface import (
    Call,
    GraphModel,
    Layerwise,
    TappedLayer,
    Wrapped,
    _check_dtype,
    evaluating,
    model_name,
    uncompiled,
)
from fgai.cache import cached_on
from fgai.errors import FgaiError, InputError
from fgai.graph import Graph
from fgai.graph.fields import VALUES
from fgai.sparse import edge_keys
from fgai.tasks import link_logits
from fgai.typed import typed

_ALWAYS = ("x", "edge_index")
_EXAMPLE = "`fgai.wrap(model, call=lambda m, g: m(g.x, g.edge_index))`, where g is a PyG `Data`"


@dataclass(frozen=True)
class _GraphModelAdapter:
    """Calls a `GraphModel`; `bare` is the model, not compiled."""

    model: nn.Module
    bare: GraphModel
    reads_weights: bool = True

    def prepare(self, graph: Graph) -> Graph:
        """Return `graph` as the model reads it, on its device, after checking that it can be read."""
        self.bare.check_graph(graph)
        return self.bare.prepare(graph).to(device_of(self.model, graph))

    def call(self, graph: Graph) -> Tensor:
        """Return the logits: a row per node [N, C], per link [L, 2] or per small graph [G, C]."""
        return _tensor(self.model(graph), self.model)

    @property
    def can_capture(self) -> bool:
        return self.bare.can_capture

    def layerwise(self) -> Layerwise | None:
        """Return the model as stages; None in training mode and while taps or hooks are set."""
        if self.bare.training:
            return None
        with alone():  # waits for hooks that fgai sets in another thread
            for module in self.bare.modules():
                if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)):
                    return None
                if isinstance(module, TappedLayer) and module.tap is not None:
                    return None
            return self.bare.layerwise()


@dataclass(frozen=True)
class _PyGAdapter:
    """Calls any other model as `model(x, edge_index)`; the model adds self-loops itself if it needs them.

    On a graph with links the model must return embeddings [N, D], whose dot products are the scores; on a
    batch of small graphs a row per small graph. A model that stores values per edge itself is refused: edges
    are sorted, and attacks add some.
    """

    model: nn.Module
    reads_weights: bool = False
    can_capture: bool = False

    def prepare(self, graph: Graph) -> Graph:
        """Return `graph` on the model's device, after checking once that fgai's call is the model's own."""
        graph = graph.to(device_of(self.model, graph))
        _check_model(self.model, graph, lambda order: self._outputs(graph, order))
        return graph

    def call(self, graph: Graph) -> Tensor:
        """Return the logits; features [N, F] are made dense."""
        outputs = self._outputs(graph)
        if graph.batch is not None or graph.links is None:
            return outputs
        return link_logits(outputs, graph.links.pairs)

    def _outputs(self, graph: Graph, order: Tensor | None = None) -> Tensor:
        """Return the model's output for the edges of `graph` in this order."""
        fields = _fields_of(graph, order)
        try:
            outputs = _call_with(self.model, fields)
        except (FgaiError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in fields.items())
            raise InputError(
                f"{model_name(self.model)} failed on {graph.name!r} with {shapes}: {error}; check how it is"
                " called, how many features it reads, and that it keeps nothing per node or edge"
            ) from error
        outputs = _tensor(outputs, self.model)
        if isinstance(uncompiled(self.model), Wrapped):
            _check_rows(outputs, graph, self.model)
        return outputs

    def layerwise(self) -> Layerwise | None:
        """Return None: the operations between the layers are not known."""
        return None


ModelAdapter = _GraphModelAdapter | _PyGAdapter
"""The way the rest of fgai calls a model; `adapter_of` finds it."""


@typed
def adapter_of(model: nn.Module) -> ModelAdapter:
    """Return `_GraphModelAdapter` for fgai's own models, compiled or not, else `_PyGAdapter`."""
    bare = uncompiled(model)
    return _GraphModelAdapter(model, bare) if isinstance(bare, GraphModel) else _PyGAdapter(model)


@typed
def prepared(model: nn.Module, graph: Graph) -> Graph:
    """Return `graph` on the model's device, with everything the model needs added (self-loops, encodings).

    A prepared graph is returned as it is.
    """
    return adapter_of(model).prepare(graph)


def device_of(model: nn.Module, graph: Graph) -> torch.device:
    """Return the device of a model's parameters; that of the graph if it has none."""
    parameter = next(model.parameters(), None)
    return graph.device if parameter is None else parameter.device


@typed
def wrap(model: nn.Module, call: Call, data: Any = None) -> Wrapped:
    """Return a model that fgai calls the way you do; accepted wherever fgai takes a model.

    A model whose `forward` takes `x`, `edge_index` and, by these names, the other fields of the data
    (`edge_attr`, `edge_weight`, `batch`) needs no wrapping. For any other, `call` computes the logits from a
    PyG `Data` with exactly these fields. Attacks pass graphs with more nodes and edges to it.

    On the first graph, outputs must not depend on the order of the edges. With `data` this is checked at
    once, and the output for fgai's copy of the graph must equal the output for `data` itself.

    Args:
        model: trained or not; kept as it is inside, as `.model`.
        call: `(model, data) → logits`, a row per node or per small graph. It must use the model it is given:
            copies of it are trained and attacked.
        data: a PyG `Data` or a `Graph` to try it on; optional.

    Returns:
        The wrapped model, called on a PyG `Data` or a `Graph`.

    Raises:
        InputError: `call` is no function, `model` is one of fgai's own, or, with `data`, the call fails,
            returns another shape, or another output for fgai's copy.

    Example:
        >>> import fgai, torch
        >>> from torch_geometric.nn import GATv2Conv
        >>> data = fgai.load_dataset("planted").to_data()
        >>> data.edge_attr = torch.rand(data.num_edges, 2)
        >>> conv = GATv2Conv(data.num_features, 5, edge_dim=2).eval()
        >>> mine = fgai.wrap(conv, lambda m, g: m(g.x, g.edge_index, g.edge_attr), data)
        >>> mine(data).shape
        torch.Size([2000, 5])
    """
    if not callable(call):
        raise InputError(f"`call` must be a function (model, data) → logits, got {type(call).__name__}")
    if isinstance(uncompiled(model), GraphModel | Wrapped):
        raise InputError(f"{type(model).__name__} needs no wrapping: fgai knows how to call it")
    wrapped = Wrapped(model, call)
    if data is None:
        return wrapped
    graph = prepared(wrapped, data if isinstance(data, Graph) else Graph.from_data(data))
    fields = _fields_of(graph)
    with evaluating(wrapped), torch.no_grad():
        ours = _call_with(wrapped, fields)
        try:
            theirs = wrapped(graph if isinstance(data, Graph) else data.clone().to(graph.device))
        except Exception as error:
            raise InputError(f"`call` failed on `data` itself: {error}") from error
        if _differ(ours, theirs) and not _differ(ours, _call_with(wrapped, fields)):
            raise InputError(
                f"{model_name(wrapped)} says something else of `data` than of what fgai keeps of it"
                f" ({', '.join(fields)}); put what else `call` reads into `x` or `edge_attr`"
            )
    return wrapped


def _differ(one: Tensor, two: Tensor) -> bool:
    """Whether outputs differ by more than rounding; values that are not finite cannot be compared."""
    if one.shape != two.shape:
        return True
    if not one.numel() or not one.is_floating_point():  # nothing to round
        return not torch.equal(one, two)
    slack = torch.finfo(one.dtype).eps ** 0.5 * one.abs().max()
    return bool((one - two).abs().max() > slack)


def _tensor(output: object, model: nn.Module) -> Tensor:
    if isinstance(output, Tensor):
        return output
    raise InputError(
        f"{model_name(model)} must return one tensor of logits, got {type(output).__name__}; say where"
        " they are: `fgai.wrap(model, call=lambda m, g: m(g.x, g.edge_index)[0])`"
    )


def _fields_of(graph: Graph, order: Tensor | None = None) -> dict[str, Tensor]:
    """Return the fields of a graph by their names in PyG, edges at the positions `order` [K] if given."""
    if graph.features is None:
        raise InputError(f"{graph.name!r} has no node features, which models need; give it some")
    on_edges = {name: value for name in VALUES if (value := getattr(graph, name)) is not None}
    edges = graph.edge_index
    if order is not None:
        edges = edges[:, order]
        on_edges = {name: value[order] for name, value in on_edges.items()}
    fields = {"x": graph.features.to_dense(), "edge_index": edges, **on_edges}
    return fields if graph.batch is None else {**fields, "batch": graph.batch}


def _call_with(model: nn.Module, fields: dict[str, Tensor]) -> Any:
    if isinstance(uncompiled(model), Wrapped):
        from torch_geometric.data import Data

        return model(Data(**fields, num_nodes=len(fields["x"])))
    if len(fields) == len(_ALWAYS):
        return model(fields["x"], fields["edge_index"])
    positional, named = _arguments(model, fields)
    return model(*(fields[name] for name in positional), **{name: fields[name] for name in named})


def _arguments(model: nn.Module, fields: dict[str, Tensor]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the fields that are passed by position and by name; raise for values that no argument takes."""
    signature = _signature(model)
    parameters = {} if signature is None else signature.parameters
    anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    others = [name for name in fields if name not in _ALWAYS]
    named = tuple(name for name in others if anything or name in parameters)
    unseen = [name for name in others if name not in named]
    if unseen == ["batch"] and not named:
        return (*_ALWAYS, "batch"), ()
    if unseen:
        takes = "" if signature is None else str(signature)
        raise InputError(
            f"`{unseen[0]}` of the graph would not be seen by {model_name(model)}.forward{takes}; name an"
            f" argument so, say how it is called ({_EXAMPLE}), or set `data.{unseen[0]} = None`"
        )
    return _ALWAYS, named


def _signature(model: nn.Module) -> inspect.Signature | None:
    """Return the signature of `forward`; None for scripted models, which have none."""
    with suppress(TypeError, ValueError):
        return inspect.signature(uncompiled(model).forward)
    return None


def _check_arguments(model: nn.Module, graph: Graph, fields: dict[str, Tensor]) -> None:
    """Raise if `model.forward` cannot be called with the fields of the graph."""
    if isinstance(uncompiled(model), Wrapped):
        return
    positional, named = _arguments(model, fields)
    signature = _signature(model)
    if signature is None:
        return
    try:
        signature.bind(*positional, **dict.fromkeys(named))
    except TypeError:
        missing = [name for name in VALUES if name in signature.parameters and name not in fields]
        lack = f"; {graph.name!r} has no `{missing[0]}`, give `data.{missing[0]}`" if missing else ""
        ours = f"model({', '.join((*positional, *(f'{name}={name}' for name in named)))})"
        raise InputError(
            f"{model_name(model)}.forward takes {signature}, fgai calls it as {ours}{lack};"
            f" say how it is called: {_EXAMPLE}"
        ) from None


def _check_rows(outputs: Tensor, graph: Graph, model: nn.Module) -> None:
    """Raise unless there is a row for every node, or for every small graph of a batch."""
    rows = graph.num_nodes if graph.batch is None or graph.links is not None else graph.num_graphs
    if outputs.dim() != 2 or outputs.shape[0] != rows:
        unit = "node" if rows == graph.num_nodes else "graph"
        raise InputError(
            f"`call` must return logits [{rows}, classes] on {graph.name!r}, a row per {unit}, got"
            f" {tuple(outputs.shape)} from {model_name(model)}"
        )


def _check_model(model: nn.Module, graph: Graph, forward: Callable[[Tensor | None], Tensor]) -> None:
    """Check, once for a model and a graph, that its outputs do not depend on the order of the edges.

    fgai sorts edges, merges duplicates, and attacks add and remove edges; a model that stores values per edge
    would pair them with other edges. A model whose outputs differ from call to call cannot be judged.
    """
    checked: WeakSet[nn.Module] = cached_on(graph, "fgai.attention.calls", WeakSet)
    if model in checked:
        return
    _check_arguments(model, graph, _fields_of(graph))
    _check_dtype(model, graph)
    every = torch.arange(graph.num_edges, device=graph.device)
    cuda = [graph.device] if graph.device.type == "cuda" else []
    with evaluating(model), torch.no_grad(), torch.random.fork_rng(cuda):
        outputs = forward(None)
        if _differ(outputs, forward(_shuffled(every))) and not _differ(outputs, forward(None)):
            raise InputError(
                f"{model_name(model)} gives other outputs when the edges of {graph.name!r} come in another"
                " order, and fgai sorts them: it must not keep values per edge; give them as `data.edge_attr`"
            )
        if graph.merged is not None:
            again = torch.searchsorted(graph.keys, edge_keys(*graph.merged))
            repeated = _shuffled(torch.cat([every, again]))
            if _differ(outputs, forward(repeated)) and not _differ(outputs, forward(None)):
                raise InputError(
                    f"{model_name(model)} counts the {graph.merged.shape[1]} duplicate edges of"
                    f" {graph.name!r}, which fgai merges; use `data = data.coalesce()` and train it on that"
                )
    checked.add(model)


def _shuffled(order: Tensor) -> Tensor:
    steps = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))
    return order[steps.to(order.device)]
