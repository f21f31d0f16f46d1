"""Sort edges on disk into compressed rows, in memory that does not grow with their number.

A counting sort in passes over files: edges are spooled, counted by destination, moved to their rows, and each
row is sorted by source. In memory are one block of edges, and 16 bytes per node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from fgai.compiled import compiled
from fgai.datasets.own import count_nodes
from fgai.errors import DataError, FgaiWarning, warn
from fgai.large.arrays import Array, _ArrayFiles, _scratch, _write_array, map_array
from fgai.large.stored import DTYPES
from fgai.large.write import _Work
from fgai.sparse import edge_name
from fgai.sparse.valid import LARGEST

BLOCK = 1 << 22  # edges that are read, moved or sorted per block
SPOOL, SCRATCH = ".spool.npy", ".scratch.npy"  # endings of temporary files
TYPES = {**DTYPES, "destination": DTYPES["source"]}

# mypy: disable-error-code="no-untyped-call"

_Edges = dict[str, Array]
"""`source` and `destination` [k] by number, and values by the names of a `Graph`, e.g. `edge_weight` [k]."""


def _sort_edges(
    work: _Work, edges: Iterable[_Edges], *, num_nodes: int | None = None, undirected: bool = False
) -> int:
    """Write `rowptr.npy`, `source.npy` and the values of edges, without duplicates; return N."""
    count, largest = work.run_stage("edges", lambda: _write_spool(work.folder, edges, undirected))
    nodes = count_nodes(largest, count) if num_nodes is None else num_nodes
    if largest >= nodes:
        raise DataError(f"an edge names node {largest}, but there are {nodes} nodes, from 0 on")
    work.run_stage("places", lambda: _move_to_rows(work.folder, nodes), remove=SPOOL)
    distinct = work.run_stage("rows", lambda: _write_rows(work.folder), remove=SCRATCH)
    if distinct < count and not undirected:
        warn(FgaiWarning(f"{count - distinct} duplicate edges were merged"))
    return nodes


def _write_spool(folder: Path, edges: Iterable[_Edges], undirected: bool) -> tuple[int, int]:
    """Write edges in the order of the input; return their number and the largest node number."""
    count, largest = 0, -1
    none: _Edges = dict.fromkeys(("source", "destination"), np.zeros(0, np.int64))
    with _ArrayFiles(folder) as files:
        for part in chain([none], edges):
            source, destination = part["source"], part["destination"]
            for ends in (source, destination) if len(source) else ():
                low, high = int(ends.min()), int(ends.max())
                if low < 0 or high >= LARGEST:
                    raise DataError(f"nodes must be numbered in 0..{LARGEST - 1}, got {low}..{high}")
                largest = max(largest, high)
            directions = [part, {**part, "source": destination, "destination": source}]
            for direction in directions if undirected else directions[:1]:
                for name, values in direction.items():
                    files.append(f"{name}.spool", values.astype(TYPES[name]))
                count += len(source)
    return count, largest


def _map_all(folder: Path, ending: str) -> _Edges:
    return {file.name.removesuffix(ending): map_array(file) for file in sorted(folder.glob(f"*{ending}"))}


def _parts(edges: _Edges) -> Iterator[_Edges]:
    for first in range(0, len(edges["source"]), BLOCK):
        yield {name: values[first : first + BLOCK] for name, values in edges.items()}


@compiled
def _positions(destination, cursor, positions):  # type: ignore[no-untyped-def]
    for i in range(len(destination)):
        end = destination[i]
        positions[i] = cursor[end]
        cursor[end] += 1


def _move_to_rows(folder: Path, nodes: int) -> None:
    """Move every edge to its row, in the order of the input."""
    edges = _map_all(folder, SPOOL)
    rowptr = np.zeros(nodes + 1, np.int64)
    for part in _parts(edges):
        np.add.at(rowptr, part["destination"] + 1, 1)
    np.cumsum(rowptr, out=rowptr)
    shapes = {"rowptr": rowptr, **edges}
    del shapes["destination"]
    arrays = {n: _scratch(folder / f"{n}{SCRATCH}", like.shape, like.dtype) for n, like in shapes.items()}
    arrays["rowptr"][:] = rowptr
    for part in _parts(edges):
        positions = np.empty(len(part["source"]), np.int64)
        _positions(part.pop("destination"), rowptr, positions)
        for name, values in part.items():
            arrays[name][positions] = values
    for array in arrays.values():
        array.flush()


def _write_rows(folder: Path) -> int:
    """Sort each row by source, leave out duplicates, write all in order; return the number of edges."""
    arrays = _map_all(folder, SCRATCH)
    rowptr = np.array(arrays.pop("rowptr"))
    counts = np.zeros(len(rowptr), np.int64)
    with _ArrayFiles(folder) as files:
        for first, last in _row_blocks(rowptr, BLOCK):
            edges = slice(rowptr[first], rowptr[last])
            row = np.repeat(np.arange(first, last), np.diff(rowptr[first : last + 1]))
            order, keys, is_first = _sorted_keys((row << 32) | arrays["source"][edges])
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
