"""`load_graph`: a graph of your own from an `.npz` archive, a PyG `.pt` file, CSV tables or a folder.

Files are not trusted: arrays are read without pickles and no larger than the file's size allows, `.pt` files
by PyTorch's restricted loader, which knows PyG's `Data` and tensors and runs nothing.
"""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fgai.errors import DataError, FgaiError, InputError
from fgai.files import load_torch, read_arrays, regular, require_whole
from fgai.graph import Graph
from fgai.graph.fields import PARTS, arguments_from_data
from fgai.graph.on_disk import GraphOnDisk, is_store
from fgai.typed import typed

MASKS = ("train_mask", "val_mask", "test_mask")
FIELDS = ("edge_index", "x", "y", *MASKS, "edge_attr", "edge_weight", "num_nodes")
"""Names in an archive, those of PyG's `Data`; all but the first may be missing."""
TABLES = ("edges.csv", "nodes.csv")  # in a folder; the second may be missing
ENDS = ("source", "destination")
_MISNAMED = {"id": "node", "label": "y", "class": "y", "mask": "split", "target": "destination"}
"""Frequent wrong names of columns, and the right ones; they are refused, not read as attributes."""
_MOST_NODES_PER_EDGE = 64  # beyond a million nodes; larger node numbers are probably arbitrary ids


@typed
def load_graph(path: Path | str, node_table: Path | str | None = None) -> Graph:
    """Read a graph from a file or folder; it is named after it. `DataError` if it is damaged or unsafe.

    - `.npz`: arrays by the names of PyG's `Data`; only `edge_index` is required, unknown names are refused.
      Numbers become float32, labels whole numbers.
    - `.pt`: a PyG `Data`, or a dictionary of tensors by the same names, as `torch.save` writes them.
    - `.csv`: one row per edge under a heading: `source` and `destination`, `weight` if edges have one, and
      every other column is an attribute of the edges. With a `node_table`, one row per node: `node` (each
      once), `y` (class, or empty), `split` (train, val, test or empty), and every other column is a feature.
      Nodes are numbers from 0, or any names; classes likewise (`Graph.node_names`, `class_names`).
    - a folder with `edges.csv` and perhaps `nodes.csv`, or one written by `fgai data convert`.
    """
    path, table = Path(path), None if node_table is None else Path(node_table)
    if is_store(path) and table is None:
        stored: GraphOnDisk = import_module("fgai.large").StoredGraph(path)  # which imports this package
        return stored.load()
    name = path.stem
    if path.is_dir() and table is None:
        name, (path, table) = path.resolve().name, (path / file for file in TABLES)
        if not path.exists():
            tables = f"{TABLES[0]} and perhaps {TABLES[1]}"
            raise DataError(f"{path.parent} must hold {tables}, or be a folder of `fgai data convert`")
        table = table if table.exists() else None
    if path.suffix not in (".npz", ".pt", ".csv"):
        raise DataError(f"{path} must be a graph as .npz, .pt or .csv, or a folder; see `fgai.load_graph`")
    if table is not None and path.suffix != ".csv":
        raise InputError(f"`node_table` is for an edge list in CSV, got {path.name}")
    try:
        for file in (path, table):
            if file is not None:
                regular(file)
        if path.suffix == ".csv":
            fields = _read_tables(path, table)
        else:
            fields = _read_archive(path) if path.suffix == ".npz" else _read_saved(path)
        return _to_graph(fields, path, name)
    except FgaiError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"there is no file {error.filename}") from None
    except Exception as error:  # a damaged file can fail in any way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} is damaged, or not what its name says ({reason})") from error


def _to_graph(fields: dict[str, Any], path: Path, name: str) -> Graph:
    if "edge_index" not in fields:
        raise DataError(f"{path} holds no `edge_index` [2, edges]; it has {', '.join(fields) or 'nothing'}")
    edges = fields["edge_index"]
    if "num_nodes" not in fields:
        sizes = [len(fields[name]) for name in ("x", "y", *MASKS) if name in fields]
        if not sizes and edges.numel():
            sizes = [count_nodes(int(edges.max()), edges.shape[-1])]
        fields["num_nodes"] = sizes[0] if sizes else 0
    names = {key: fields.pop(key, None) for key in ("node_names", "class_names")}
    graph = Graph.from_edges(**arguments_from_data(SimpleNamespace(**fields)), name=name)
    return graph.replace(**names)


def _read_archive(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        require_whole(archive)
        names = [name.removesuffix(".npy") for name in archive.namelist()]
    if unknown := [name for name in names if name not in FIELDS]:
        known = ", ".join(FIELDS)
        raise DataError(f"{path} holds {unknown[0]!r}, which is none of {known}; rename or remove it")
    fields: dict[str, Any] = {}
    for name, values in read_arrays(path, names).items():
        kind = values.dtype.kind
        if kind not in "biuf":
            raise DataError(f"`{name}` of {path} must hold numbers, got {values.dtype}")
        tensor = torch.from_numpy(values)
        if name in ("edge_index", "y", "num_nodes"):
            fields[name] = tensor.long() if kind in "iu" else tensor
        else:
            fields[name] = tensor if kind == "b" else tensor.float()
    return fields


def _read_saved(path: Path) -> dict[str, Any]:
    """Read a `Data` or a dictionary by PyTorch's restricted loader, which makes tensors alone."""
    from torch_geometric.data import Data
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    try:
        content = load_torch(path, (Data, DataEdgeAttr, DataTensorAttr, GlobalStorage))
    except ValueError as error:
        remedy = "write a PyG `Data` anew, `torch.save(data.to_dict(), path)`"
        raise DataError(f"{path} was refused: {error}; {remedy}") from error
    fields = Data.to_dict(content) if type(content) is Data else content
    if not isinstance(fields, dict):
        kind = type(content).__name__
        raise DataError(f"{path} must hold a PyG `Data` or a dictionary of tensors, got {kind}")
    names = (*FIELDS, "edge_type")
    return {name: fields[name] for name in names if isinstance(fields.get(name), Tensor | int)}


class _Table:
    """A CSV file: the words of each column, and the line of each row; empty lines are skipped."""

    def __init__(self, path: Path, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            heading = [name.strip() for name in next(reader, [])]
            rows = [(reader.line_num, [word.strip() for word in row]) for row in reader if row]
        for name in heading:
            right = _MISNAMED.get(name.lower())
            if right in (*required, *optional) and right not in heading:
                raise DataError(f"{path} has a column `{name}`; rename it `{right}` if it is that")
        missing = [name for name in required if name not in heading]
        if missing or len(set(heading)) != len(heading):
            rule = f"a column `{missing[0]}`" if missing else "different columns"
            columns = ", ".join(heading) or "nothing"
            raise DataError(f"{path} must have {rule} in its first line, got {columns}")
        bad = next((line for line, row in rows if len(row) != len(heading)), None)
        if bad is not None or not rows:
            raise DataError(f"{path} must have {len(heading)} values in every line; look at line {bad or 2}")
        self.path, self.lines = path, [line for line, _ in rows]
        self.columns = {name: [row[index] for _, row in rows] for index, name in enumerate(heading)}

    def refuse(self, name: str, invalid: Callable[[str], bool], rule: str) -> None:
        """Raise `DataError` at the first word of a column that is invalid; `rule` says what it must be."""
        for line, word in zip(self.lines, self.columns[name], strict=True):
            if invalid(word):
                raise DataError(f"`{name}` in line {line} of {self.path} {rule}, got {word!r}")

    def numbers(self, name: str, kind: type[int] | type[float] = float) -> list[Any]:
        values: list[Any] = []
        for line, word in zip(self.lines, self.columns[name], strict=True):
            try:
                values.append(kind(word))
            except ValueError:
                rule = f"must be {'a whole number' if kind is int else 'a number'}, got {word!r}"
                raise DataError(f"`{name}` in line {line} of {self.path} {rule}") from None
        return values

    def matrix(self, used: tuple[str, ...]) -> Tensor | None:
        """Return the columns that are not `used` as float32 [rows, columns]; None if there are none."""
        values = [self.numbers(name) for name in self.columns if name not in used]
        return torch.from_numpy(np.array(values, dtype=np.float32).T.copy()) if values else None


def _read_tables(path: Path, nodes: Path | None) -> dict[str, Any]:
    edges = _Table(path, ENDS)
    fields, numbers = ({}, None) if nodes is None else _read_nodes(nodes)
    if numbers is None and all(_is_number(edges.columns[name][0]) for name in ENDS):
        fields["edge_index"] = torch.tensor([edges.numbers(name, int) for name in ENDS])
    else:
        if numbers is None:  # nodes are numbered in the order in which their names appear
            for name in ENDS:
                edges.refuse(name, _is_number, "must be a name, not a number, as others are")
            pairs = zip(*(edges.columns[name] for name in ENDS), strict=True)
            numbers = {name: index for index, name in enumerate(dict.fromkeys(chain.from_iterable(pairs)))}
            fields["node_names"], fields["num_nodes"] = tuple(numbers), len(numbers)
        for name in ENDS:
            edges.refuse(name, lambda word: word not in numbers, f"must be a node of {nodes}")
        ends = [[numbers[word] for word in edges.columns[name]] for name in ENDS]
        fields["edge_index"] = torch.tensor(ends)
    if "weight" in edges.columns:
        fields["edge_weight"] = torch.tensor(edges.numbers("weight"))
    attributes = edges.matrix((*ENDS, "weight"))
    return fields if attributes is None else {**fields, "edge_attr": attributes}


def _is_number(word: str) -> bool:
    return word.isdecimal() and word.isascii()


def node_fields(path: Path) -> dict[str, Any]:
    """Read a table of numbered nodes, `class_names` included; `DataError` if nodes have names."""
    fields, _ = _read_nodes(path)
    if "node_names" in fields:
        raise DataError(f"`node` of {path} must hold all numbers from 0 on; for names, convert its folder")
    return fields


def _read_nodes(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the fields of a node table, and the number of each node by its word in the table."""
    table, fields = _Table(path, ("node",), ("y", "split")), dict[str, Any]()
    names, split = table.columns["node"], table.columns.get("split")
    first: dict[str, int] = {}
    for line, name in zip(table.lines, names, strict=True):
        if not name:
            raise DataError(f"`node` in line {line} of {path} is empty")
        if name in first:
            raise DataError(f"node {name!r} is in lines {first[name]} and {line} of {path}; keep one of them")
        first[name] = line
    if all(map(_is_number, names)) and {int(name) for name in names} == set(range(len(names))):
        numbers = {name: int(name) for name in names}
    else:
        numbers = {name: index for index, name in enumerate(names)}
        fields["node_names"] = tuple(names)
    rows = torch.tensor([numbers[name] for name in names]).argsort()
    if "y" in table.columns:
        labels, classes = _classes(table)
        fields["y"] = labels[rows]
        if classes is not None:
            fields["class_names"] = classes
    if split is not None:
        table.refuse("split", lambda word: word not in (*PARTS, ""), "must be train, val, test or nothing")
        for part in PARTS:
            fields[f"{part}_mask"] = torch.tensor([word == part for word in split])[rows]
    features = table.matrix(("node", "y", "split"))
    return (fields if features is None else {**fields, "x": features[rows]}), numbers


def _classes(table: _Table) -> tuple[Tensor, tuple[str, ...] | None]:
    """Return class numbers, -1 for none, and the names of the classes unless they are numbers."""
    words = table.columns["y"]
    for line, word, part in zip(table.lines, words, table.columns.get("split") or words, strict=True):
        if not word and part:
            raise DataError(f"line {line} of {table.path} has the split {part!r}, but no class `y`")
    if all(_is_number(word) or word in ("", "-1") for word in words):
        return torch.tensor([int(word or -1) for word in words]), None
    classes = tuple(sorted({word for word in words if word}))
    if any(_is_number(name) for name in classes):
        text = "must be a whole number as others are"
        table.refuse("y", lambda word: bool(word) and not _is_number(word), text)
    numbers = {name: index for index, name in enumerate(classes)} | {"": -1}
    return torch.tensor([numbers[word] for word in words]), classes


def count_nodes(largest: int, edges: int) -> int:
    """Return the number of nodes for a largest node number; `DataError` if there are too few edges."""
    if largest > _MOST_NODES_PER_EDGE * edges + (1 << 20):
        text = f"an edge names node {largest}, which is too large for {edges} edges"
        raise DataError(f"{text}; number the nodes from 0 on, or give features, one row per node")
    return max(1, largest + 1)
