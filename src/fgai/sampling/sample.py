"""`Sample`: what was drawn around some nodes, grown hop by hop."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fgai import checks
from fgai.sampling import kernels
from fgai.store.stored import Rows

Ints = NDArray[np.int64]
_NODE = 0xFFFFFFFF
"""The bits of a key that hold its node; above them is its tree."""


class Sample(NamedTuple):
    """What was drawn around some nodes.

    Attributes:
        nodes: [n] by number in the whole graph; the seeds first, then hop by hop, ascending in each.
        row: [e] source of each edge, as a position in `nodes`.
        column: [e] destination, likewise; never falls.
        edges: [e] positions of the edges in the whole graph.
        trees: [n] the seed each node was drawn for, where trees are disjoint; else None.
        nodes_per_hop: the seeds, and the nodes that each hop added.
        edges_per_hop: the edges that each hop added.
    """

    nodes: Tensor
    row: Tensor
    column: Tensor
    edges: Tensor
    trees: Tensor | None
    nodes_per_hop: list[int]
    edges_per_hop: list[int]


class GrowingSample:
    """A sample around some seeds, to which hops are added.

    Nodes are known by keys, which also hold their trees. New ones are numbered in ascending order, so that
    whoever reads their features goes through memory, or a file, from front to back.

    Args:
        rows: the whole graph.
        seeds: [B] its first nodes; one that comes twice is there twice.
        streams: [B] or [1] where draws begin: for the tree of each seed, or for all of them.
        replace: draw with replacement.
        disjoint: give every seed a tree of its own.
    """

    def __init__(
        self, rows: Rows, seeds: Ints, streams: NDArray[np.uint64], *, replace: bool, disjoint: bool
    ) -> None:
        self._rows, self._streams, self._replace, self._disjoint = rows, streams, replace, disjoint
        nodes, trees = len(rows.rowptr) - 1, len(seeds) if disjoint else 1
        self._keys = (np.arange(len(seeds)) << 32) | seeds if disjoint else seeds
        self._most, self._largest = nodes * trees, ((trees - 1) << 32) + nodes
        self._nodes_per_hop, self._edges_per_hop = [len(seeds)], list[int]()
        self._row = self._column = self._edges = np.zeros(0, np.int64)
        self._tables = np.zeros(0, np.int32), np.zeros(0, np.int64)
        self._make_room(len(seeds))
        kernels.number_seeds(*self._tables, self._keys)

    def _make_room(self, keys: int) -> None:
        self._tables = kernels.with_room(*self._tables, min(keys, self._most), self._largest)

    def add_hop(self, fan_out: int) -> None:
        """Draw neighbours of the nodes that the last hop added, at first those of the seeds.

        Args:
            fan_out: neighbours of each node, -1 for all.
        """
        count, known = len(self._keys), len(self._edges)
        begin, hop = count - self._nodes_per_hop[-1], len(self._edges_per_hop)
        nodes, trees = self._keys[begin:] & _NODE, self._keys[begin:] >> 32
        if self._replace and fan_out > 0:
            checks.memory(len(nodes) * fan_out, 3 * nodes.itemsize, "fan_out")
        offset = kernels.offsets(self._rows.rowptr, nodes, fan_out, self._replace)
        parts = (_longer(part, offset[-1]) for part in (self._row, self._column, self._edges))
        self._row, self._column, self._edges = parts
        row, column, edges = (part[known:] for part in (self._row, self._column, self._edges))
        kernels.draw(
            self._rows.rowptr, nodes, trees, self._streams, hop, fan_out, self._replace, offset, edges
        )
        kernels.keys_of(self._rows.source, edges, trees, offset, begin, row, column)
        self._make_room(count + len(edges))
        fresh = np.sort(kernels.enter(*self._tables, row))
        kernels.number(*self._tables, fresh, count, row)
        self._keys = np.concatenate([self._keys, fresh])
        self._nodes_per_hop.append(len(fresh))
        self._edges_per_hop.append(len(edges))

    def finished(self) -> Sample:
        """Return what was drawn."""
        arrays = (self._keys & _NODE, self._row, self._column, self._edges)
        nodes, row, column, edges = (torch.from_numpy(array) for array in arrays)
        trees = torch.from_numpy(self._keys >> 32) if self._disjoint else None
        return Sample(nodes, row, column, edges, trees, self._nodes_per_hop, self._edges_per_hop)


def _longer(array: Ints, more: int) -> Ints:
    """A copy with room for more; hops grow, so what is copied is the smaller part."""
    found = np.empty(len(array) + more, array.dtype)
    found[: len(array)] = array
    return found
