"""`load_graph`: a graph of your own from an `.npz` archive, a PyG `.pt` file, CSV tables or a folder.

Files are not trusted: arrays are read without pickles and no larger than their file explains, `.pt` files by
PyTorch's restricted loader, which knows PyG's `Data` and tensors and runs nothing.
"""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fgai.errors import DataError, FgaiError, InputError
from fgai.files import load_torch, read_arrays, regular, require_whole
from fgai.graph import Graph
from fgai.graph.fields import arguments_from_data
from fgai.graph.on_disk import is_store, open_on_disk
from fgai.typed import typed

MASKS = ("train_mask", "val_mask", "test_mask")
FIELDS = ("edge_index", "x", "y", *MASKS, "edge_attr", "edge_weight", "num_nodes")
"""Names in an archive, those of PyG's `Data`; all but the first may be missing."""
PARTS = ("train", "val", "test")
TABLES = ("edges.csv", "nodes.csv")
"""Names of the tables in a folder; the second may be missing."""
_MEANT = {"id": "node", "label": "y", "class": "y", "mask": "split", "target": "destination"}
"""Columns that would be read as numbers beside the rest though another name is probably meant."""
_SPARSEST = 64
"""Nodes per edge, beyond a million of them, from which numbers are taken for labels rather than numbers."""
Reader = Callable[[Path], dict[str, Any]]


@typed
def load_graph(path: Path | str, node_table: Path | str | None = None) -> Graph:
    """Read a graph from a file; it is named after the file.

    - `.npz`: arrays by the names of PyG's `Data`, see `FIELDS`; only `edge_index` must be there, any other
      name is refused. Numbers become float32, labels whole numbers.
    - `.pt`: a PyG `Data`, or a dictionary of tensors by the same names, as `torch.save` writes them.
    - `.csv`: one row per edge under a heading: `source` and `destination`, `weight` if edges have one, and
      every other column is an attribute of the edges. With a `node_table`, one row per node: `node` (each
      once), `y` (class, or nothing), `split` (train, val, test or nothing), and every other column is a
      feature. Nodes are numbers from 0, or any names; classes likewise (`Graph.node_names`, `class_names`).
    - a folder with `edges.csv` and perhaps `nodes.csv`, or as `fgai data convert` leaves it.

    Args:
        path: the file or folder.
        node_table: of an edge list in CSV.

    Raises:
        DataError: no such file, of another kind, damaged, unsafe, or a table that does not fit.
        InputError: what it holds is no graph, see `Graph.from_edges`.
    """
    path = Path(path)
    if is_store(path) and node_table is None:
        return open_on_disk(path).load()
    name, table = path.stem, None if node_table is None else Path(node_table)
    if path.is_dir() and table is None:
        name, (path, table) = path.resolve().name, _tables_in(path)
    readers: dict[str, Reader] = {".npz": _archive, ".pt": _saved, ".csv": partial(_tables, nodes=table)}
    if path.suffix not in readers:
        raise DataError(f"{path} must be a graph as .npz, .pt or .csv, or a folder; see `fgai.load_graph`")
    if table is not None and path.suffix != ".csv":
        raise InputError(f"`node_table` goes with an edge list in CSV, got {path.name}")
    try:
        for file in (path, table):
            if file is not None:
                regular(file)
        return _graph(readers[path.suffix](path), path, name)
    except FgaiError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"there is no file {error.filename}") from None
    except Exception as error:  # a damaged file can fail in any way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} is damaged, or not what its name says ({reason})") from error


def _tables_in(folder: Path) -> tuple[Path, Path | None]:
    edges, nodes = (folder / name for name in TABLES)
    if not edges.exists():
        raise DataError(
            f"{folder} must hold {TABLES[0]} and perhaps {TABLES[1]}, or be a folder of `fgai data convert`;"
            " see `fgai.load_graph`"
        )
    return edges, nodes if nodes.exists() else None


def _graph(fields: dict[str, Any], path: Path, name: str) -> Graph:
    """The graph of PyG's fields, after all checks."""
    if "edge_index" not in fields:
        raise DataError(f"{path} holds no `edge_index` [2, edges]; it has {', '.join(fields) or 'nothing'}")
    edges = fields["edge_index"]
    if "num_nodes" not in fields:
        known = [len(fields[name]) for name in ("x", "y", *MASKS) if name in fields]
        inferred = count_nodes(int(edges.max()), edges.shape[-1]) if edges.numel() and not known else 0
        fields["num_nodes"] = known[0] if known else inferred
    names = {key: fields.pop(key, None) for key in ("node_names", "class_names")}
    graph = Graph.from_edges(**arguments_from_data(SimpleNamespace(**fields)), name=name)
    return graph.replace(**names)


def _archive(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        require_whole(archive)
        names = [name.removesuffix(".npy") for name in archive.namelist()]
    odd = [name for name in names if name not in FIELDS]
    if odd:
        raise DataError(f"{path} holds {odd[0]!r}, which is none of {', '.join(FIELDS)}; rename or remove it")
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


def _saved(path: Path) -> dict[str, Any]:
    """The fields of a `Data` or of a dictionary, by the loader that makes tensors and nothing else."""
    from torch_geometric.data import Data
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    try:
        found = load_torch(path, (Data, DataEdgeAttr, DataTensorAttr, GlobalStorage))
    except ValueError as error:
        raise DataError(
            f"{path} was refused: {error}; write a PyG `Data` anew, `torch.save(data.to_dict(), path)`"
        ) from error
    given = Data.to_dict(found) if type(found) is Data else found
    if not isinstance(given, dict):
        raise DataError(
            f"{path} must hold a PyG `Data` or a dictionary of tensors, got {type(found).__name__}"
        )
    kept = (*FIELDS, "edge_type")
    return {name: given[name] for name in kept if isinstance(given.get(name), Tensor | int)}


def _tables(path: Path, nodes: Path | None) -> dict[str, Any]:
    columns = _columns(path, ("source", "destination"), ())
    fields, numbers = ({}, None) if nodes is None else _node_table(nodes)
    fields["edge_index"] = _ends(columns, path, nodes, numbers, fields)
    if "weight" in columns:
        fields["edge_weight"] = torch.tensor(_numbers(columns.pop("weight"), "weight", path))
    if columns:
        fields["edge_attr"] = _matrix(columns, path)
    return fields


def _ends(
    columns: dict[str, _Column],
    path: Path,
    table: Path | None,
    numbers: dict[str, int] | None,
    fields: dict[str, Any],
) -> Tensor:
    """Sources and destinations by number; names without a table are numbered as they come."""
    ends = {name: columns.pop(name) for name in ("source", "destination")}
    named = not all(_is_number(word) for words in ends.values() for word in words[:1])
    if numbers is None and not named:
        return torch.tensor([_numbers(words, name, path, int) for name, words in ends.items()])
    if numbers is None:
        for name, words in ends.items():
            if odd := words.first(_is_number):
                raise DataError(
                    f"`{name}` in line {odd[0]} of {path} must be a name as others are, got {odd[1]!r}"
                )
        pairs = zip(*ends.values(), strict=True)
        numbers = {name: place for place, name in enumerate(dict.fromkeys(w for pair in pairs for w in pair))}
        fields["node_names"], fields["num_nodes"] = tuple(numbers), len(numbers)
    for name, words in ends.items():
        if odd := words.first(lambda word: word not in numbers):
            where = "" if table is None else f", which {table} does not have"
            raise DataError(f"`{name}` in line {odd[0]} of {path} is node {odd[1]!r}{where}")
    return torch.tensor([[numbers[word] for word in words] for words in ends.values()])


def _is_number(word: str) -> bool:
    return word.isdecimal() and word.isascii()


def node_fields(path: Path) -> dict[str, Any]:
    """Fields of a table of numbered nodes, `class_names` among them; `DataError` if nodes have names."""
    fields, _ = _node_table(path)
    if "node_names" in fields:
        raise DataError(
            f"`node` of {path} must hold every number from 0 on once; for names, convert its folder"
        )
    return fields


def _node_table(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Fields of a node table, and the number of each node by what the table calls it."""
    columns = _columns(path, ("node",), ("y", "split"))
    names, fields = columns.pop("node"), dict[str, Any]()
    _refuse_twice(names, path)
    if all(_is_number(name) for name in names) and {int(name) for name in names} == set(range(len(names))):
        numbers = {name: int(name) for name in names}
    else:
        numbers = {name: place for place, name in enumerate(names)}
        fields["node_names"] = tuple(names)
    rows = torch.tensor([numbers[name] for name in names]).argsort()
    split = columns.pop("split", None)
    if "y" in columns:
        labels, classes = _classes(columns.pop("y"), split, path)
        fields["y"] = labels[rows]
        if classes is not None:
            fields["class_names"] = classes
    if split is not None:
        if odd := split.first(lambda word: word not in (*PARTS, "")):
            raise DataError(
                f"`split` in line {odd[0]} of {path} must be train, val, test or nothing, got {odd[1]!r}"
            )
        for part in PARTS:
            fields[f"{part}_mask"] = torch.tensor([word == part for word in split])[rows]
    if columns:
        fields["x"] = _matrix(columns, path)[rows]
    return fields, numbers


def _refuse_twice(names: _Column, path: Path) -> None:
    first: dict[str, int] = {}
    for line, name in zip(names.lines, names, strict=True):
        if not name:
            raise DataError(f"`node` in line {line} of {path} is empty")
        if name in first:
            raise DataError(f"node {name!r} is in lines {first[name]} and {line} of {path}; keep one of them")
        first[name] = line


def _classes(words: _Column, split: _Column | None, path: Path) -> tuple[Tensor, tuple[str, ...] | None]:
    """Class numbers, -1 where there is none, and the names of the classes if they are no numbers."""
    for line, word, part in zip(words.lines, words, split or [""] * len(words), strict=True):
        if not word and part:
            raise DataError(f"line {line} of {path} has the split {part!r} and no class `y`; fill in one")
    if all(_is_number(word) or word in ("", "-1") for word in words):
        return torch.tensor([int(word or -1) for word in words]), None
    classes = tuple(sorted({word for word in words if word}))
    if any(_is_number(name) for name in classes):
        odd = words.first(lambda word: bool(word) and not _is_number(word))
        line, word = odd or (words.lines[0], words[0])
        raise DataError(f"`y` in line {line} of {path} must be a whole number as others are, got {word!r}")
    numbers = {name: place for place, name in enumerate(classes)} | {"": -1}
    return torch.tensor([numbers[word] for word in words]), classes


class _Column(list[str]):
    """The words of a column; `lines` holds the number of each word's line in the file."""

    lines: list[int]

    def first(self, wrong: Callable[[str], bool]) -> tuple[int, str] | None:
        """Return the line and the text of the first word that is wrong, if any is."""
        return next(((line, word) for line, word in zip(self.lines, self, strict=True) if wrong(word)), None)


def _columns(path: Path, needed: tuple[str, ...], known: tuple[str, ...]) -> dict[str, _Column]:
    """Words of a table by column; empty lines are passed over."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        heading = [name.strip() for name in next(reader, [])]
        numbered = ((reader.line_num, [word.strip() for word in row]) for row in reader)
        rows = {line: row for line, row in numbered if row}
    for name in heading:
        meant = _MEANT.get(name.lower())
        if meant in (*needed, *known) and meant not in heading:
            raise DataError(f"{path} has a column `{name}`; rename it `{meant}` if it is that")
    missing = [name for name in needed if name not in heading]
    if missing or len(set(heading)) != len(heading):
        wanted = f"a column `{missing[0]}`" if missing else "different columns"
        raise DataError(f"{path} must have {wanted} in its first line, got {', '.join(heading) or 'nothing'}")
    odd = next((line for line, row in rows.items() if len(row) != len(heading)), None)
    if odd is not None or not rows:
        raise DataError(f"{path} must have {len(heading)} values in every line; look at line {odd or 2}")
    columns = {
        name: _Column(row[place].strip() for row in rows.values()) for place, name in enumerate(heading)
    }
    for column in columns.values():
        column.lines = list(rows)
    return columns


def _matrix(columns: dict[str, _Column], path: Path) -> Tensor:
    values = np.array([_numbers(column, name, path) for name, column in columns.items()], dtype=np.float32)
    return torch.from_numpy(values.T.copy())


def _numbers(words: _Column, name: str, path: Path, kind: type[int] | type[float] = float) -> list[Any]:
    values: list[Any] = []
    try:
        for word in words:
            values.append(kind(word))
    except ValueError:
        line, what = words.lines[len(values)], "a whole number" if kind is int else "a number"
        raise DataError(f"`{name}` in line {line} of {path} must be {what}, got {word!r}") from None
    return values


def count_nodes(largest: int, edges: int) -> int:
    """Return the number of nodes for a largest node number; `DataError` if there are too few edges."""
    if largest > _SPARSEST * edges + (1 << 20):
        raise DataError(
            f"an edge names node {largest}, though there are only {edges} edges; number the nodes"
            " from 0 on, or give features, which tell how many there are"
        )
    return max(1, largest + 1)
