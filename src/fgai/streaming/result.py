"""`StoredObservation`: logits, states and attention of all nodes, in a folder of memory-mapped arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, TypedDict

import numpy as np
import torch

from fgai.attention import AttentionMap, LayerAttention
from fgai.compiled import compiled
from fgai.errors import CheckpointError, DataError
from fgai.files import check, parse_json
from fgai.sparse import Adjacency
from fgai.sparse.valid import owners
from fgai.store.arrays import Array, open_array
from fgai.store.manifest import ArrayInfo
from fgai.store.stored import Rows
from fgai.typed import typed

MANIFEST = "observation.json"
VERSION = 1


class Manifest(TypedDict):
    """What `observation.json` holds.

    Attributes:
        format: says what kind of folder this is.
        version: of the format.
        model: class of the model.
        graph: fingerprint of the graph.
        layers: names of the attention layers, in order.
        arrays: by name; each is a file `NAME.npy`.
    """

    format: Literal["fgai observation"]
    version: int
    model: str
    graph: str
    layers: list[str]
    arrays: dict[str, ArrayInfo]


@typed
class StoredObservation:
    """What `observe_store` found, mapped from its folder.

    Edges are those the model reads: the graph's, with the self-loops it adds, sorted by (destination,
    source).

    Args:
        path: the folder.

    Raises:
        DataError: it holds none, or a damaged one.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        file = self.path / MANIFEST
        if not file.is_file():
            raise DataError(f"{path} holds no observation: there is no {MANIFEST}; see `observe_store`")
        try:
            self._manifest: Manifest = parse_json(file.read_bytes())
            check(self._manifest, Manifest, MANIFEST)
            if self._manifest["version"] > VERSION:
                raise ValueError("it is of a newer version, update fgai")
        except (CheckpointError, ValueError, OSError) as error:
            raise DataError(f"{file} is damaged: {error}; compute it again") from error

    def __repr__(self) -> str:
        return f"StoredObservation({self.model!r}, nodes={len(self.logits)}, edges={len(self.rows.source)})"

    @property
    def model(self) -> str:
        """Class of the model."""
        return self._manifest["model"]

    @property
    def graph(self) -> str:
        """Fingerprint of the graph."""
        return self._manifest["graph"]

    @property
    def layers(self) -> list[str]:
        """Names of the attention layers."""
        return self._manifest["layers"]

    @property
    def rows(self) -> Rows:
        """The edges the model reads."""
        return Rows(self._array("rowptr"), self._array("source"))

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
        return self._array(name) if name in self._manifest["arrays"] else None

    def _array(self, name: str) -> Array:
        info = self._manifest["arrays"].get(name)
        file = self.path / f"{name}.npy"
        if info is None:
            raise DataError(f"{self.path} has no {name}; its layers are {', '.join(self.layers)}")
        try:
            return open_array(file, tuple(info["shape"]), info["dtype"])
        except (OSError, ValueError) as error:
            raise DataError(f"{file} is damaged or missing ({error}); compute it again") from error

    def positions(self, source: Array, destination: Array) -> Array:
        """Where edges are among those of `rows`: [e].

        Args:
            source: [e] by number of node.
            destination: [e] likewise.

        Raises:
            DataError: an edge is not there: the graph was another one.
        """
        found: Array = _find(*self.rows, source, destination)
        if len(found) and found.min() < 0:
            at = int(found.argmin())
            raise DataError(f"{self.path} has no edge {source[at]} → {destination[at]}; compute it again")
        return found

    def load_attention(self) -> AttentionMap:
        """Read the attention of all layers into memory."""
        rowptr, source = (torch.from_numpy(np.array(part, np.int64)) for part in self.rows)
        adjacency = Adjacency.from_sorted(source, owners(rowptr, len(source)), len(rowptr) - 1)
        layers = []
        for number, name in enumerate(self.layers):
            values = torch.from_numpy(np.array(self.attention(number)))
            scores = self.scores(number)
            ranks = None if scores is None else torch.from_numpy(np.array(scores))
            layers.append(LayerAttention.on(adjacency, values, name, ranks))
        return AttentionMap(tuple(layers))


@typed
def open_observation(path: Path | str) -> StoredObservation:
    """Open what `observe_store` wrote; only its manifest is read.

    Args:
        path: the folder.

    Raises:
        DataError: see `StoredObservation`.
    """
    return StoredObservation(path)


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


def encode(manifest: Manifest) -> str:
    """Return the text of the manifest."""
    return json.dumps(manifest, indent=1) + "\n"
