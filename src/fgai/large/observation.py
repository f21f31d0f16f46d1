"""`StoredObservation`: logits, states and attention of all nodes, in a folder of memory-mapped arrays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from fgai.compiled import compiled
from fgai.errors import DataError, InputError
from fgai.files import write_atomic
from fgai.large.arrays import Array, _are_below, _ArrayInfo, _describe
from fgai.large.sort import _row_blocks
from fgai.large.stored import DTYPES, _ArrayFolder, _Rows, encode
from fgai.processes import SINGLE, ProcessGroup
from fgai.typed import typed

MANIFEST = "observation.json"
VERSION = 2
BLOCK = 1 << 18  # edges and nodes that are in memory together


class _NodeBlock(NamedTuple):
    logits: Tensor  # [n, C]
    rowptr: Tensor  # [n + 1] from 0
    attention: list[Tensor]  # by layer, averaged over heads
    scores: list[Tensor]  # by layer


class _Manifest(TypedDict):
    format: Literal["fgai observation"]
    version: int  # of the format
    model: str  # class of the model
    graph: str  # fingerprint of the graph
    layers: list[str]  # names of the attention layers, in order
    arrays: dict[str, _ArrayInfo]  # by name; each is a file `NAME.npy`


@typed
class StoredObservation(_ArrayFolder):
    """Results of `observe_store`, mapped from the folder `path`; `DataError` if it is damaged.

    Edges are those the model reads: the graph's, with the self-loops it adds, sorted by (destination,
    source). `rows` and `verify` compare what they read with its checksums, once; other arrays are mapped
    without that, as they may be larger than memory. `model` is the model's class, `graph` the graph's
    fingerprint, `layers` the names of the attention layers.
    """

    _file, _version, _layout = MANIFEST, VERSION, _Manifest
    _kind, _remedy = "observation (see `observe_store`)", "compute it again"

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        manifest: _Manifest = self._manifest
        self.model, self.graph, self.layers = manifest["model"], manifest["graph"], manifest["layers"]

    def __repr__(self) -> str:
        return f"StoredObservation({self.model!r}, nodes={len(self.logits)}, edges={len(self.rows().source)})"

    def _check_shapes(self) -> None:
        for name in ("rowptr", "source"):
            info = self._infos.get(name)
            if info is None or info["dtype"] != DTYPES[name] or len(info["shape"]) != 1:
                raise ValueError(f"`{name}` is missing, or of another type or shape")
        nodes, edges = self._infos["rowptr"]["shape"][0] - 1, self._infos["source"]["shape"][0]
        rows = {"logits": (nodes, 2), "state": (nodes, 2), "attention": (edges, 2), "scores": (edges, 1)}
        for name, info in self._infos.items():
            if name in ("rowptr", "source"):
                continue
            shape, (count, dimensions) = info["shape"], rows.get(name.partition(".")[0], (0, -1))
            if len(shape) != dimensions or shape[0] != count or min(shape) < 0:
                raise ValueError(f"`{name}` has shape {shape}, which does not fit the rest")
            if not info["dtype"].startswith("<f"):
                raise ValueError(f"`{name}` must hold numbers, got {info['dtype']}")

    def rows(self) -> _Rows:
        """Return the edges the model reads; `DataError` if they are damaged."""
        return self._checked_rows("rowptr", "source", self._infos["rowptr"]["shape"][0] - 1)

    @property
    def logits(self) -> Array:
        """[N, C]."""
        return self._array("logits")

    def states(self, layer: int) -> Array:
        """[N, D] outputs of a layer by number, from 0."""
        return self._array(f"state.{layer}")

    def attention(self, layer: int) -> Array:
        """[E, H] or [E, 1] attention of a layer by number, from 0."""
        return self._array(f"attention.{layer}")

    def scores(self, layer: int) -> Array | None:
        """[E] scores that rank neighbours, by a layer's number; None if they were not written."""
        name = f"scores.{layer}"
        return self._array(name) if name in self._infos else None

    def _node_blocks(self, group: ProcessGroup = SINGLE) -> Iterator[_NodeBlock]:
        """Yield all nodes, or this process's share, block by block."""
        rowptr, layers = self.rows().rowptr, range(len(self.layers))
        scores = [scores for layer in layers if (scores := self.scores(layer)) is not None]
        for first, last in group.share(_row_blocks(rowptr, BLOCK)):
            edges = slice(int(rowptr[first]), int(rowptr[last]))
            yield _NodeBlock(
                torch.from_numpy(np.array(self.logits[first:last])),
                torch.from_numpy(np.array(rowptr[first : last + 1]) - rowptr[first]),
                [torch.from_numpy(np.array(self.attention(layer)[edges, 0])) for layer in layers],
                [torch.from_numpy(np.array(values[edges])) for values in scores],
            )

    def _array(self, name: str) -> Array:
        if name not in self._infos:
            raise DataError(f"{self.path} has no {name}; its layers are {', '.join(self.layers)}")
        return self._open(name)

    def positions(self, source: Array, destination: Array) -> Array:
        """Return the positions [e] of edges from `source` to `destination` among `rows`; all must exist."""
        rows = self.rows()
        if not _are_below(destination, len(rows.rowptr) - 1):
            raise InputError(f"`destination` must name nodes 0..{len(rows.rowptr) - 2}")
        positions: Array = _find(*rows, source, destination)
        if len(positions) and positions.min() < 0:
            edge = int(positions.argmin())
            raise DataError(f"{self.path} has no edge {source[edge]} → {destination[edge]}; {self._remedy}")
        return positions


@compiled
def _find(rowptr: Array, source: Array, queries: Array, destination: Array) -> Array:
    """Search each edge in its row, whose sources are sorted; -1 if it is absent."""
    positions = np.full(len(queries), -1, np.int64)
    for edge in range(len(queries)):
        low, high = rowptr[destination[edge]], rowptr[destination[edge] + 1]
        last = high
        while low < high:
            middle = (low + high) // 2
            if source[middle] < queries[edge]:
                low = middle + 1
            else:
                high = middle
        if low < last and source[low] == queries[edge]:
            positions[edge] = low
    return positions


def _write_manifest(folder: Path, model: str, graph: str, layers: list[str]) -> None:
    """Write the manifest of an observation of a graph, with every array in the folder."""
    manifest: _Manifest = {
        "format": "fgai observation",
        "version": VERSION,
        "model": model,
        "graph": graph,
        "layers": layers,
        "arrays": _describe(folder),
    }
    write_atomic(folder / MANIFEST, encode(manifest))
