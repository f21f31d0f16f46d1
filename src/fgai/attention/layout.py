"""`HeteroLayout`: the nodes and edges of a heterogeneous graph as one `Graph`, and back again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fgai.attention.tap import EdgeType
from fgai.errors import AttentionError, InputError
from fgai.typed import typed

if TYPE_CHECKING:
    from torch_geometric.data import HeteroData


@typed
@dataclass(frozen=True, eq=False, kw_only=True)
class HeteroLayout:
    """Where every type of nodes and edges stands in one graph of all nodes.

    Nodes are numbered type by type, injected ones come last. Features are padded with zeros to the widest
    type. An edge of the graph stands for all edges from one node to another, whatever their type: which there
    are says `edge_attr`, bool [E, types]. New edges, of which it says nothing, are of the type `injected`.

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

    @property
    def peers(self) -> tuple[int, int] | None:
        """The first node of the type that injected ones have, and the one after its last; None without."""
        if self.injected is None:
            return None
        first = self.offsets[self.injected[0]]
        return first, first + self.counts[self.injected[0]]

    def numbers(self, node_type: str, nodes: Tensor) -> Tensor:
        """From numbers within a type to those in the graph; injected nodes are the type's last ones."""
        count = self.counts[node_type]
        return torch.where(nodes < count, nodes + self.offsets[node_type], nodes - count + self.num_nodes)

    def within(self, node_type: str, nodes: Tensor) -> Tensor:
        """From numbers in the graph to those within a type; the other way round than `numbers`."""
        later = nodes - self.num_nodes + self.counts[node_type]
        return torch.where(nodes < self.num_nodes, nodes - self.offsets[node_type], later)

    def ends(self, edge_type: EdgeType, source: Tensor, destination: Tensor) -> tuple[Tensor, Tensor]:
        """Return both ends of edges, given within their types, by their numbers in the graph."""
        return self.numbers(edge_type[0], source), self.numbers(edge_type[2], destination)

    def place(self, path: str) -> tuple[str, EdgeType]:
        """Tell a layer's name and the type of its edges from its place in a model.

        `to_hetero` and `HeteroConv` keep a layer per type of edges, under the name of the type.

        Raises:
            AttentionError: no type's name is part of the path.
        """
        words = path.split(".")
        for word in reversed(words):
            if word in self._written:
                return ".".join(other for other in words if other != word), self._written[word]
        raise AttentionError(
            f"layer {path!r} does not say which type of edges it attends to; models of `to_hetero`,"
            " `HeteroConv`, `HANConv` and `HGTConv` do"
        )

    @cached_property
    def _written(self) -> dict[str, EdgeType]:
        """Types of edges by what PyG calls a layer of theirs."""
        from torch_geometric.nn.module_dict import ModuleDict
        from torch_geometric.nn.to_hetero_transformer import key2str

        return {
            name(kind): kind for kind in self.edge_types for name in (key2str, ModuleDict.to_internal_key)
        }

    def split(self, data: Any) -> HeteroData:
        """Return features and edges by type, from a PyG `Data` of the whole graph.

        Edges from existing nodes to injected ones are left out unless they are of the injected type, too.

        Raises:
            InputError: a new edge joins nodes that the injected type does not join.
        """
        from torch_geometric.data import HeteroData

        found = HeteroData()
        for name in self.counts:
            found[name].x = self._features(name, data.x)
        (source, destination), known = data.edge_index, data.edge_attr
        added = self._added(source, destination, ~known.any(1))
        for column, kind in enumerate(self.edge_types):
            there = known[:, column] | added if kind == self.injected else known[:, column]
            ends = self.within(kind[0], source[there]), self.within(kind[2], destination[there])
            found[kind].edge_index = torch.stack(ends)
        return found

    def spread(self, logits: Tensor, num_nodes: int) -> Tensor:
        """Return logits of the target nodes as rows of the whole graph [num_nodes, C]; zeros elsewhere.

        Raises:
            InputError: there is not one row for every target node.
        """
        assert self.target is not None
        count = self.counts[self.target]
        if self.injected is not None and self.injected[0] == self.target:
            count += num_nodes - self.num_nodes
        if logits.dim() != 2 or logits.shape[0] != count:
            raise InputError(
                f"the model must return logits [{count}, classes] of the {self.target!r} nodes, got"
                f" {tuple(logits.shape)}; say where they are with `call`"
            )
        rows = self.numbers(self.target, torch.arange(count, device=logits.device))
        return logits.new_zeros(num_nodes, logits.shape[1]).index_copy(0, rows, logits)

    def _features(self, node_type: str, x: Tensor) -> Tensor:
        first, width = self.offsets[node_type], self.widths[node_type]
        own = x[first : first + self.counts[node_type], :width]
        if self.injected is None or self.injected[0] != node_type or len(x) == self.num_nodes:
            return own
        return torch.cat([own, x[self.num_nodes :, :width]])

    def _added(self, source: Tensor, destination: Tensor, new: Tensor) -> Tensor:
        """Bool [E]: which of the new edges are of the injected type."""
        if not bool(new.any()):
            return new
        if self.injected is None:
            raise InputError("new edges must have a type; say which: `edge_type=(source, relation, target)`")
        start, _, end = self.injected
        added = new & self._is_of(start, source) & self._is_of(end, destination)
        heard = (destination >= self.num_nodes) & (self._is_of(end, source) | (source == destination))
        if bool((new & ~added & ~heard).any()):
            raise InputError(
                f"new edges are of type {self.injected} and go from {start!r} to {end!r} nodes, and some join"
                " others; use a threat that injects nodes, or another `edge_type`"
            )
        return added

    def _is_of(self, node_type: str, nodes: Tensor) -> Tensor:
        first = self.offsets[node_type]
        own = (nodes >= first) & (nodes < first + self.counts[node_type])
        assert self.injected is not None
        return own | (nodes >= self.num_nodes) if node_type == self.injected[0] else own
