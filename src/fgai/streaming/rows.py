"""The edges a model reads: those of a stored graph, with the self-loops it wants, written block by block."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from fgai.errors import InputError
from fgai.store import StoredGraph
from fgai.store.arrays import Array, ArrayFile, write_array
from fgai.store.manifest import DTYPES
from fgai.store.sort import row_blocks


def write_rows(folder: Path, stored: StoredGraph, loops: bool, block_edges: int) -> None:
    """Write `rowptr.npy`, `source.npy` and, where edges have weights, `edge_weight.npy`.

    Args:
        folder: where to.
        stored: the graph.
        loops: give every node a self-loop, of weight 1, that has none.
        block_edges: edges that are in memory together.

    Raises:
        InputError: a weight is negative.
    """
    rowptr, source = stored.rows()
    weight = stored.array("edge_weight")
    counts = np.zeros(stored.num_nodes + 1, np.int64)
    with ExitStack() as stack:
        ends = stack.enter_context(ArrayFile(folder / "source.npy", DTYPES["source"]))
        weights = None
        if weight is not None:
            file = ArrayFile(folder / "edge_weight.npy", DTYPES["edge_weight"])
            weights = stack.enter_context(file)
        for first, last in row_blocks(rowptr, block_edges, block_edges):
            edges = slice(int(rowptr[first]), int(rowptr[last]))
            there = np.array(rowptr[first : last + 1])
            row = np.repeat(np.arange(first, last), np.diff(there))
            order, keys = _with_loops((row << 32) | source[edges], first, last if loops else first)
            counts[first + 1 : last + 1] = np.bincount((keys >> 32) - first, minlength=last - first)
            ends.append(keys & 0xFFFFFFFF)
            if weights is not None and weight is not None:
                weights.append(_weights(weight[edges], order))
    write_array(folder / "rowptr.npy", [np.cumsum(counts)], DTYPES["rowptr"])


def _with_loops(keys: Array, first: int, last: int) -> tuple[Array, Array]:
    """Sorted keys with those of loops at nodes first..last-1, and where each came from; new ones last."""
    nodes = np.arange(first, last)
    joined = np.concatenate([keys, (nodes << 32) | nodes])
    order = np.argsort(joined, kind="stable")  # two runs, merged in linear time
    joined = joined[order]
    fresh = np.ones(len(joined), bool)
    fresh[1:] = joined[1:] != joined[:-1]
    return order[fresh], joined[fresh]


def _weights(weight: Array, order: Array) -> Array:
    if len(weight) and weight.min() < 0:
        raise InputError("`edge_weight` of the stored graph must be at least 0; shift it, or store none")
    return np.concatenate([weight, np.ones(len(order))])[order]
