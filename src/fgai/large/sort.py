"""Sort edges on disk into compressed rows, in memory that does not grow with their number.

A counting sort in passes over files: edges are spooled, counted by destination, moved to their rows, and each
row is sorted by source. In memory are one block of edges, and 16 bytes per node.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypedDict

import numpy as np

from fgai.compiled import compiled
from fgai.datasets.own import count_nodes
from fgai.errors import DataError, FgaiWarning, warn
from fgai.large.arrays import Array, _ArrayFiles, _scratch, _write_array
from fgai.large.stored import DTYPES
from fgai.large.write import _Work
from fgai.sparse import edge_name
from fgai.sparse.valid import LARGEST

BLOCK = 1 << 22  # edges that are read, moved or sorted per block

# mypy: disable-error-code="no-untyped-call"


class _Edges(NamedTuple):
    source: Array  # [k] node numbers
    destination: Array  # [k] node numbers
    values: dict[str, Array]  # of the edges, by the names of a `Graph`: `edge_attr` [k, D], `edge_weight` [k]


def _sort_edges(
    work: _Work, edges: Iterable[_Edges], *, num_nodes: int | None = None, undirected: bool = False
) -> int:
    """Write `rowptr.npy`, `source.npy` and the values of edges, without duplicates; return N."""
    spool: _SpoolInfo = work.run_stage("edges", lambda: _write_spool(work.folder, edges, undirected))
    count, largest = spool["count"], spool["largest"]
    nodes = count_nodes(largest, count) if num_nodes is None else num_nodes
    if largest >= nodes:
        raise DataError(f"an edge names node {largest}, but there are {nodes} nodes, from 0 on")
    work.run_stage("places", lambda: _move_to_rows(work.folder, spool, nodes), remove=".spool")
    distinct = work.run_stage("rows", lambda: _write_rows(work.folder, spool, nodes), remove=".scratch")
    if distinct < count and not undirected:
        warn(FgaiWarning(f"{count - distinct} duplicate edges were merged"))
    return nodes


class _SpoolInfo(TypedDict):
    """Sizes of spooled edges."""

    count: int  # E, with reverses and duplicates
    largest: int  # node number
    tails: dict[str, list[int]]  # shapes of the values of one edge, by name


def _write_spool(folder: Path, edges: Iterable[_Edges], undirected: bool) -> _SpoolInfo:
    """Write edges in the order of the input, in plain files."""
    spool: _SpoolInfo = {"count": 0, "largest": -1, "tails": {}}
    files: dict[str, BinaryIO] = {}
    with ExitStack() as stack:
        for part in edges:
            for ends in (part.source, part.destination) if len(part.source) else ():
                low, high = int(ends.min()), int(ends.max())
                if low < 0 or high >= LARGEST:
                    raise DataError(f"nodes must be numbered in 0..{LARGEST - 1}, got {low}..{high}")
                spool["largest"] = max(spool["largest"], high)
            spool["tails"] = {name: list(values.shape[1:]) for name, values in part.values.items()}
            directions = [(part.source, part.destination), (part.destination, part.source)]
            for source, destination in directions if undirected else directions[:1]:
                for name, values in {"source": source, "destination": destination, **part.values}.items():
                    if name not in files:
                        files[name] = stack.enter_context((folder / f"{name}.spool").open("xb"))
                    files[name].write(np.ascontiguousarray(values, _dtype(name)).data)
                spool["count"] += len(source)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    return spool


def _dtype(name: str) -> str:
    return DTYPES["source" if name == "destination" else name]


def _read_spool(folder: Path, spool: _SpoolInfo) -> Iterator[_Edges]:
    """Yield the edges in the order of the input, in blocks."""
    tails = {"source": [], "destination": [], **spool["tails"]}
    for first in range(0, spool["count"], BLOCK):
        rows, parts = min(BLOCK, spool["count"] - first), {}
        for name, tail in tails.items():
            width, kind, path = math.prod(tail), np.dtype(_dtype(name)), folder / f"{name}.spool"
            values = np.fromfile(path, kind, rows * width, offset=first * width * kind.itemsize)
            parts[name] = values.reshape(rows, *tail)
        yield _Edges(parts.pop("source"), parts.pop("destination"), parts)


@compiled
def _positions(destination, cursor, positions):  # type: ignore[no-untyped-def]
    """Write the next free position in the row of each edge."""
    for i in range(len(destination)):
        end = destination[i]
        positions[i] = cursor[end]
        cursor[end] += 1


def _edge_scratch(folder: Path, spool: _SpoolInfo) -> dict[str, Array]:
    """Map temporary arrays for sources and values of all edges."""
    tails = {"source": [], **spool["tails"]}
    return {
        name: _scratch(folder / f"{name}.scratch", (spool["count"], *tail), DTYPES[name])
        for name, tail in tails.items()
    }


def _move_to_rows(folder: Path, spool: _SpoolInfo, nodes: int) -> None:
    """Move every edge to its row, in the order of the input."""
    rowptr = np.zeros(nodes + 1, np.int64)
    for part in _read_spool(folder, spool):
        np.add.at(rowptr, part.destination + 1, 1)
    np.cumsum(rowptr, out=rowptr)
    arrays = _edge_scratch(folder, spool)
    starts = _scratch(folder / "rowptr.scratch", rowptr.shape, rowptr.dtype)
    starts[:] = rowptr
    for part in _read_spool(folder, spool):
        positions = np.empty(len(part.source), np.int64)
        _positions(part.destination, rowptr, positions)
        arrays["source"][positions] = part.source
        for name, values in part.values.items():
            arrays[name][positions] = values
    for array in (starts, *arrays.values()):
        if isinstance(array, np.memmap):
            array.flush()


def _write_rows(folder: Path, spool: _SpoolInfo, nodes: int) -> int:
    """Sort each row by source, leave out duplicates, write all in order; return the number of edges."""
    rowptr = np.array(_scratch(folder / "rowptr.scratch", (nodes + 1,), np.int64))
    arrays = _edge_scratch(folder, spool)
    counts = np.zeros(len(rowptr), np.int64)
    with _ArrayFiles(folder) as files:
        for first, last in _row_blocks(rowptr, BLOCK):
            edges = slice(rowptr[first], rowptr[last])
            row = np.repeat(np.arange(first, last), np.diff(rowptr[first : last + 1]))
            keys = (row << 32) | arrays["source"][edges]
            order, keys, is_first = _sorted_keys(keys)
            for name, array in arrays.items():
                values = array[edges][order]
                _check_duplicates(name, values, keys, is_first)
                files.append(name, values[is_first])
            counts[first + 1 : last + 1] = np.bincount(row[order][is_first] - first, minlength=last - first)
    np.cumsum(counts, out=counts)
    _write_array(folder / "rowptr.npy", [counts], DTYPES["rowptr"])
    return int(counts[-1])


def _sorted_keys(keys: Array) -> tuple[Array, Array, Array]:
    """Return the order that sorts edge keys, the sorted keys, and whether each is the first of its kind."""
    order = np.argsort(keys, kind="stable")  # runs that are sorted are merged in linear time
    keys = keys[order]
    return order, keys, np.diff(keys, prepend=-1) != 0


def _check_duplicates(name: str, values: Array, keys: Array, is_first: Array) -> None:
    """Raise if a duplicate edge has other values than the first one."""
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(keys)), 0))
    differs = values != values[first]
    differs = differs.any(1) if differs.ndim == 2 else differs
    if differs.any():
        edge = edge_name(int(keys[int(np.argmax(differs))]))
        raise DataError(f"duplicates of the edge {edge} have different `{name}`; merge such edges first")


def _row_blocks(rowptr: Array, most: int) -> list[tuple[int, int]]:
    """Return blocks (first, last) of at most so many edges and rows; a longer row is a block alone."""
    blocks, first, count = [], 0, len(rowptr) - 1
    while first < count:
        last = int(np.searchsorted(rowptr, rowptr[first] + most, "right")) - 1
        last = min(max(last, first + 1), count, first + most)
        blocks.append((first, last))
        first = last
    return blocks
