"""`Edit`: how a perturbed graph differs from the clean one, and the rows each layer feels it at."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import InputError
from fgai.graph import Graph, GraphChange
from fgai.graph.change import both_ways
from fgai.sparse import Adjacency, edge_keys, key_ends, match_edges
from fgai.typed import typed


@typed
@dataclass(frozen=True, eq=False)
class Edit:
    """What was changed in a graph of N nodes, apart from the features themselves.

    Attributes:
        new: number of new nodes; they are N, N + 1, ...
        added: [2, K] new edges (source, destination), those of the new nodes included.
        removed: [R] positions of removed edges in the clean graph.
        rows: [C] old nodes whose features changed.
    """

    new: int
    added: Tensor
    removed: Tensor
    rows: Tensor

    def __post_init__(self) -> None:
        checks.whole(self.new, "new", 0)
        for name, dimensions in (("added", 2), ("removed", 1), ("rows", 1)):
            tensor = getattr(self, name)
            if tensor.dim() != dimensions or tensor.is_floating_point():
                got = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise InputError(f"`{name}` must hold integers in {dimensions} dimensions, got {got}")

    @classmethod
    def between(cls, graph: Graph, attacked: Graph) -> Edit:
        """Compare the edges of two graphs; the first nodes of `attacked` are those of `graph`."""
        ours, theirs = match_edges(graph.keys, attacked.keys)
        rows = None if attacked.features is None else attacked.features.rows
        return cls(
            attacked.num_nodes - graph.num_nodes,
            attacked.edge_index[:, _others(theirs, attacked.num_edges)],
            _others(ours, graph.num_edges),
            graph.keys.new_zeros(0) if rows is None else rows,
        )

    @classmethod
    def of(cls, change: GraphChange, graph: Graph) -> Edit:
        """Read the edit off a perturbation, without a pass over the edges of the graph."""
        none = torch.zeros(0, dtype=torch.long, device=graph.device)
        rows = none if change.rows is None else change.rows.to(graph.device)
        if change.endpoints is not None and change.endpoints.numel():
            endpoints = change.endpoints.to(graph.device)
            nodes = torch.arange(graph.num_nodes, graph.num_nodes + endpoints.shape[0], device=graph.device)
            new, old = nodes[:, None].expand_as(endpoints).flatten(), endpoints.flatten()
            loops = nodes if graph.has_loops else none
            added = torch.stack([torch.cat([new, old, loops]), torch.cat([old, new, loops])])
            return cls(int(endpoints.shape[0]), added, none, rows)
        removed, added = none, none.expand(2, 0)
        if change.removed is not None and change.removed.numel():
            removed = both_ways(graph, change.removed.to(graph.device))
        if change.edges is not None and change.edges.numel():
            pairs = torch.cat([change.edges, change.edges.flip(0)], dim=1).to(graph.device)
            keys = torch.unique(edge_keys(pairs[0], pairs[1]))
            spot = torch.searchsorted(graph.keys, keys).clamp(max=max(0, graph.num_edges - 1))
            there = graph.keys[spot] == keys if graph.num_edges else torch.zeros_like(keys, dtype=torch.bool)
            keys = keys[~there | torch.isin(spot, removed)]
            added = torch.stack(key_ends(keys))
        return cls(0, added, removed, rows)

    def start(self, num_nodes: int) -> Tensor:
        """Return the nodes whose input is not the clean one: changed rows, then the new nodes."""
        checks.whole(num_nodes, "num_nodes", 0)
        new = torch.arange(num_nodes, num_nodes + self.new, device=self.rows.device)
        return torch.cat([self.rows, new])

    def reached(self, adjacency: Adjacency, changed: Tensor) -> Tensor:
        """Return the other rows that a layer whose input differs at `changed` computes differently.

        They are the ends of edges out of `changed`, and the ends of added and removed edges.

        Args:
            adjacency: clean.
            changed: [S] distinct nodes.

        Returns:
            [P] sorted, disjoint from `changed`.
        """
        seen = torch.zeros(adjacency.num_nodes + self.new, dtype=torch.bool, device=changed.device)
        try:
            seen[adjacency.destination[outgoing(adjacency, changed)[0]]] = True
            seen[self.added[1]] = True
            seen[adjacency.destination[self.removed]] = True
            seen[changed] = False
        except IndexError as error:
            raise InputError(f"`changed` and the edit must be of this graph: {error}") from error
        return seen.nonzero().flatten()


def incoming(adjacency: Adjacency, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the edges into `nodes` [n], node after node, and which of the nodes each belongs to."""
    return _ranges(adjacency.rowptr, nodes, adjacency.num_nodes)


def outgoing(adjacency: Adjacency, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the edges out of `nodes` [n], node after node, and which of the nodes each belongs to."""
    spots, owner = _ranges(adjacency.colptr, nodes, adjacency.num_nodes)
    return adjacency.csc[spots], owner


def _ranges(pointer: Tensor, nodes: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
    """The positions `pointer[i]:pointer[i + 1]` of every node i; a node not in the structure has none."""
    inside = nodes.clamp(max=max(0, num_nodes - 1))
    first = pointer[inside]
    count = torch.where(nodes < num_nodes, pointer[inside + 1] - first, 0) if num_nodes else 0 * nodes
    owner = torch.repeat_interleave(torch.arange(nodes.numel(), device=nodes.device), count)
    before = torch.cumsum(count, 0) - count
    return torch.arange(owner.numel(), device=nodes.device) + (first - before)[owner], owner


def _others(positions: Tensor, count: int) -> Tensor:
    """The positions 0..count-1 that are not listed."""
    rest = torch.ones(count, dtype=torch.bool, device=positions.device)
    rest[positions] = False
    return rest.nonzero().flatten()
