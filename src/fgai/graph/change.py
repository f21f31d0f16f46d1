"""`GraphChange`: new nodes, added or removed edges, and changed features of a graph."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from math import nan

import torch
from torch import Tensor

from fgai.graph.graph import Graph
from fgai.sparse import EdgeMap, Features, edge_keys, match_edges
from fgai.typed import typed


@typed
@dataclass(frozen=True, eq=False)
class GraphChange:
    """New nodes, or edges to add and remove, and changes of features; None for what does not change.

    New nodes are joined to `endpoints` [M, e] (then `edges` and `removed` are ignored). They have `features`
    [M, F], zeros if None, or `entry_values` [M, D], see `Graph`. `edges` [2, K] are added, `removed` [2, K]
    are removed, both in both directions. `delta` [R, F] is added to the features of existing nodes `rows`.
    """

    endpoints: Tensor | None = None
    features: Tensor | None = None
    edges: Tensor | None = None
    rows: Tensor | None = None
    delta: Tensor | None = None
    removed: Tensor | None = None
    entry_values: Tensor | None = None

    def apply(self, graph: Graph) -> tuple[Graph, EdgeMap]:
        """Return the changed graph and the `EdgeMap` of the edges that are in both."""
        positions = torch.arange(graph.num_edges, device=graph.device)
        edge_map = EdgeMap(positions, positions, graph.num_edges, graph.num_edges)
        if self.rows is not None and self.delta is not None and graph.features is not None:
            graph = graph.replace(features=graph.features.perturb(self.rows, self.delta))
        if self.endpoints is not None and self.endpoints.numel():
            attacked, edge_map = graph.inject(self.endpoints, self.features)
            return attacked.replace(entry_values=self.entry_values), edge_map
        if self.removed is not None and self.removed.numel():
            graph, edge_map = graph.remove(both_ways(graph, self.removed))
        if self.edges is not None and self.edges.numel():
            graph, added = graph.inject_edges(torch.cat([self.edges, self.edges.flip(0)], dim=1))
            edge_map = EdgeMap(
                edge_map.before, added.after[edge_map.after], edge_map.num_before, added.num_after
            )
        return graph, edge_map

    def features_on(self, graph: Graph) -> Features | None:
        """Return the features of the changed graph; gradients flow to `features` and `delta`."""
        features = graph.features
        if features is not None and self.rows is not None and self.delta is not None:
            features = features.perturb(self.rows, self.delta)
        if features is not None and self.endpoints is not None and self.endpoints.numel():
            zeros = torch.zeros(len(self.endpoints), features.num_columns, dtype=features.dtype)
            new = zeros if self.features is None else self.features
            features = features.append(new.to(features.device))
        return features

    def detach(self) -> GraphChange:
        """Return a copy without gradient history."""
        tensors = (getattr(self, field.name) for field in fields(self))
        return GraphChange(*(None if one is None else one.detach().clone() for one in tensors))


class ChangedEdges:
    """A copy of the edges and rows of a change, to compare others with; tensors are read once."""

    def __init__(self, change: GraphChange) -> None:
        self._copy = replace(change, features=None, delta=None, entry_values=None).detach()
        self._last = _versions(change)

    def match(self, change: GraphChange) -> bool:
        """Whether `change` has the same edges and rows."""
        now = _versions(change)
        if all(one is two and new == old for (one, new), (two, old) in zip(now, self._last, strict=True)):
            return True
        for (tensor, _), (copy, _) in zip(now, _versions(self._copy), strict=True):
            if tensor is not copy and (tensor is None or copy is None or not torch.equal(tensor, copy)):
                return False
        self._last = now
        return True


def _versions(change: GraphChange) -> list[tuple[Tensor | None, float]]:
    """Return edges and rows, each with PyTorch's count of writes to it; NaN for inference tensors."""
    tensors = change.endpoints, change.edges, change.removed, change.rows
    return [(t, 0 if t is None else nan if t.is_inference() else t._version) for t in tensors]


def both_ways(graph: Graph, pairs: Tensor) -> Tensor:
    """Return the positions of the edges of `graph` that join `pairs` [2, K], in either direction."""
    ends = torch.cat([pairs, pairs.flip(0)], dim=1)
    return match_edges(torch.unique(edge_keys(ends[0], ends[1])), graph.keys)[1]
