"""How many bytes a graph takes: on disk, while it is converted, and in memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fgai import checks
from fgai.sparse.valid import LARGEST
from fgai.store.manifest import DTYPES
from fgai.typed import typed

CONVERTING = 270 << 20
"""Bytes of memory that a conversion needs for one block of edges or features, whatever the graph."""


class GraphSize(NamedTuple):
    """Bytes of a graph.

    Attributes:
        stored: on disk, but for the headings of the files, a hundred bytes each.
        converting: on disk while an edge list is converted, at the most; the sources are not counted.
        converting_memory: in memory meanwhile.
        loaded: in memory as a `Graph`; kernels add 12 for each edge and 8 for each node.
    """

    stored: int
    converting: int
    converting_memory: int
    loaded: int


@typed
def graph_size(
    num_nodes: int, num_edges: int, num_features: int = 0, *, labels: bool = False, weights: bool = False
) -> GraphSize:
    """Say how many bytes a graph with dense features takes.

    Args:
        num_nodes: N.
        num_edges: E as stored: with the reverses of undirected ones.
        num_features: F.
        labels: whether nodes have classes.
        weights: whether edges have weights.

    Raises:
        InputError: a number is negative, or too large for a stored graph.

    Example:
        >>> graph_size(10, 50, 4).stored, graph_size(10, 50, 4).loaded
        (448, 1536)
    """
    nodes = checks.whole(num_nodes, "num_nodes", 1, LARGEST)
    edges = checks.whole(num_edges, "num_edges", 0)
    width = {name: np.dtype(kind).itemsize for name, kind in DTYPES.items()}
    of_nodes = nodes * (checks.whole(num_features, "num_features", 0) * width["x"] + labels * width["y"])
    of_edges = edges * weights * width["edge_weight"]
    pointers, ends = (nodes + 1) * width["rowptr"], edges * width["source"]
    return GraphSize(
        stored=of_nodes + pointers + ends + of_edges,
        # Edges as they came, source and destination, beside the same in their rows.
        converting=of_nodes + pointers + 3 * ends + 2 * of_edges,
        converting_memory=CONVERTING + 2 * pointers,
        # Pointers, source, destination and order of the outgoing view are int64 there.
        loaded=of_nodes + 2 * pointers + 3 * edges * 8 + of_edges,
    )
