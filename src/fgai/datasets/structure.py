"""Degrees as features, for graphs whose own features say nothing."""

from __future__ import annotations

import torch

from fgai.checks import whole
from fgai.graph import Graph
from fgai.sparse import Features
from fgai.typed import typed

LARGEST = 100_000
"""Columns at most."""


@typed
def with_degrees(graph: Graph, most: int = 10) -> Graph:
    """Return the graph with the degree of every node appended to its features, one-hot.

    Attention averages its neighbours, so on constant features every node looks alike to it, whatever the
    graph. Loops do not count; degrees of `most` and above share the last column.

    Args:
        graph: with or without features.
        most: columns.

    Returns:
        A graph with dense features [N, F + most].

    Example:
        >>> path = Graph.from_edges(torch.tensor([[0, 1], [1, 2]]), 3, torch.ones(3, 1), undirected=True)
        >>> with_degrees(path, 2).features.to_dense().tolist()
        [[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    """
    whole(most, "most", 1, LARGEST)
    real = graph.adjacency.source != graph.adjacency.destination
    degree = torch.bincount(graph.adjacency.destination[real], minlength=graph.num_nodes)
    columns = torch.nn.functional.one_hot((degree - 1).clamp(0, most - 1), most).float()
    columns[degree == 0] = 0.0
    if graph.features is not None:
        columns = torch.cat([graph.features.to_dense(), columns.to(graph.features.dtype)], dim=1)
    return graph.replace(features=Features.dense(columns))
