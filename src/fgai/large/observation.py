"""`StoredObservation`: logits, states and attention of all nodes, in a folder of memory-mapped arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, TypedDict

import numpy as np
import torch

from fgai.attention import AttentionMap, LayerAttention
from fgai.compiled import compiled
from fgai.errors import DataError, InputError
from fgai.large.arrays import Array, _are_below, _are_pointers, _ArrayFolder, _ArrayInfo
from fgai.large.stored import DTYPES, _read_manifest, _Rows
from fgai.sparse import Adjacency
from fgai.sparse.valid import owners
from fgai.typed import typed

MANIFEST = "observation.json"
VERSION = 2
_REMEDY = "compute it again"


class _Manifest(TypedDict):
    """What `observation.json` holds."""

    format: Literal["fgai observation"]  # says what kind of folder this is
    version: int  # of the format
    model: str  # class of the model
    graph: str  # fingerprint of the graph
    layers: list[str]  # names of the attention layers, in order
    arrays: dict[str, _ArrayInfo]  # by name; each is a file `NAME.npy`


@typed
class StoredObservation:
    """What `observe_store` found, mapped from its folder; `DataError` if there is none, or a damaged one.

    Edges are those the model reads: the graph's, with the self-loops it adds, sorted by (destination,
    source). `rows`, `load_attention` and `verify` compare what they read with its checksums; single arrays
    are mapped without that, as they may be larger than memory.

    Attributes:
        model: class of the model.
        graph: fingerprint of the graph.
        layers: names of the attention layers.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        absent = f"observation: there is no {MANIFEST}; see `observe_store`"
        manifest = _read_manifest(self.path / MANIFEST, VERSION, _Manifest, _check_shapes, absent, _REMEDY)
        self.model: str = manifest["model"]
        self.graph: str = manifest["graph"]
        self.layers: list[str] = manifest["layers"]
        self._infos: dict[str, _ArrayInfo] = manifest["arrays"]
        self._arrays = _ArrayFolder(self.path, self._infos, _REMEDY)
        self._rows: _Rows | None = None

    def __repr__(self) -> str:
        return f"StoredObservation({self.model!r}, nodes={len(self.logits)}, edges={len(self.rows.source)})"

    @property
    def rows(self) -> _Rows:
        """The edges the model reads; checked when first read, `DataError` if they are damaged."""
        if self._rows is None:
            rows = _Rows(self._array("rowptr"), self._array("source"))
            if not _are_pointers(rows.rowptr, len(rows.source)) or not _are_below(
                rows.source, len(rows.rowptr) - 1
            ):
                raise DataError(f"{self.path} is damaged: its indices point outside; {_REMEDY}")
            self._arrays.verify(("rowptr", "source"))
            self._rows = rows
        return self._rows

    @property
    def logits(self) -> Array:
        """[N, C]."""
        return self._array("logits")

    def states(self, layer: int) -> Array:
        """[N, D] the states that a layer gave, by its number, from 0."""
        return self._array(f"state.{layer}")

    def attention(self, layer: int) -> Array:
        """[E, H] or [E, 1] of a layer, by its number, from 0."""
        return self._array(f"attention.{layer}")

    def scores(self, layer: int) -> Array | None:
        """[E] what neighbours are ranked by; None where it was not asked for."""
        name = f"scores.{layer}"
        return self._array(name) if name in self._infos else None

    def _array(self, name: str) -> Array:
        if name not in self._infos:
            raise DataError(f"{self.path} has no {name}; its layers are {', '.join(self.layers)}")
        return self._arrays.open(name)

    def verify(self) -> None:
        """Compare every array with its checksum, once; `DataError` if a file is missing or damaged."""
        _ = self.rows
        self._arrays.verify()

    def positions(self, source: Array, destination: Array) -> Array:
        """Where edges [e], by numbers of their nodes, are among those of `rows`: [e].

        Raises:
            DataError: an edge is not there: the graph was another one.
            InputError: a destination is not a node.
        """
        rows = self.rows
        if not _are_below(destination, len(rows.rowptr) - 1):
            raise InputError(f"`destination` must name nodes 0..{len(rows.rowptr) - 2}")
        found: Array = _find(*rows, source, destination)
        if len(found) and found.min() < 0:
            at = int(found.argmin())
            raise DataError(f"{self.path} has no edge {source[at]} → {destination[at]}; compute it again")
        return found

    def load_attention(self) -> AttentionMap:
        """Read the attention of all layers into memory; `DataError` if it is damaged."""
        names = [f"{kind}.{number}" for number in range(len(self.layers)) for kind in ("attention", "scores")]
        self._arrays.verify(name for name in names if name in self._infos)
        rowptr, source = (torch.from_numpy(np.array(part, np.int64)) for part in self.rows)
        adjacency = Adjacency.from_sorted(source, owners(rowptr, len(source)), len(rowptr) - 1)
        layers = []
        for number, name in enumerate(self.layers):
            values = torch.from_numpy(np.array(self.attention(number)))
            scores = self.scores(number)
            ranks = None if scores is None else torch.from_numpy(np.array(scores))
            layers.append(LayerAttention.on(adjacency, values, name, ranks))
        return AttentionMap(tuple(layers))


@compiled
def _find(rowptr: Array, source: Array, ours: Array, destination: Array) -> Array:
    """Search each edge in its row, whose sources are sorted; -1 where it is not."""
    found = np.full(len(ours), -1, np.int64)
    for edge in range(len(ours)):
        low, high = rowptr[destination[edge]], rowptr[destination[edge] + 1]
        last = high
        while low < high:
            middle = (low + high) // 2
            if source[middle] < ours[edge]:
                low = middle + 1
            else:
                high = middle
        if low < last and source[low] == ours[edge]:
            found[edge] = low
    return found


def _check_shapes(manifest: _Manifest) -> None:
    """Raise `ValueError` unless the arrays are about the same nodes and edges."""
    infos = manifest["arrays"]
    for name in ("rowptr", "source"):
        if name not in infos or infos[name]["dtype"] != DTYPES[name] or len(infos[name]["shape"]) != 1:
            raise ValueError(f"`{name}` is missing, or of another type or shape")
    nodes, edges = infos["rowptr"]["shape"][0] - 1, infos["source"]["shape"][0]
    lengths = {"logits": nodes, "state": nodes, "attention": edges, "scores": edges}
    dimensions = {"logits": 2, "state": 2, "attention": 2, "scores": 1}
    for name, info in infos.items():
        kind = name.partition(".")[0]
        if kind in ("rowptr", "source"):
            continue
        shape = info["shape"]
        if len(shape) != dimensions.get(kind) or shape[0] != lengths[kind] or min(shape) < 0:
            raise ValueError(f"`{name}` has shape {shape}, which does not fit the rest")
        if not info["dtype"].startswith("<f"):
            raise ValueError(f"`{name}` must hold numbers, got {info['dtype']}")
