"""`convert`: from files of a graph to a folder of memory-mapped arrays."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fgai.datasets.loader import load_dataset
from fgai.datasets.own import load_graph, node_fields
from fgai.datasets.registry import names
from fgai.errors import DataError, FgaiWarning, InputError, warn
from fgai.files import regular
from fgai.graph import Graph
from fgai.graph.on_disk import is_store
from fgai.large import write
from fgai.large.arrays import Array, _blocks, _write_array
from fgai.large.edge_lists import _edge_reader, _map_numbers
from fgai.large.sort import _sort_edges
from fgai.large.stored import DTYPES, VERSION, StoredGraph
from fgai.progress import stage
from fgai.typed import typed
from fgai.version import __version__

FILES = (".npz", ".pt")  # graphs that are read into memory before they are stored


@typed
def convert(
    source: Path | str,
    target: Path | str,
    *,
    node_table: Path | str | None = None,
    features: Path | str | None = None,
    labels: Path | str | None = None,
    undirected: bool = False,
    overwrite: bool = False,
    resume: bool = True,
    root: str | os.PathLike[str] | None = None,
) -> StoredGraph:
    r"""Turn a file, a folder of tables or a dataset by name into a new folder of memory-mapped arrays.

    Edge lists are streamed: `.csv` (a heading with `source`, `destination`, perhaps `weight`; other columns
    are attributes), `.txt`, `.tsv`, `.edges` and `.edgelist` (SNAP's two numbers a line), both also as `.gz`,
    `.parquet` (columns as of CSV; needs the extra `parquet`) and `.npy` ([2, E]). Memory use is about 280 MB
    and 16 bytes per node, plus a row group of Parquet and the edges of one node. Duplicate edges are left out
    with a warning. PyG `Data` (`.pt`, `.npz`) and datasets by name are read into memory first.

    The graph is named after the dataset or the folder of tables it comes from, that of a file after `target`.
    The folder appears when it is complete. If a run is killed or interrupted, finished stages stay in
    `.TARGET.partial`, and the next run with the same sources and options resumes there. If the target is the
    complete graph of the same sources, it is verified and returned with a warning.

    The nodes of an edge list have `features` [N, F] and `labels` [N], -1 where unknown, in `.npy` files that
    are streamed; or a `node_table` in CSV, see `fgai.load_graph`. `undirected` also stores the reverse of
    every edge of a list. `root` is that of `fgai.load_dataset`. `overwrite` replaces an older stored graph.

    Example:
        >>> text = "source,destination\n0,1\n2,1\n"
        >>> _ = Path("edges.csv").write_text(text)
        >>> convert("edges.csv", "stored", undirected=True)
        StoredGraph('stored', nodes=3, edges=4, features=0)
    """
    target, path = Path(target), Path(source)
    name = target.name
    dataset = str(source) in names() and not path.suffix
    read_edges = None if dataset else _edge_reader(path)
    folder = not dataset and read_edges is None and path.is_dir()
    options = {"node_table": node_table, "features": features, "labels": labels}
    tables = {role: Path(table) for role, table in options.items() if table is not None}
    if read_edges is None and (tables or undirected):
        only = "`node_table`, `features`, `labels` and `undirected`"
        raise InputError(f"{only} are for edge lists, got {path.name!r}, which has its own")
    if node_table is not None and len(tables) > 1:
        raise InputError("give `node_table`, or `features` and `labels`, not both")
    if not dataset and read_edges is None and not folder and path.suffix not in FILES:
        kinds = ".csv, .txt, .tsv, .edges, .edgelist (also .gz), .parquet, .npy, .npz, .pt"
        raise DataError(f"{path} must be a file of a graph ({kinds}) or the name of a dataset")
    files = tables if dataset or folder else {"edges": path, **tables}
    for file in files.values():
        try:
            regular(file)
        except FileNotFoundError:
            raise DataError(f"there is no file {file}") from None
        except (OSError, ValueError) as error:
            raise DataError(f"{file} cannot be read: {error}") from error
    if read_edges is None:
        with write._new_folder(target, overwrite) as work:
            graph = load_dataset(str(source), root) if dataset else load_graph(path)
            graph = graph if dataset or folder else graph.replace(name=name)
            write._save_graph(work.folder, graph.to("cpu"))
        return StoredGraph(target)
    identities = {role: write._file_identity(file) for role, file in files.items()}
    contents = [[role, file["size"], file["hash"]] for role, file in identities.items()]
    sources = hashlib.sha256(json.dumps([contents, undirected]).encode()).hexdigest()
    if not overwrite and is_store(target) and (stored := StoredGraph(target)).sources == sources:
        stored.verify()
        warn(FgaiWarning(f"{target} exists already, complete and of these sources; nothing was done"))
        return stored
    job = {"fgai": __version__, "store": VERSION, "sources": identities, "undirected": undirected}
    with write._new_folder(target, overwrite, job=job, resume=resume) as work:
        width, count = work.run_stage("nodes", lambda: _write_nodes(work.folder, tables))
        with stage("sorting edges"):
            _sort_edges(work, read_edges(), num_nodes=count, undirected=undirected)
        with stage("fingerprint"):
            work.run_stage("fingerprint", lambda: write._write_manifest(work.folder, name, width, sources))
    return StoredGraph(target)


def _write_nodes(folder: Path, tables: dict[str, Path]) -> tuple[int, int | None]:
    """Write features, labels and masks of an edge list's nodes; return F, and N if it is known."""
    if "node_table" in tables:
        return _write_table(folder, tables["node_table"])
    width, count = 0, None
    if (path := tables.get("features")) is not None:
        x = _map_numbers(path)
        if x.ndim != 2 or x.dtype.kind not in "iufb" or not len(x):
            raise DataError(f"{path} must hold numbers [nodes, features], got {x.dtype} {list(x.shape)}")
        count, width = x.shape
        _write_array(folder / "x.npy", _finite(x, path), DTYPES["x"], (width,))
    if (path := tables.get("labels")) is not None:
        y = _map_numbers(path)
        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
        if y.ndim != 1 or y.dtype.kind not in "iu" or (count is not None and len(y) != count) or not len(y):
            fits = "" if count is None else f" for each of the {count} rows of `features`"
            raise DataError(f"{path} must hold a class number per node{fits}, got {y.dtype} {list(y.shape)}")
        if int(y.min()) < -1 or int(y.max()) < 1:
            raise DataError(f"{path} must name two classes or more, and -1 where none is known")
        count = len(y)
        _write_array(folder / "y.npy", _blocks(y, write.BLOCK), DTYPES["y"])
    return width, count


def _finite(x: Array, path: Path) -> Iterator[Array]:
    step = max(1, write.NUMBERS // max(1, x.shape[1]))
    for number, rows in enumerate(_blocks(x, step)):
        block = np.asarray(rows, DTYPES["x"])
        if not np.isfinite(block).all():
            row = number * step + int(np.argmin(np.isfinite(block).all(1)))
            raise DataError(f"row {row} of {path} holds NaN or infinity; clean it before use")
        yield block


def _write_table(folder: Path, table: Path) -> tuple[int, int]:
    fields: dict[str, Any] = dict(node_fields(table))
    if not fields:
        raise DataError(f"{table} has no column beside the numbers of nodes; leave it out")
    write._save_names(folder, {"class_names": fields.pop("class_names", None)})
    count, x = len(next(iter(fields.values()))), fields.pop("x", None)
    # The checks of a graph, on its nodes alone.
    nodes = Graph.from_edges(torch.zeros(2, 0, dtype=torch.long), count, x, **fields)
    write._save_features(folder, nodes.features)
    write._save_arrays(folder, fields)
    return nodes.num_features, count
