"""Graphs for the tests: hypothesis strategies, small fixed graphs and slow edge lists."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from fgai.graph import Graph

Edge = tuple[int, int]
Sample = tuple[int, list[Edge]]
MAX_NODES = 9


@st.composite
def edge_sets(draw: st.DrawFn, min_nodes: int = 1) -> tuple[int, list[Edge]]:
    """A number of nodes and distinct directed edges, loops and isolated nodes included; perhaps no edge."""
    nodes = draw(st.integers(min_nodes, MAX_NODES))
    node = st.integers(0, nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=3 * nodes, unique=True))
    return nodes, edges


def edge_tensor(edges: list[Edge]) -> Tensor:
    """[2, E] in the order given."""
    return torch.tensor(edges, dtype=torch.long).reshape(-1, 2).t()


def build(nodes: int, edges: list[Edge], width: int = 3, **fields: Any) -> Graph:
    """A graph with features 10·node + column, so that every row is told apart."""
    features = 10.0 * torch.arange(nodes)[:, None] + torch.arange(width)
    return Graph.from_edges(edge_tensor(edges), nodes, features, **fields)


def listed(graph: Graph) -> list[Edge]:
    """The edges (source, destination) in the graph's order."""
    return list(zip(*graph.edge_index.tolist(), strict=True)) if graph.num_edges else []


def in_order(edges: set[Edge] | list[Edge]) -> list[Edge]:
    """Sorted by (destination, source), by Python."""
    return sorted(edges, key=lambda edge: (edge[1], edge[0]))


def small_data(
    seed: int = 0, nodes: int = 40, classes: int = 3, width: int = 6, *, covered: bool = False
) -> Graph:
    """A learnable node classification graph: features point at the class, edges mostly join equals.

    The last node is isolated, unless the graph is `covered`: then every node has a training or validation
    node among its neighbours. Masks: training, validation and test nodes, none twice.
    """
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(nodes) % classes
    features = torch.nn.functional.one_hot(y, width).float() + 0.4 * torch.randn(
        nodes, width, generator=generator
    )
    ends = torch.randint(0, nodes - 1, (2, 5 * nodes), generator=generator)
    keep = (y[ends[0]] == y[ends[1]]) | (torch.rand(ends.shape[1], generator=generator) < 0.15)
    ends = ends[:, keep & (ends[0] != ends[1])]
    part = torch.randperm(nodes, generator=generator)
    if covered:
        ends = torch.cat([ends, torch.stack([part, part[(torch.arange(nodes) + 1) % 22]])], 1)
    masks = {
        name: torch.zeros(nodes, dtype=torch.bool).index_fill(0, part[a:b], True)
        for name, a, b in (("train_mask", 0, 12), ("val_mask", 12, 22), ("test_mask", 22, nodes))
    }
    return Graph.from_edges(ends, nodes, features, undirected=True, y=y, name="small", **masks)
