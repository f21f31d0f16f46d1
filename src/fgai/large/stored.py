"""`StoredGraph`: a graph in a folder, whose arrays are mapped into memory and never read as a whole."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from fgai.datasets import random_split
from fgai.datasets.own import MASKS
from fgai.errors import CheckpointError, DataError
from fgai.files import add_checksum, check, digest_of, parse_json, regular, take_checksum
from fgai.graph import Graph
from fgai.graph.on_disk import MANIFEST, GraphOnDisk
from fgai.large.arrays import Array, _are_rows, _ArrayInfo, map_array
from fgai.sparse import Adjacency, Features
from fgai.sparse.valid import LARGEST, row_index
from fgai.typed import typed

VERSION = 2
NAMES = "names.json"
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
"""Every array of a stored graph, and its type on every machine."""


class _Names(TypedDict, total=False):
    node_names: list[str]
    class_names: list[str]


class _Manifest(TypedDict):
    format: Literal["fgai graph"]
    version: int  # of the format
    name: str  # of the graph
    num_nodes: int  # N
    num_edges: int  # E
    num_features: int  # F
    fingerprint: str  # of the graph, see `fgai.datasets.fingerprint`
    sources: str  # hash of the files and options it was converted from; empty otherwise
    arrays: dict[str, _ArrayInfo]  # by name; each is a file `NAME.npy`
    names: NotRequired[str]  # SHA-256 of `names.json`


def encode(manifest: Mapping[str, Any]) -> str:
    """Return the text of a manifest with its checksum."""
    return json.dumps(add_checksum(manifest), indent=1, ensure_ascii=False) + "\n"


class _ArrayFolder(ABC):
    """A folder of arrays and a manifest; arrays are mapped when first used, and verified once."""

    _file: ClassVar[str]  # the manifest's name
    _version: ClassVar[int]  # of its format
    _layout: ClassVar[Any]  # its type
    _kind: ClassVar[str]  # what the folder holds
    _remedy: ClassVar[str]  # ends the message about damage

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        file = self.path / self._file
        try:
            values = parse_json(regular(file).read_bytes())
            version = values.get("version") if isinstance(values, dict) else None
            if isinstance(version, int) and version != self._version:
                if version > self._version:
                    raise DataError(f"{file} is of a newer version, {version}; update fgai")
                raise DataError(f"{file} is of an older version, {version}; make it again")
            self._manifest = take_checksum(values)
            if self._manifest is values:
                raise ValueError("it has no checksum")
            check(self._manifest, self._layout, file.name)
            self._infos: dict[str, _ArrayInfo] = self._manifest["arrays"]
            self._check_shapes()
        except FileNotFoundError:
            raise DataError(f"{path} holds no {self._kind}: there is no {self._file}") from None
        except (CheckpointError, ValueError, OSError) as error:
            raise DataError(f"{file} is damaged: {error}; {self._remedy}") from error
        self._arrays: dict[str, Array] = {}
        self._verified: set[str] = set()

    @abstractmethod
    def _check_shapes(self) -> None:
        """Raise `ValueError` unless the arrays are of the same nodes and edges."""

    @abstractmethod
    def rows(self) -> _Rows:
        """Return the incoming edges, checked once; `DataError` if they are damaged."""

    def verify(self) -> None:
        """Compare every array with its checksum, once; `DataError` if a file is missing or damaged."""
        self.rows()
        self._verify()

    def _open(self, name: str) -> Array:
        if name not in self._arrays:
            file, info = self.path / f"{name}.npy", self._infos[name]
            try:
                array = map_array(file)
                kind, shape = array.dtype.str, list(array.shape)
                if (kind, shape) != (info["dtype"], info["shape"]) or not array.flags.c_contiguous:
                    raise ValueError(f"it holds {kind} {shape}, not {info['dtype']} {info['shape']}")
                self._arrays[name] = array
            except (OSError, ValueError) as error:
                raise DataError(f"{file} is damaged or missing ({error}); {self._remedy}") from error
        return self._arrays[name]

    def _verify(self, names: Iterable[str] | None = None) -> None:
        """Read arrays, all by default, and compare them with their checksums; each only once."""
        for name in self._infos if names is None else names:
            if name in self._verified:
                continue
            self._open(name)
            file = self.path / f"{name}.npy"
            if digest_of(file) != self._infos[name]["sha256"]:
                raise DataError(f"{file} is damaged: it does not fit its checksum; {self._remedy}")
            self._verified.add(name)

    def _checked_rows(self, pointers: str, index: str, count: int) -> _Rows:
        """Return compressed rows by the names of their arrays, checked once: entries are below `count`."""
        rows = _Rows(self._open(pointers), self._open(index))
        if pointers not in self._verified:
            if not _are_rows(*rows, count):
                raise DataError(f"{self.path} is damaged: its indices point outside; {self._remedy}")
            self._verify((pointers, index))
        return rows


class _Rows(NamedTuple):
    """Incoming edges in compressed rows; read-only, all indices are valid."""

    rowptr: Array  # [N + 1] int64; the edges into node i are `rowptr[i]:rowptr[i + 1]`
    source: Array  # [E] int32, where each edge starts

    def to_adjacency(self) -> Adjacency:
        rowptr, source = (torch.from_numpy(np.array(part, np.int64)) for part in self)
        return Adjacency.from_sorted(source, row_index(rowptr, len(source)), len(rowptr) - 1)


@typed
class StoredGraph(_ArrayFolder, GraphOnDisk):
    """A graph in the folder `path`, written by `write_store` or `fgai data convert`.

    Edges are sorted by (destination, source), as those of a `Graph`: an edge has the same position in both.
    Opening it reads the manifest alone, which holds its `name`, sizes and `fingerprint` and the hash of its
    `sources`. `rows` compares the indices with their checksums, once; `load` and `verify` all arrays.
    `DataError` if the folder is damaged.

    Example:
        >>> import fgai
        >>> stored = fgai.large.write_store(fgai.load_dataset("planted"), "planted")
        >>> StoredGraph("planted")
        StoredGraph('planted', nodes=2000, edges=15914, features=308)
    """

    _file, _version, _layout = MANIFEST, VERSION, _Manifest
    _kind, _remedy = "stored graph (see `fgai data convert`)", "convert the graph again"

    def __init__(self, path: Path | str) -> None:
        super().__init__(path)
        manifest: _Manifest = self._manifest
        self.name, self.fingerprint, self.sources = (manifest[k] for k in ("name", "fingerprint", "sources"))
        self.num_nodes, self.num_edges = manifest["num_nodes"], manifest["num_edges"]
        self.num_features: int = manifest["num_features"]

    def __repr__(self) -> str:
        sizes = f"nodes={self.num_nodes}, edges={self.num_edges}, features={self.num_features}"
        return f"StoredGraph({self.name!r}, {sizes})"

    def __reduce__(self) -> tuple[Any, ...]:
        return StoredGraph, (os.path.realpath(self.path),), {"_verified": self._verified}

    def _check_shapes(self) -> None:
        manifest: _Manifest = self._manifest
        arrays, nodes, edges = manifest["arrays"], manifest["num_nodes"], manifest["num_edges"]
        width = manifest["num_features"]
        if not 1 <= nodes <= LARGEST or edges < 0 or width < 0:
            raise ValueError(f"{nodes} nodes, {edges} edges and {width} features are no graph")
        if unknown := [name for name, info in arrays.items() if info["dtype"] != DTYPES.get(name)]:
            raise ValueError(f"`{unknown[0]}` is no array of this format, or of another type")
        features = sum(name in arrays for name in SPARSE), int("x" in arrays)
        if "rowptr" not in arrays or "source" not in arrays or features not in ((0, 0), (3, 0), (0, 1)):
            raise ValueError("edges or features are incomplete")
        entries = arrays["x_indices"]["shape"][:1] if features[0] else [0]
        shapes = {
            "rowptr": [nodes + 1],
            "source": [edges],
            "x": [nodes, width],
            **dict(zip(SPARSE, ([nodes + 1], entries, entries), strict=True)),
            **{name: [nodes] for name in NODE_ARRAYS},
            **{name: [edges] for name in EDGE_ARRAYS},
        }
        for name, info in arrays.items():
            shape = info["shape"][:1] if name == "edge_attr" and len(info["shape"]) == 2 else info["shape"]
            if shape != shapes[name] or min(info["shape"], default=0) < 0:
                raise ValueError(f"`{name}` has shape {info['shape']}, which does not fit the rest")

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
        self._verify(["y"])
        return int(y.max()) + 1

    @cached_property
    def names(self) -> dict[str, tuple[str, ...]]:
        """`node_names` and `class_names` of a `Graph`, if the graph has them."""
        if "names" not in self._manifest:
            return {}
        path = self.path / NAMES
        try:
            if digest_of(path) != self._manifest["names"]:
                raise ValueError("it does not fit its checksum")
            names = parse_json(path.read_bytes())
            check(names, _Names, NAMES)
        except (CheckpointError, ValueError, OSError) as error:
            raise DataError(f"{path} is damaged or missing ({error}); {self._remedy}") from error
        return {kind: tuple(values) for kind, values in names.items()}

    def array(self, name: str) -> Array | None:
        """Return one array, mapped and read-only, or None; `DataError` if the file is missing or damaged."""
        return self._open(name) if name in self._infos else None

    def verify(self) -> None:
        """Compare every file with its checksum, once; `DataError` if one is missing or damaged."""
        super().verify()
        _ = self.names

    def rows(self) -> _Rows:
        """Return the incoming edges, checked once; `DataError` if they point outside the graph."""
        rows = self._checked_rows("rowptr", "source", self.num_nodes)
        if "x_indptr" in self._infos:
            self._checked_rows("x_indptr", "x_indices", self.num_features)
        return rows

    def features(self, nodes: slice | Array) -> Features | None:
        """Read the features of some nodes, a slice or numbers, in the order given; None if there are none."""
        dense = self.array("x")
        if dense is not None:
            return Features.dense(_copy(dense, nodes))
        if not self.has_features:
            return None
        self.rows()  # checks all indices
        indptr, indices, values = (self._open(name) for name in SPARSE)
        return _gather_rows(indptr, indices, values, nodes, self.num_features)

    def node_fields(self, nodes: slice | Array) -> dict[str, Tensor]:
        """Read labels and masks of some nodes, in the order given, by the names of a `Graph`."""
        return {name: _copy(self._open(name), nodes) for name in NODE_ARRAYS if name in self._infos}

    def edge_fields(self, edges: slice | Array) -> dict[str, Tensor]:
        """Read values on some edges by their positions, by the names of a `Graph`."""
        return {name: _copy(self._open(name), edges) for name in EDGE_ARRAYS if name in self._infos}

    def load(self) -> Graph:
        """Read the whole graph into memory and compare checksums; `DataError` if it is damaged."""
        self.verify()
        every = slice(None)
        fields: dict[str, Any] = {**self.node_fields(every), **self.edge_fields(every), **self.names}
        graph = Graph(self.rows().to_adjacency(), self.features(every), name=self.name, **fields)
        try:
            graph._validate()
        except ValueError as error:
            raise DataError(f"{self.path} is damaged: {error}; {self._remedy}") from error
        return graph

    def nodes(self, seed: int) -> Graph:
        """Return the nodes without edges and features, with labels and masks; a random split if none."""
        none, starts = (torch.zeros(count, dtype=torch.long) for count in (0, self.num_nodes + 1))
        features = Features.sparse(starts, none, torch.zeros(0), self.num_features)
        fields: dict[str, Any] = {**self.node_fields(slice(None)), **self.names}
        fields |= self.edge_fields(slice(0, 0))
        adjacency = Adjacency.from_sorted(none, none, self.num_nodes)
        graph = Graph(adjacency, features if self.has_features else None, name=self.name, **fields)
        graph._validate()
        if graph.y is None or any(mask is not None for mask in (graph.train_mask, graph.val_mask)):
            return graph
        return graph.replace(**dict(zip(MASKS, random_split(graph.y, seed), strict=True)))


def _copy(array: Array, index: slice | Array) -> Tensor:
    return torch.from_numpy(np.array(array[index]) if isinstance(index, slice) else array.take(index, 0))


def _gather_rows(
    indptr: Array, indices: Array, values: Array, nodes: slice | Array, num_columns: int
) -> Features:
    if isinstance(nodes, slice):
        first, last, _ = nodes.indices(len(indptr) - 1)
        pointers = np.array(indptr[first : max(first, last) + 1], np.int64)
        entries: Any = slice(pointers[0], pointers[-1])
        pointers -= pointers[0]
    else:
        counts = indptr[nodes + 1] - indptr[nodes]
        pointers = np.concatenate([[0], np.cumsum(counts)])
        entries = np.arange(pointers[-1]) + np.repeat(indptr[nodes] - pointers[:-1], counts)
    parts = pointers, np.array(indices[entries], np.int64), np.array(values[entries])
    starts, columns, numbers = map(torch.from_numpy, parts)
    return Features.sparse(starts, columns, numbers, num_columns)
