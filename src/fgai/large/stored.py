"""`StoredGraph`: a graph in a folder, whose arrays are mapped into memory and never read as a whole."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
import torch
from torch import Tensor

from fgai.datasets import random_split
from fgai.errors import CheckpointError, DataError
from fgai.files import add_checksum, check, parse_json, regular, take_checksum
from fgai.graph import Graph
from fgai.graph.on_disk import MANIFEST, GraphOnDisk
from fgai.large.arrays import Array, _are_below, _are_pointers, _ArrayFolder, _ArrayInfo
from fgai.sparse import Adjacency, Features
from fgai.sparse.valid import LARGEST, owners
from fgai.typed import typed

VERSION = 2
_REMEDY = "convert the graph again"
_SIZES = ("num_nodes", "num_edges", "num_features")
MASKS = ("train_mask", "val_mask", "test_mask")
SPARSE = ("x_indptr", "x_indices", "x_values")
NODE_ARRAYS = ("y", *MASKS)
EDGE_ARRAYS = ("edge_attr", "edge_weight", "edge_truth")
DTYPES = {
    "rowptr": "<i8",
    "source": "<i4",
    "x": "<f4",
    **dict(zip(SPARSE, ("<i8", "<i4", "<f4"), strict=True)),
    "y": "<i8",
    **dict.fromkeys(MASKS, "|b1"),
    "edge_attr": "<f4",
    "edge_weight": "<f4",
    "edge_truth": "|b1",
}
"""Every array a store may hold, and its type on every machine."""


class _Manifest(TypedDict):
    """What `graph.json` holds."""

    format: Literal["fgai graph"]  # says what kind of folder this is
    version: int  # of the format
    name: str  # of the graph
    num_nodes: int  # N
    num_edges: int  # E
    num_features: int  # F
    fingerprint: str  # of the graph, see `fgai.datasets.fingerprint`
    sources: str  # hash of the files and options it was converted from; empty otherwise
    arrays: dict[str, _ArrayInfo]  # by name; each is a file `NAME.npy`


def encode(manifest: Mapping[str, Any]) -> str:
    """Return the text of a manifest with its checksum."""
    return json.dumps(add_checksum(manifest), indent=1, ensure_ascii=False) + "\n"


def _read_manifest(
    path: Path, version: int, kind: Any, check_shapes: Callable[[Any], None], absent: str, remedy: str
) -> Any:
    """Read a manifest and compare it with its checksum; `absent` ends the message if there is none."""
    try:
        values = parse_json(regular(path).read_bytes())
        number = values.get("version") if isinstance(values, dict) else None
        if isinstance(number, int) and number > version:
            raise DataError(f"{path} is of a newer version ({number}); update fgai")
        if isinstance(number, int) and number < version:
            raise DataError(f"{path} is of an older version ({number}), without checksums; make it again")
        manifest = take_checksum(values)
        if manifest is values:
            raise ValueError("it has no checksum")
        check(manifest, kind, path.name)
        check_shapes(manifest)
    except FileNotFoundError:
        raise DataError(f"{path.parent} holds no {absent}") from None
    except (CheckpointError, ValueError, OSError) as error:
        raise DataError(f"{path} is damaged: {error}; {remedy}") from error
    return manifest


def _check_shapes(manifest: _Manifest) -> None:
    arrays = manifest["arrays"]
    nodes, edges, width = (manifest[key] for key in _SIZES)  # type: ignore[literal-required]
    if not 1 <= nodes <= LARGEST or edges < 0 or width < 0:
        raise ValueError(f"{nodes} nodes, {edges} edges and {width} features are no graph")
    if unknown := [name for name, info in arrays.items() if info["dtype"] != DTYPES.get(name)]:
        raise ValueError(f"`{unknown[0]}` is no array of this format, or of another type")
    stored = [len(SPARSE) - sum(name not in arrays for name in SPARSE), int("x" in arrays)]
    if "rowptr" not in arrays or "source" not in arrays or stored not in ([0, 0], [3, 0], [0, 1]):
        raise ValueError("edges or features are incomplete")
    entries = arrays["x_indices"]["shape"][:1] if stored[0] else [0]
    wanted = {
        "rowptr": [nodes + 1],
        "source": [edges],
        "x": [nodes, width],
        **dict(zip(SPARSE, ([nodes + 1], entries, entries), strict=True)),
        **{name: [nodes] for name in NODE_ARRAYS},
        **{name: [edges] for name in EDGE_ARRAYS},
    }
    for name, info in arrays.items():
        shape = info["shape"][:1] if name == "edge_attr" and len(info["shape"]) == 2 else info["shape"]
        if shape != wanted[name] or min(info["shape"], default=0) < 0:
            raise ValueError(f"`{name}` has shape {info['shape']}, which does not fit the rest")


class _Rows(NamedTuple):
    """Incoming edges in compressed rows, as kernels follow them: read-only, known to stay inside."""

    rowptr: Array  # [N + 1] int64; the edges into node i are `rowptr[i]:rowptr[i + 1]`
    source: Array  # [E] int32, where each edge starts


@typed
class StoredGraph(GraphOnDisk):
    """A graph in a folder as `write_store` and `fgai data convert` leave it; `DataError` if it is none.

    Edges are sorted by (destination, source), as those of a `Graph`: an edge has the same position in both.
    Opening it reads the manifest alone. Whatever reads an array as a whole compares it with its checksum
    first, once: `rows` the indices, `load` and `verify` everything. It is pickled as the name of its folder,
    so worker processes map the same files.

    Attributes:
        name: for messages and records.
        num_nodes: N; likewise `num_edges` and `num_features`, 0 without features.
        fingerprint: that of the same graph in memory, see `fgai.datasets.fingerprint`.
        sources: hash of the files and options it was converted from; empty where it was not.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        absent, remedy = f"stored graph: there is no {MANIFEST}; see `fgai data convert`", _REMEDY
        manifest: _Manifest = _read_manifest(
            self.path / MANIFEST, VERSION, _Manifest, _check_shapes, absent, remedy
        )
        self.name, self.fingerprint, self.sources = (manifest[k] for k in ("name", "fingerprint", "sources"))
        self.num_nodes, self.num_edges = manifest["num_nodes"], manifest["num_edges"]
        self.num_features, self._infos = manifest["num_features"], manifest["arrays"]
        self._arrays = _ArrayFolder(self.path, self._infos, remedy)
        self._checked = False

    def __repr__(self) -> str:
        sizes = f"nodes={self.num_nodes}, edges={self.num_edges}, features={self.num_features}"
        return f"StoredGraph({self.name!r}, {sizes})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (os.path.realpath(self.path), self._checked, sorted(self._arrays.verified))

    @property
    def has_features(self) -> bool:
        """Whether there are features, dense or in compressed rows."""
        return bool({"x", "x_indptr"} & self._infos.keys())

    @cached_property
    def num_classes(self) -> int:
        """Classes of the nodes, 0 without labels."""
        y = self.array("y")
        if y is None:
            return 0
        self._arrays.verify(["y"])
        return int(y.max()) + 1

    def array(self, name: str) -> Array | None:
        """Return one array, mapped and read-only, or None; `DataError` if the file is missing or damaged."""
        return self._arrays.open(name) if name in self._infos else None

    def verify(self) -> None:
        """Compare every array with its checksum, once; `DataError` if a file is missing or damaged."""
        self.rows()
        self._arrays.verify()

    def rows(self) -> _Rows:
        """Return the incoming edges, checked once; `DataError` if they point outside the graph."""
        rows = _Rows(self._needed("rowptr"), self._needed("source"))
        if not self._checked:
            good = _are_pointers(rows.rowptr, self.num_edges) and _are_below(rows.source, self.num_nodes)
            sparse = "x_indptr" in self._infos
            if good and sparse:
                indptr, indices, _ = (self._needed(name) for name in SPARSE)
                good = _are_pointers(indptr, len(indices)) and _are_below(indices, self.num_features)
            if not good:
                raise DataError(f"{self.path} is damaged: its indices point outside; {_REMEDY}")
            self._arrays.verify(("rowptr", "source", *(SPARSE[:2] if sparse else ())))
            self._checked = True
        return rows

    def _needed(self, name: str) -> Array:
        found = self.array(name)
        assert found is not None  # the manifest was checked
        return found

    def features(self, nodes: slice | Array) -> Features | None:
        """Read the features of some nodes, a slice or numbers, in the order given; None if there are none."""
        dense = self.array("x")
        if dense is not None:
            return Features.dense(_copied(dense, nodes))
        if not self.has_features:
            return None
        self.rows()  # looks at all indices
        indptr, indices, values = (self._needed(name) for name in SPARSE)
        return _gather_rows(indptr, indices, values, nodes, self.num_features)

    def node_fields(self, nodes: slice | Array) -> dict[str, Tensor]:
        """Read labels and masks of some nodes, in the order given, by the names of a `Graph`."""
        return self._fields(NODE_ARRAYS, nodes)

    def edge_fields(self, edges: slice | Array) -> dict[str, Tensor]:
        """Read values on some edges by their positions, by the names of a `Graph`."""
        return self._fields(EDGE_ARRAYS, edges)

    def _fields(self, names: tuple[str, ...], places: slice | Array) -> dict[str, Tensor]:
        return {name: _copied(self._arrays.open(name), places) for name in names if name in self._infos}

    def load(self) -> Graph:
        """Read the whole graph into memory and compare checksums; `DataError` if it is damaged."""
        self.verify()
        every = slice(None)
        rowptr, source = (torch.from_numpy(np.array(part, np.int64)) for part in self.rows())
        adjacency = Adjacency.from_sorted(source, owners(rowptr, len(source)), self.num_nodes)
        fields: dict[str, Any] = {**self.node_fields(every), **self.edge_fields(every)}
        graph = Graph(adjacency, self.features(every), name=self.name, **fields)
        try:
            graph._validate()
        except ValueError as error:
            raise DataError(f"{self.path} is damaged: {error}; convert it again") from error
        return graph

    def nodes(self, seed: int) -> Graph:
        """Return the nodes without edges and features, with labels and masks; a random split if none."""
        none, starts = (torch.zeros(count, dtype=torch.long) for count in (0, self.num_nodes + 1))
        features = Features.sparse(starts, none, torch.zeros(0), self.num_features)
        fields: dict[str, Any] = {**self.node_fields(slice(None)), **self.edge_fields(slice(0, 0))}
        adjacency = Adjacency.from_sorted(none, none, self.num_nodes)
        graph = Graph(adjacency, features if self.has_features else None, name=self.name, **fields)
        graph._validate()
        if graph.y is None or any(mask is not None for mask in (graph.train_mask, graph.val_mask)):
            return graph
        split = random_split(graph.y, seed)
        return graph.replace(train_mask=split.train, val_mask=split.val, test_mask=split.test)


def _copied(array: Array, places: slice | Array) -> Tensor:
    return torch.from_numpy(np.array(array[places]) if isinstance(places, slice) else array.take(places, 0))


def _gather_rows(
    indptr: Array, indices: Array, values: Array, nodes: slice | Array, num_columns: int
) -> Features:
    if isinstance(nodes, slice):
        first, last, _ = nodes.indices(len(indptr) - 1)
        pointers = np.array(indptr[first : max(first, last) + 1], np.int64)
        places: Any = slice(pointers[0], pointers[-1])
        pointers -= pointers[0]
    else:
        counts = indptr[nodes + 1] - indptr[nodes]
        pointers = np.concatenate([[0], np.cumsum(counts)])
        places = np.arange(pointers[-1]) + np.repeat(indptr[nodes] - pointers[:-1], counts)
    parts = pointers, np.array(indices[places], np.int64), np.array(values[places])
    starts, columns, numbers = map(torch.from_numpy, parts)
    return Features.sparse(starts, columns, numbers, num_columns)


@typed
def open_store(path: Path | str) -> StoredGraph:
    """Open a stored graph; only its manifest is read. `DataError` as of `StoredGraph`.

    Example:
        >>> import fgai
        >>> stored = fgai.large.write_store(fgai.load_dataset("planted"), "planted")
        >>> open_store("planted")
        StoredGraph('planted', nodes=2000, edges=15914, features=308)
    """
    return StoredGraph(path)


def _reopened(path: str, checked: bool, verified: list[str]) -> StoredGraph:
    stored = StoredGraph(path)
    stored._checked = checked
    stored._arrays.verified.update(verified)
    return stored
