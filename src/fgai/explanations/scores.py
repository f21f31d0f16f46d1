"""`EdgeScores`, the scores of one node's edges; `EdgeExplainer`, which computes them; receptive fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fgai import checks
from fgai.attention import prepared
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.sparse import edge_name
from fgai.typed import typed


@dataclass(frozen=True, eq=False)
class _ReceptiveField:
    """The receptive field of a node as a graph, without self-loops."""

    x: Tensor  # [n, F], features of its nodes
    edge_index: Tensor  # [2, K], between positions in `x`
    keys: Tensor  # [K] of the same edges in the whole graph, sorted
    reached: Tensor  # bool [K]; False for edges outside, when `x` is the whole graph
    index: int  # position of the node in `x`


class _ReceptiveFields:
    """The receptive fields of a graph's nodes through `hops` layers that pass messages."""

    def __init__(self, graph: Graph, hops: int) -> None:
        if graph.features is None:
            raise InputError(f"{graph.name!r} has no node features; add some, e.g. node degrees")
        adjacency = graph.adjacency
        kept = adjacency.source != adjacency.destination
        self.source, self.destination = adjacency.source[kept], adjacency.destination[kept]
        self.keys, self.x, self.hops = adjacency.keys[kept], graph.features.to_dense(), hops

    def edges(self, node: int) -> Tensor:
        """Bool [E]: True for the edges of a node's field, into nodes at most `hops - 1` steps away."""
        reached = torch.zeros(self.x.shape[0], dtype=torch.bool, device=self.x.device)
        reached[node] = True
        for _ in range(self.hops):
            used = reached[self.destination]
            reached[self.source[used]] = True
        return used

    def around(self, node: int) -> _ReceptiveField:
        """The field of a node as a graph of its own, on which its output is the same."""
        used = self.edges(node)
        ends = torch.stack([self.source[used], self.destination[used]]).flatten()
        nodes, index = torch.unique(torch.cat([ends, ends.new_tensor([node])]), return_inverse=True)
        return _ReceptiveField(
            self.x[nodes], index[:-1].view(2, -1), self.keys[used], used[used], int(index[-1])
        )

    def whole(self, node: int) -> _ReceptiveField:
        """The whole graph, for models whose outputs depend on more than the messages in the field."""
        edge_index = torch.stack([self.source, self.destination])
        return _ReceptiveField(self.x, edge_index, self.keys, self.edges(node), node)


@typed
@dataclass(frozen=True, eq=False)
class EdgeScores:
    """The scores of one node: one for every edge of its receptive field, without self-loops.

    Attributes:
        node: the node that is explained.
        keys: [K] sorted keys of the edges, see `fgai.sparse.edge_keys`.
        values: [K], larger for edges that matter more; only their order within a node is comparable.

    Example:
        >>> from fgai.sparse import edge_keys
        >>> keys = edge_keys(torch.tensor([0, 3]), torch.tensor([2, 2]))
        >>> EdgeScores(2, keys, torch.tensor([0.5, 0.75])).on(keys[1:]).tolist()
        [0.75]
    """

    node: int
    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        _check_keys(self.keys)
        if self.values.shape != self.keys.shape:
            got = tuple(self.values.shape)
            raise InputError(f"`values` must hold one score for each of {self.keys.numel()} edges, got {got}")
        if bool((self.keys.diff() <= 0).any()):
            raise InputError("`keys` must be sorted, each edge once")

    def on(self, keys: Tensor) -> Tensor:
        """Return the scores of the given edges [E], matched by (source, destination).

        Raises:
            InputError: an edge that is not in the field.
        """
        _check_keys(keys)
        present = torch.isin(keys, self.keys)
        if not bool(present.all()):
            missing = edge_name(int(keys[~present][0]))
            raise InputError(f"edge {missing} is not in the receptive field of node {self.node}")
        return self.values[torch.searchsorted(self.keys, keys)]


@typed
class EdgeExplainer(ABC):
    """One explainer of one model, called with a graph and nodes; a subclass defines `explain`.

    Args:
        model: not modified.
        seed: of random numbers.
    """

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self.model, self.seed = model, checks.seed(seed)

    def __call__(self, data: Any, nodes: Sequence[int] | Tensor) -> list[EdgeScores]:
        """Return the scores of some nodes of a graph, in their order.

        Args:
            data: a `Graph` or PyG `Data`: the clean one, or one with nodes or edges added or removed.
            nodes: their numbers.

        Raises:
            InputError: no such node, or a graph the model cannot read.
        """
        graph = prepared(self.model, as_graph(data))
        try:
            numbers = torch.as_tensor(nodes)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"`nodes` must hold the numbers of nodes, got {nodes!r:.100}") from error
        if numbers.dim() != 1 or numbers.dtype == torch.bool:
            raise InputError("`nodes` must hold the numbers of nodes in one dimension")
        if numbers.numel():
            numbers = checks.positions(numbers, graph.num_nodes, "nodes")
        return self.explain(graph, numbers.tolist())

    @abstractmethod
    def explain(self, graph: Graph, nodes: list[int]) -> list[EdgeScores]:
        """Return the scores of nodes of a graph that is prepared for the model."""


def _check_keys(keys: Tensor) -> None:
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise InputError(f"`keys` must hold int64 keys of edges, got {keys.dtype} {tuple(keys.shape)}")
