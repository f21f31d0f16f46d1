"""`load_graph`: a graph of your own from an `.npz` archive, a PyG `.pt` file or CSV tables.

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
from fgai.files import most_bytes, read_arrays, regular, require_whole
from fgai.graph import Graph
from fgai.graph.fields import arguments_from_data
from fgai.graph.on_disk import is_store, open_on_disk
from fgai.typed import typed

MASKS = ("train_mask", "val_mask", "test_mask")
FIELDS = ("edge_index", "x", "y", *MASKS, "edge_attr", "edge_weight", "num_nodes")
"""Names in an archive, those of PyG's `Data`; all but the first may be missing."""
PARTS = ("train", "val", "test")
_SPARSEST = 64
"""Nodes per edge, beyond a million of them, from which numbers are taken for labels rather than numbers."""
Reader = Callable[[Path], dict[str, Any]]


@typed
def load_graph(path: Path | str, node_table: Path | str | None = None) -> Graph:
    """Read a graph from a file; it is named after the file.

    - `.npz`: arrays by the names of PyG's `Data`, see `FIELDS`; only `edge_index` must be there, any other
      name is refused. Numbers become float32, labels whole numbers.
    - `.pt`: a PyG `Data`, or a dictionary of tensors by the same names, as `torch.save` writes them.
    - `.csv`: one row per edge under a heading: `source` and `destination` (numbers of nodes, from 0),
      `weight` if edges have one, and every other column is an attribute of the edges. With a `node_table`,
      one row per node: `node` (each number once), `y` (class), `split` (train, val, test or nothing), and
      every other column is a feature.
    - a folder, as `fgai data convert` leaves it.

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
    table = None if node_table is None else Path(node_table)
    readers: dict[str, Reader] = {".npz": _archive, ".pt": _saved, ".csv": partial(_tables, nodes=table)}
    if path.suffix not in readers:
        raise DataError(
            f"{path} must be a graph as .npz, .pt or .csv, or a converted folder; see `fgai.load_graph`"
        )
    if table is not None and path.suffix != ".csv":
        raise InputError(f"`node_table` goes with an edge list in CSV, got {path.name}")
    try:
        for file in (path, table):
            if file is not None:
                regular(file)
        return _graph(readers[path.suffix](path), path)
    except FgaiError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"there is no file {error.filename}") from None
    except Exception as error:  # a damaged file can fail in any way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path} is damaged, or not what its name says ({reason})") from error


def _graph(fields: dict[str, Any], path: Path) -> Graph:
    """The graph of PyG's fields, after all checks."""
    if "edge_index" not in fields:
        raise DataError(f"{path} holds no `edge_index` [2, edges]; it has {', '.join(fields) or 'nothing'}")
    edges = fields["edge_index"]
    if "num_nodes" not in fields:
        known = [len(fields[name]) for name in ("x", "y", *MASKS) if name in fields]
        inferred = count_nodes(int(edges.max()), edges.shape[-1]) if edges.numel() and not known else 0
        fields["num_nodes"] = known[0] if known else inferred
    return Graph.from_edges(**arguments_from_data(SimpleNamespace(**fields)), name=path.stem)


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

    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
            if size > most_bytes(path.stat().st_size):
                raise DataError(f"{path} claims to hold {size} bytes, more than its own size explains")
            require_whole(archive)
            if (member := archive.testzip()) is not None:  # PyTorch does not compare checksums
                raise DataError(f"{path} is damaged: {member} does not fit its checksum; write it anew")
    try:
        with torch.serialization.safe_globals([Data, DataEdgeAttr, DataTensorAttr, GlobalStorage]):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"{path} was refused: it is damaged, or holds something else than a PyG `Data` or tensors; write"
            " it anew with `torch.save(data.to_dict(), path)`"
        ) from error
    given = Data.to_dict(found) if type(found) is Data else found
    if not isinstance(given, dict):
        raise DataError(
            f"{path} must hold a PyG `Data` or a dictionary of tensors, got {type(found).__name__}"
        )
    kept = (*FIELDS, "edge_type")
    return {name: given[name] for name in kept if isinstance(given.get(name), Tensor | int)}


def _tables(path: Path, nodes: Path | None) -> dict[str, Any]:
    columns = _columns(path, ("source", "destination"))
    ends = [_numbers(columns.pop(name), name, path, int) for name in ("source", "destination")]
    fields = {"edge_index": torch.tensor(ends, dtype=torch.long)}
    if "weight" in columns:
        fields["edge_weight"] = torch.tensor(_numbers(columns.pop("weight"), "weight", path))
    if columns:
        fields["edge_attr"] = _matrix(columns, path)
    return fields if nodes is None else {**fields, **node_fields(nodes)}


def node_fields(path: Path) -> dict[str, Tensor]:
    """Features `x`, labels and masks of a node table, see `load_graph`; `DataError` if it is damaged."""
    columns = _columns(path, ("node",))
    order = _numbers(columns.pop("node"), "node", path, int)
    if sorted(order) != list(range(len(order))):
        raise DataError(f"`node` of {path} must hold every number from 0 to {len(order) - 1} once")
    rows = torch.tensor(order).argsort()
    fields: dict[str, Tensor] = {}
    if "y" in columns:
        fields["y"] = torch.tensor(_numbers(columns.pop("y"), "y", path, int))[rows]
    if "split" in columns:
        words = columns.pop("split")
        odd = next((word for word in words if word not in (*PARTS, "")), None)
        if odd is not None:
            raise DataError(f"`split` of {path} must be train, val, test or nothing, got {odd!r}")
        for part in PARTS:
            fields[f"{part}_mask"] = torch.tensor([word == part for word in words])[rows]
    if columns:
        fields["x"] = _matrix(columns, path)[rows]
    return fields


def _columns(path: Path, needed: tuple[str, ...]) -> dict[str, list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        lines = csv.reader(file)
        heading = [name.strip() for name in next(lines, [])]
        rows = [row for row in lines if row]
    missing = [name for name in needed if name not in heading]
    if missing or len(set(heading)) != len(heading):
        wanted = f"a column `{missing[0]}`" if missing else "different columns"
        raise DataError(f"{path} must have {wanted} in its first line, got {', '.join(heading) or 'nothing'}")
    odd = next((number for number, row in enumerate(rows, 2) if len(row) != len(heading)), None)
    if odd is not None or not rows:
        raise DataError(f"{path} must have {len(heading)} values in every line; look at line {odd or 2}")
    return {name: [row[place].strip() for row in rows] for place, name in enumerate(heading)}


def _matrix(columns: dict[str, list[str]], path: Path) -> Tensor:
    values = np.array([_numbers(column, name, path) for name, column in columns.items()], dtype=np.float32)
    return torch.from_numpy(values.T.copy())


def _numbers(words: list[str], name: str, path: Path, kind: type[int] | type[float] = float) -> list[Any]:
    values: list[Any] = []
    try:
        for word in words:
            values.append(kind(word))
    except ValueError:
        line, what = len(values) + 2, "a whole number" if kind is int else "a number"
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
