"""Edges in any order become compressed rows on disk, in memory that does not grow with their number.

A counting sort in passes over files: edges are written down as they come, counted by destination, put where
their row begins, and each row is sorted by source. In memory are one block of edges, and 16 bytes per node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from fgai.compiled import compiled
from fgai.errors import DataError, FgaiWarning, warn
from fgai.sparse.keys import edge_name
from fgai.sparse.valid import LARGEST
from fgai.store.arrays import Array, ArrayFile, scratch, write_array
from fgai.store.manifest import DTYPES

BLOCK = 1 << 22
"""Edges that are read, put in place or sorted together."""
SPARSEST = 64
"""Nodes per edge, beyond a million of them, from which numbers are taken for labels rather than numbers."""

# mypy: disable-error-code="no-untyped-call"


class Edges(NamedTuple):
    """Some edges.

    Attributes:
        source: [k] node numbers.
        destination: [k] node numbers.
        values: of the edges, by the names of a `Graph`: `edge_attr` [k, D], `edge_weight` [k].
    """

    source: Array
    destination: Array
    values: dict[str, Array]


def sort_edges(
    folder: Path, edges: Iterable[Edges], *, num_nodes: int | None = None, undirected: bool = False
) -> int:
    """Write `rowptr.npy`, `source.npy` and the values of edges; those that come again are left out.

    Args:
        folder: for these and for intermediate files, which are removed.
        edges: in any order, every part with the same values.
        num_nodes: N; the largest number and one more by default.
        undirected: also write every edge's reverse, with its values.

    Returns:
        N.

    Raises:
        DataError: an edge names no node, or comes again with other values.
        OSError: the disk is full.
    """
    spool = _Spool(folder)
    with spool:
        for part in edges:
            spool.write(part)
            if undirected:
                spool.write(Edges(part.destination, part.source, part.values))
    nodes = _number_of_nodes(spool, num_nodes)
    rowptr = np.zeros(nodes + 1, np.int64)
    for part in spool.read():
        _count(part.destination, rowptr)
    np.cumsum(rowptr, out=rowptr)
    placed = _place(folder, spool, rowptr)
    written = _write_rows(folder, rowptr, placed)
    if written < spool.count and not undirected:
        warn(FgaiWarning(f"{spool.count - written} duplicate edges were merged"))
    return nodes


def _number_of_nodes(spool: _Spool, given: int | None) -> int:
    if given is not None:
        if spool.largest >= given:
            raise DataError(f"an edge names node {spool.largest}, but there are {given} nodes, from 0 on")
        return given
    if spool.largest > SPARSEST * spool.count + (1 << 20):
        raise DataError(
            f"an edge names node {spool.largest}, though there are only {spool.count} edges; number the nodes"
            " from 0 on, or give features, which tell how many there are"
        )
    return max(1, spool.largest + 1)


class _Spool:
    """Edges as they came, in plain files."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._files, self.count, self.largest = folder, ExitStack(), 0, -1
        self._open: dict[str, BinaryIO] = {}
        self.tails: dict[str, tuple[int, ...]] = {}

    def __enter__(self) -> _Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def write(self, part: Edges) -> None:
        for name, ends in (("source", part.source), ("destination", part.destination)):
            if len(ends) and (int(ends.min()) < 0 or int(ends.max()) >= LARGEST):
                raise DataError(f"nodes must be numbered in 0..{LARGEST - 1}, got {ends.min()}..{ends.max()}")
            self.largest = max(self.largest, int(ends.max()) if len(ends) else -1)
            self._append(name, ends, "<i4")
        for name, values in part.values.items():
            self.tails[name] = values.shape[1:]
            self._append(name, values, DTYPES[name])
        self.count += len(part.source)

    def _append(self, name: str, values: Array, dtype: str) -> None:
        if name not in self._open:
            self._open[name] = self._files.enter_context((self._folder / f"{name}.spool").open("wb"))
        self._open[name].write(np.ascontiguousarray(values, dtype).data)

    def read(self) -> Iterator[Edges]:
        """The edges again, in blocks."""
        for first in range(0, self.count, BLOCK):
            source, destination = (self._block(name, first, "<i4", ()) for name in ("source", "destination"))
            values = {name: self._block(name, first, DTYPES[name], tail) for name, tail in self.tails.items()}
            yield Edges(source, destination, values)

    def _block(self, name: str, first: int, dtype: str, tail: tuple[int, ...]) -> Array:
        width, kind = int(np.prod(tail, dtype=np.int64)), np.dtype(dtype)
        size = min(BLOCK, self.count - first) * width
        path, offset = self._folder / f"{name}.spool", first * width * kind.itemsize
        return np.fromfile(path, kind, size, offset=offset).reshape(-1, *tail)

    def remove(self) -> None:
        for name in self._open:
            (self._folder / f"{name}.spool").unlink()


@compiled
def _count(destination, rowptr):  # type: ignore[no-untyped-def]
    """Count each destination behind its place."""
    for end in destination:
        rowptr[end + 1] += 1


@compiled
def _positions(destination, cursor, positions):  # type: ignore[no-untyped-def]
    """The next free place in the row of each edge."""
    for i in range(len(destination)):
        end = destination[i]
        positions[i] = cursor[end]
        cursor[end] += 1


def _place(folder: Path, spool: _Spool, rowptr: Array) -> dict[str, Array]:
    """Put every edge into its row, in the order of the input."""
    cursor = rowptr[:-1].copy()
    shapes = {"source": (), **spool.tails}
    placed = {
        name: scratch(folder / f"{name}.scratch", (spool.count, *tail), DTYPES[name])
        for name, tail in shapes.items()
    }
    for part in spool.read():
        positions = np.empty(len(part.source), np.int64)
        _positions(part.destination, cursor, positions)
        placed["source"][positions] = part.source
        for name, values in part.values.items():
            placed[name][positions] = values
    spool.remove()
    return placed


def _write_rows(folder: Path, rowptr: Array, placed: dict[str, Array]) -> int:
    """Sort each row by source, leave out what comes again, write everything in order; return how many."""
    counts = np.zeros(len(rowptr), np.int64)
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(ArrayFile(folder / f"{name}.npy", DTYPES[name], array.shape[1:]))
            for name, array in placed.items()
        }
        for first, last in row_blocks(rowptr, BLOCK):
            edges = slice(rowptr[first], rowptr[last])
            row = np.repeat(np.arange(first, last), np.diff(rowptr[first : last + 1]))
            keys = (row << 32) | placed["source"][edges]
            order = np.argsort(keys, kind="stable")
            keys = keys[order]
            fresh = np.ones(len(keys), bool)
            fresh[1:] = keys[1:] != keys[:-1]
            for name, array in placed.items():
                values = array[edges][order]
                _check_again(name, values, keys, fresh)
                files[name].append(values[fresh])
            counts[first + 1 : last + 1] = np.bincount(row[order][fresh] - first, minlength=last - first)
    write_array(folder / "rowptr.npy", [np.cumsum(counts)], DTYPES["rowptr"])
    for name in placed:
        (folder / f"{name}.scratch").unlink()
    return int(counts.sum())


def _check_again(name: str, values: Array, keys: Array, fresh: Array) -> None:
    """Raise if an edge that comes again has other values than the first time."""
    first = np.maximum.accumulate(np.where(fresh, np.arange(len(keys)), 0))
    differs = values != values[first]
    differs = differs.any(1) if differs.ndim == 2 else differs
    if differs.any():
        edge = edge_name(int(keys[int(np.argmax(differs))]))
        raise DataError(f"the edge {edge} comes again with another `{name}`; merge such edges first")


def row_blocks(rowptr: Array, edges: int, nodes: int | None = None) -> Iterator[tuple[int, int]]:
    """Blocks of rows (first, last) of at most so many edges and rows; a longer row is a block of its own."""
    first, count = 0, len(rowptr) - 1
    while first < count:
        last = int(np.searchsorted(rowptr, rowptr[first] + edges, "right")) - 1
        last = min(max(last, first + 1), count, first + (nodes or count))
        yield first, last
        first = last
