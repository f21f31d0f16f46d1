"""Heterogeneous models on one graph of all nodes: `HeteroLayout`, `HeteroModel`, adapters of HAN and HGT.

HANConv and HGTConv compute attention in `message`, which the adapters replace; they call the tap by type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, leaky_relu
from torch_geometric.data import HeteroData
from torch_geometric.nn import HANConv, HGTConv
from torch_geometric.nn.module_dict import ModuleDict
from torch_geometric.nn.to_hetero_transformer import key2str
from torch_geometric.utils import softmax

from fgai.attention import GraphModel, Tap, Wrapped, register_adapter
from fgai.attention.interface import EdgeType, override, uncompiled
from fgai.attention.pyg import check_layer, message_edges
from fgai.errors import AttentionError, InputError
from fgai.graph import Graph
from fgai.typed import typed

HeteroCall = Callable[[Any, Any], Any]  # (model, PyG `HeteroData`) → logits of the target, or those by type


@typed
@dataclass(frozen=True, eq=False, kw_only=True)
class HeteroLayout:
    """The position of every type of nodes and edges in one graph of all nodes.

    Nodes are numbered type by type, injected ones come last. Features are padded with zeros to the widest
    type. One edge of the graph represents all edges from one node to another: `edge_attr`, bool [E, types],
    holds their types. New edges have no type there; their type is `injected`.

    Attributes:
        counts: nodes of each type, in the order they are numbered; without injected ones.
        widths: features of each type.
        edge_types: in the order of the columns of `edge_attr`.
        target: the type of nodes whose logits the model gives, or None.
        injected: the type of new edges, which go from new nodes to those of the target; None allows none.
    """

    counts: Mapping[str, int]
    widths: Mapping[str, int]
    edge_types: tuple[EdgeType, ...]
    target: str | None = None
    injected: EdgeType | None = None

    @cached_property
    def offsets(self) -> dict[str, int]:
        """The number of each type's first node."""
        return dict(zip(self.counts, accumulate(self.counts.values(), initial=0), strict=False))

    @cached_property
    def num_nodes(self) -> int:
        """All nodes but injected ones."""
        return sum(self.counts.values())

    def _range(self, node_type: str) -> tuple[int, int]:
        first = self.offsets[node_type]
        return first, first + self.counts[node_type]

    def to_global(self, node_type: str, nodes: Tensor) -> Tensor:
        """Return numbers in the graph for numbers within a type, whose last nodes are injected ones."""
        count = self.counts[node_type]
        return torch.where(nodes < count, nodes + self.offsets[node_type], nodes - count + self.num_nodes)

    def to_local(self, node_type: str, nodes: Tensor) -> Tensor:
        """Return numbers within a type for numbers in the graph; the inverse of `to_global`."""
        injected = nodes - self.num_nodes + self.counts[node_type]
        return torch.where(nodes < self.num_nodes, nodes - self.offsets[node_type], injected)

    def ends(self, edge_type: EdgeType, source: Tensor, destination: Tensor) -> tuple[Tensor, Tensor]:
        """Return numbers in the graph for the ends of edges, numbered within their types."""
        return self.to_global(edge_type[0], source), self.to_global(edge_type[2], destination)

    def place(self, path: str) -> tuple[str, EdgeType]:
        """Return a layer's name and the type of its edges by its path; `AttentionError` if none."""
        names = {key(kind): kind for kind in self.edge_types for key in (key2str, ModuleDict.to_internal_key)}
        words = path.split(".")
        for word in reversed(words):
            if word in names:
                return ".".join(other for other in words if other != word), names[word]
        text = f"layer {path!r} does not say which type of edges it attends to"
        raise AttentionError(f"{text}; models of `to_hetero`, `HeteroConv`, `HANConv` and `HGTConv` do")

    def split(self, data: Any) -> HeteroData:
        """Return features and edges by type, from a PyG `Data` of the whole graph.

        Edges from existing nodes to injected ones are left out unless they are of the injected type, too.
        `InputError` for a new edge that the injected type does not allow.
        """
        hetero = HeteroData()
        for name, width in self.widths.items():
            x = data.x[slice(*self._range(name)), :width]
            if self.injected is not None and self.injected[0] == name and len(data.x) > self.num_nodes:
                x = torch.cat([x, data.x[self.num_nodes :, :width]])
            hetero[name].x = x
        (source, destination), types = data.edge_index, data.edge_attr
        added = self._added(source, destination, ~types.any(1))
        for column, kind in enumerate(self.edge_types):
            chosen = types[:, column] | added if kind == self.injected else types[:, column]
            ends = self.to_local(kind[0], source[chosen]), self.to_local(kind[2], destination[chosen])
            hetero[kind].edge_index = torch.stack(ends)
        return hetero

    def _pad_logits(self, logits: Tensor, num_nodes: int) -> Tensor:
        """Return logits of the target nodes as rows of the whole graph [num_nodes, C]; zeros elsewhere."""
        assert self.target is not None
        count = self.counts[self.target]
        if self.injected is not None and self.injected[0] == self.target:
            count += num_nodes - self.num_nodes
        if logits.dim() != 2 or logits.shape[0] != count:
            text = f"the model must return logits [{count}, classes] of the {self.target!r} nodes"
            raise InputError(f"{text}, got {tuple(logits.shape)}; say where they are with `call`")
        rows = self.to_global(self.target, torch.arange(count, device=logits.device))
        return logits.new_zeros(num_nodes, logits.shape[1]).index_copy(0, rows, logits)

    def _added(self, source: Tensor, destination: Tensor, new: Tensor) -> Tensor:
        """The mask [E] of new edges that have the injected type."""
        if not bool(new.any()):
            return new
        if self.injected is None:
            raise InputError("new edges must have a type; say which: `edge_type=(source, relation, target)`")
        start, _, end = self.injected
        added = new & self._is_of(start, source) & self._is_of(end, destination)
        reverse = (destination >= self.num_nodes) & (self._is_of(end, source) | (source == destination))
        if bool((new & ~added & ~reverse).any()):
            text = f"new edges are of type {self.injected} and go from {start!r} to {end!r} nodes, and some"
            raise InputError(f"{text} join others; use a threat that injects nodes, or another `edge_type`")
        return added

    def _is_of(self, node_type: str, nodes: Tensor) -> Tensor:
        first, end = self._range(node_type)
        own = (nodes >= first) & (nodes < end)
        assert self.injected is not None
        return own | (nodes >= self.num_nodes) if node_type == self.injected[0] else own


def _call_by_type(model: Any, data: Any) -> Any:
    return model(data.x_dict, data.edge_index_dict)


@typed
class HeteroModel(Wrapped):
    """A heterogeneous model `model` together with the `layout` of the graph it is called on.

    Accepted wherever fgai takes a model; its attention has an entry for every layer and type of edges.
    """

    def __init__(self, model: nn.Module, layout: HeteroLayout, call: HeteroCall | None = None) -> None:
        if call is not None and not callable(call):
            raise InputError(f"`call` must be a function (model, data) → logits, got {type(call).__name__}")
        if isinstance(uncompiled(model), Wrapped | GraphModel):
            name = type(model).__name__
            raise InputError(f"`model` must be a heterogeneous model of PyG's layers, got {name}")
        super().__init__(model, _call_by_type if call is None else call)
        self.layout = layout

    def forward(self, data: Any) -> Tensor:
        """Return logits [N, C] of a PyG `Data` or a `Graph` with the layout; 0 for other nodes."""
        graph = data.to_data() if isinstance(data, Graph) else data
        outputs: Any = self.call(self.model, self.layout.split(graph))
        target = self.layout.target
        if target is None:
            return torch.zeros_like(graph.x[:, :1])
        if isinstance(outputs, Mapping):
            types = ", ".join(repr(name) for name, one in outputs.items() if one is not None)
            outputs = outputs.get(target)
            if outputs is None:
                raise InputError(f"the model returns no logits of {target!r} nodes, but of {types or 'none'}")
        if not isinstance(outputs, Tensor):
            text = f"the model must return logits, or those by type of nodes, got {type(outputs).__name__}"
            raise InputError(f"{text}; say where they are with `call`")
        logits: Tensor = self.layout._pad_logits(outputs, graph.num_nodes)
        return logits


class _TypedEdges(NamedTuple):
    """The edges of one type in a layer's input, ends numbered within their types."""

    edge_type: EdgeType
    source: Tensor
    destination: Tensor
    num_nodes: tuple[int, int]

    def call(self, tap: Tap, attention: Tensor, scores: Tensor) -> Tensor:
        """Return the tap's output for the attention on these edges."""
        ends = self.source, self.destination, self.num_nodes
        return tap(attention, *ends, scores=lambda: scores, edge_type=self.edge_type)


@contextmanager
def _edges_by_type(layer: Any) -> Iterator[list[_TypedEdges]]:
    """Yield a list that every run of the layer fills with its edges by type, in the order given."""
    edges: list[_TypedEdges] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = dict(zip(("x_dict", "edge_index_dict"), args, strict=False)) | kwargs
        sizes = {name: int(x.shape[0]) for name, x in inputs["x_dict"].items()}
        edges[:] = [
            _TypedEdges(kind, *message_edges(layer, one), (sizes[kind[0]], sizes[kind[2]]))
            for kind, one in inputs["edge_index_dict"].items()
        ]

    handle = layer.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield edges
    finally:
        handle.remove()


@contextmanager
def _han(layer: Any, tap: Tap) -> Iterator[None]:
    """Attention `softmax_j(LeakyReLU(a_src · h_j + a_dst · h_i))` of HANConv, one run for each type."""
    check_layer(layer, "message", HANConv)

    def message(
        x_j: Tensor, alpha_i: Tensor, alpha_j: Tensor, index: Tensor, ptr: Tensor | None, size_i: int | None
    ) -> Tensor:
        scores = leaky_relu(alpha_j + alpha_i, layer.negative_slope)
        attention = edges.pop(0).call(tap, softmax(scores, index, ptr, size_i), scores)
        weights = dropout(attention, p=layer.dropout, training=layer.training)
        return (x_j * weights.view(-1, layer.heads, 1)).view(-1, layer.out_channels)

    with _edges_by_type(layer) as edges, override(layer, "message", message):
        yield


@contextmanager
def _hgt(layer: Any, tap: Tap) -> Iterator[None]:
    """Attention `softmax_j(p · <q_i, W k_j> / √D)` of HGTConv, over the edges of all types in a row."""
    check_layer(layer, "message", HGTConv)

    def message(
        k_j: Tensor,
        q_i: Tensor,
        v_j: Tensor,
        edge_attr: Tensor,
        index: Tensor,
        ptr: Tensor | None,
        size_i: int | None,
    ) -> Tensor:
        scores = (q_i * k_j).sum(dim=-1) * edge_attr / math.sqrt(q_i.size(-1))
        attention = softmax(scores, index, ptr, size_i)
        sizes = [len(one.source) for one in edges]
        by_type = zip(edges, torch.split(attention, sizes), torch.split(scores, sizes), strict=True)
        outputs = [one.call(tap, own, own_scores) for one, own, own_scores in by_type]
        return (v_j * torch.cat(outputs).view(-1, layer.heads, 1)).view(-1, layer.out_channels)

    with _edges_by_type(layer) as edges, override(layer, "message", message):
        yield


register_adapter(HANConv, _han)
register_adapter(HGTConv, _hgt)
