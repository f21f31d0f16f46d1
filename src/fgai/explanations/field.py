"""`Field`: what a node's prediction reads, as a small graph of its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fgai.errors import InputError
from fgai.graph import Graph


@dataclass(frozen=True, eq=False)
class Field:
    """A node with the edges around it, to search for an explanation in.

    Attributes:
        x: [n, F], features of its nodes.
        edge_index: [2, K], between positions in `x`; self-loops are left out.
        keys: [K] of the same edges in the whole graph, sorted.
        heard: bool [K], whether the node's output can hear of them.
        index: position of the node in `x`.
    """

    x: Tensor
    edge_index: Tensor
    keys: Tensor
    heard: Tensor
    index: int


class Fields:
    """The receptive fields of a graph's nodes.

    Args:
        graph: with features.
        hops: layers that pass messages.

    Raises:
        InputError: it has no features.
    """

    def __init__(self, graph: Graph, hops: int) -> None:
        if graph.features is None:
            raise InputError(f"{graph.name!r} has no node features; add some, e.g. node degrees")
        adjacency = graph.adjacency
        kept = adjacency.source != adjacency.destination
        self.source, self.destination = adjacency.source[kept], adjacency.destination[kept]
        self.keys, self.x, self.hops = adjacency.keys[kept], graph.features.to_dense(), hops

    @property
    def edge_index(self) -> Tensor:
        """[2, E] of the whole graph, without self-loops."""
        return torch.stack([self.source, self.destination])

    def edges(self, node: int) -> Tensor:
        """Bool [E]: the edges of the field, into nodes at most `hops - 1` steps away."""
        reached = torch.zeros(self.x.shape[0], dtype=torch.bool, device=self.x.device)
        reached[node] = True
        for _ in range(self.hops):
            used = reached[self.destination]
            reached[self.source[used]] = True
        return used

    def around(self, node: int) -> Field:
        """The field of a node as a graph of its own, on which its output is the same."""
        used = self.edges(node)
        ends = torch.stack([self.source[used], self.destination[used]])
        centre = torch.tensor([node], device=ends.device)
        nodes, places = torch.unique(torch.cat([ends.flatten(), centre]), return_inverse=True)
        return Field(self.x[nodes], places[:-1].view(2, -1), self.keys[used], used[used], int(places[-1]))

    def whole(self, node: int) -> Field:
        """The whole graph, for models in which more than messages joins nodes."""
        return Field(self.x, self.edge_index, self.keys, self.edges(node), node)
