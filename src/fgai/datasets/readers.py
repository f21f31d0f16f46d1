"""One reader per raw format; each checks the contents and returns a `RawGraph`."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from fgai.datasets.unpickle import load_pickle
from fgai.errors import DataError
from fgai.files import check_sizes, inflate, read_arrays, regular
from fgai.graph.fields import PARTS

Array = NDArray[Any]
Files = Sequence[Path]
RANKS = 5  # guesses per paper in the TAPE file
MOST_LABELS = 256  # node labels in a graph classification set: each is a column of dense features


@dataclass(frozen=True, kw_only=True, eq=False)
class RawGraph:
    """Content of a dataset's files, before it becomes a `Graph`."""

    edges: Array  # [2, E] as stored: perhaps in one direction, with duplicates and loops
    num_nodes: int
    features: Array | sp.csr_matrix  # [N, F]
    y: Array | None = None  # [N] labels, -1 where unknown
    split: Mapping[str, Array] | None = None  # node numbers of a published split by part
    truth: Array | None = None  # [2, T] edges of the true explanation
    batch: Array | None = None  # [N] graph of each node
    graph_y: Array | None = None  # [G] label of each graph


Reader = Callable[[Files], RawGraph]
READERS: dict[str, Reader] = {}
"""Readers by their names in `catalog.json`: `tu` is `_read_tu`."""


@contextmanager
def _data_errors(path: Path) -> Iterator[None]:
    """Turn all errors that a damaged file causes into a `DataError` that names the file."""
    try:
        yield
    except DataError:
        raise
    except KeyError as error:
        raise DataError(f"{path} is not the expected file: it has no {error}; fetch it again") from error
    except Exception as error:  # a damaged archive can fail in any way
        raise DataError(f"{path} is truncated or not the expected file ({error}); fetch it again") from error


def _reader(function: Reader) -> Reader:
    """Add a reader to `READERS`; it checks its result and raises `DataError` alone if files are damaged."""

    @wraps(function)
    def read(files: Files) -> RawGraph:
        with _data_errors(files[0]):
            raw = function(files)
            _check(raw, files[0])
            return raw

    READERS[function.__name__.removeprefix("_read_")] = read
    return read


def _check(raw: RawGraph, path: Path) -> None:
    n = raw.num_nodes
    for name, edges in (("edges", raw.edges), ("true edges", raw.truth)):
        if edges is not None and (edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu"):
            raise DataError(f"{path}: {name} have shape {edges.shape} and type {edges.dtype}; fetch it again")
        if edges is not None and edges.size and not 0 <= int(edges.min()) <= int(edges.max()) < n:
            raise DataError(f"{path}: {name} name nodes outside 0..{n - 1}; fetch it again")
    rows = {"features": raw.features.shape[0]}
    rows |= {k: v.shape[0] for k, v in (("labels", raw.y), ("batch", raw.batch)) if v is not None}
    wrong = {name: count for name, count in rows.items() if count != n}
    if wrong:
        raise DataError(f"{path}: {n} nodes, but {wrong}; fetch it again")
    for name, index in (raw.split or {}).items():
        if index.ndim != 1 or (index.size and not 0 <= int(index.min()) <= int(index.max()) < n):
            raise DataError(f"{path}: the {name} split names nodes outside 0..{n - 1}; fetch it again")


INDEX, NUMBER, BOOL = "iu", "iuf", "b"  # kinds of numpy dtypes: integers, any numbers, booleans


def _arrays(path: Path, layout: Mapping[str, tuple[str, int]]) -> dict[str, Array]:
    """Return arrays of an archive by name; check their kinds and numbers of dimensions, those in `layout`."""
    arrays = read_arrays(path, layout)
    for name, (kinds, dimensions) in layout.items():
        array = arrays[name]
        if array.dtype.kind not in kinds or array.ndim != dimensions:
            form = f"type {array.dtype} and {array.ndim} dimensions"
            raise DataError(f"{path}: `{name}` has {form}; fetch it again")
    return arrays


def _csr_layout(prefix: str) -> dict[str, tuple[str, int]]:
    parts = {"data": NUMBER, "indices": INDEX, "indptr": INDEX, "shape": INDEX}
    return {f"{prefix}_{name}": (kinds, 1) for name, kinds in parts.items()}


def _csr(archive: Mapping[str, Array], prefix: str) -> sp.csr_matrix:
    parts = tuple(archive[f"{prefix}_{name}"] for name in ("data", "indices", "indptr"))
    rows, columns = (int(size) for size in archive[f"{prefix}_shape"])
    matrix = sp.csr_matrix(parts, shape=(rows, columns))
    matrix.check_format(full_check=True)
    return matrix


@_reader
def _read_npz(files: Files) -> RawGraph:
    """Read the Amazon and Coauthor archives; as in PyG, word counts above 1 become 1."""
    archive = _arrays(files[0], {**_csr_layout("adj"), **_csr_layout("attr"), "labels": (INDEX, 1)})
    adjacency, words, labels = _csr(archive, "adj").tocoo(), _csr(archive, "attr"), archive["labels"]
    words.sum_duplicates()
    words.data = (words.data > 0).astype(np.float32)
    words.eliminate_zeros()
    edges = np.stack([adjacency.row, adjacency.col])
    return RawGraph(edges=edges, num_nodes=adjacency.shape[0], features=words, y=labels)


@_reader
def _read_planetoid(files: Files) -> RawGraph:
    """Read Cora, CiteSeer or PubMed: seven pickles and a text file, through the restricted unpickler.

    Features are taken as published (0/1 words, PubMed TF-IDF): an attack's box then means the same as on the
    other graphs. Test nodes whose features were never published (15 in CiteSeer) stay as isolated nodes with
    zero features and no label (-1).
    """
    parts = {path.name.split(".", 2)[2]: path for path in files}
    tx, allx = (_unpickled(parts[name], sp.csr_matrix) for name in ("tx", "allx"))
    y, ty, ally = (_unpickled(parts[name], np.ndarray) for name in ("y", "ty", "ally"))
    neighbours = _unpickled(parts["graph"], dict)
    test = _table(parts["test.index"], np.int64)[:, 0]
    count, first = allx.shape[0], int(test.min())
    n = int(test.max()) + 1
    fits = first == count and test.size == tx.shape[0] == np.unique(test).size
    if not fits or n - count > 2 * test.size:  # a few test nodes are left out, never most of them
        raise DataError(f"{parts['test.index']} does not fit {parts['allx'].name} and {parts['tx'].name}")
    shape = (n - count, test.size)
    permutation = sp.csr_matrix((np.ones(test.size), (test - count, np.arange(test.size))), shape=shape)
    words = sp.csr_matrix(sp.vstack([allx, permutation @ tx]), dtype=np.float32)
    labels = np.full(n, -1, dtype=np.int64)
    labels[:count], labels[test] = ally.argmax(axis=1), ty.argmax(axis=1)
    split = {"train": np.arange(len(y)), "val": np.arange(len(y), len(y) + 500), "test": test}
    edges = _pairs(neighbours, parts["graph"])
    return RawGraph(edges=edges, num_nodes=n, features=words, y=labels, split=split)


def _unpickled(path: Path, kind: type) -> Any:
    value = load_pickle(path)
    if not isinstance(value, kind):
        raise DataError(f"{path} holds a {type(value).__name__}, expected a {kind.__name__}; fetch it again")
    return value


def _pairs(neighbours: Mapping[Any, Any], path: Path) -> Array:
    values = list(neighbours.values())
    if not all(type(v) is list for v in values) or not all(type(i) is int for v in values for i in v):
        raise DataError(f"{path} is not a dictionary of neighbour lists; fetch it again")
    if sum(map(len, values)) > path.stat().st_size:  # a pickle can hold one list many times over
        raise DataError(f"{path} holds more neighbours than its size explains; fetch it again")
    source = np.repeat(np.array(list(neighbours), dtype=np.int64), [len(v) for v in values])
    return np.stack([source, np.array([i for v in values for i in v], dtype=np.int64)])


@_reader
def _read_tu(files: Files) -> RawGraph:
    """Read a graph classification set of TU Dortmund as one block-diagonal graph.

    Features: node attributes where there are any, each column standardised over all nodes (their range
    is hundreds of times that of the rest), then one-hot node labels. Edge labels are not used.
    """
    parts = {path.stem.split("_", 1)[1]: path for path in files}
    edges = _table(parts["A"], np.int64).T - 1
    names = ("graph_indicator", "graph_labels", "node_labels")
    batch, graphs, nodes = (_table(parts[name], np.int64)[:, 0] for name in names)
    batch = batch - 1
    if int(nodes.max()) - int(nodes.min()) >= MOST_LABELS:
        raise DataError(f"{parts['node_labels']} names more than {MOST_LABELS} labels; fetch it again")
    columns = [np.eye(int(nodes.max() - nodes.min()) + 1, dtype=np.float32)[nodes - nodes.min()]]
    if "node_attributes" in parts:
        extra = _table(parts["node_attributes"], np.float64)
        spread = extra.std(axis=0)
        columns.insert(0, ((extra - extra.mean(axis=0)) / np.where(spread > 0, spread, 1)).astype(np.float32))
    if not np.array_equal(np.unique(batch), np.arange(graphs.size)) or bool((np.diff(batch) < 0).any()):
        raise DataError(f"{parts['graph_indicator']} does not number {graphs.size} graphs in order")
    if edges.size and bool((batch[edges[0]] != batch[edges[1]]).any()):
        raise DataError(f"{parts['A']} joins nodes of different graphs; fetch it again")
    labels = np.unique(graphs, return_inverse=True)[1].reshape(-1).astype(np.int64)
    features = np.hstack(columns)
    return RawGraph(edges=edges, num_nodes=batch.size, features=features, batch=batch, graph_y=labels)


def _table(path: Path, kind: type) -> Array:
    """Read rows of numbers, separated by commas; at least one row."""
    with _data_errors(path):
        if not regular(path).read_text().strip():
            raise DataError(f"{path} is empty; fetch it again")
        return np.loadtxt(path, dtype=kind, delimiter=",", ndmin=2)


@_reader
def _read_ground_truth(files: Files) -> RawGraph:
    """Read an archive of edges, features, labels, masks and the true explanation (`gt_edges`)."""
    layout = {"edge_index": (INDEX, 2), "x": (NUMBER, 2), "y": (INDEX, 1), "gt_edges": (INDEX, 2)}
    archive = _arrays(files[0], layout | {f"{name}_mask": (BOOL, 1) for name in PARTS})
    masks = {name: archive[f"{name}_mask"] for name in PARTS}
    n = archive["x"].shape[0]
    for name, mask in masks.items():
        if mask.shape != (n,):
            raise DataError(f"{files[0]}: `{name}_mask` is not a boolean for each of the {n} nodes")
    return RawGraph(
        edges=archive["edge_index"],
        num_nodes=n,
        features=archive["x"].astype(np.float32),
        y=archive["y"],
        split={name: np.flatnonzero(mask) for name, mask in masks.items()},
        truth=archive["gt_edges"],
    )


@_reader
def _read_tape(files: Files) -> RawGraph:
    """Read the arXiv citation graph with class guesses made from each paper's text as features.

    A guess of rank r = 0..4 sets the feature of its class to 1 / (1 + r); the best rank counts.
    """
    keys = {"train": "train_idx", "val": "valid_idx", "test": "test_idx"}
    layout = {"edge_index": (INDEX, 2), "y": (INDEX, 1), "gpt_preds": (INDEX, 2)}
    archive = _arrays(files[0], layout | dict.fromkeys(keys.values(), (INDEX, 1)))
    edges, y, guesses = (archive[name] for name in ("edge_index", "y", "gpt_preds"))
    split = {name: archive[key] for name, key in keys.items()}
    if guesses.shape != (y.shape[0], RANKS):
        raise DataError(f"{files[0]}: `gpt_preds` has shape {guesses.shape}, expected [nodes, {RANKS}]")
    classes = int(y.max()) + 1
    if classes > MOST_LABELS:
        raise DataError(f"{files[0]}: `y` names more than {MOST_LABELS} classes; fetch it again")
    if int(guesses.max()) >= classes or int(guesses.min()) < -1:
        raise DataError(f"{files[0]}: `gpt_preds` names classes outside -1..{classes - 1}")
    weights = np.zeros((y.shape[0], classes), dtype=np.float32)
    for rank in reversed(range(RANKS)):
        rows = np.flatnonzero(guesses[:, rank] >= 0)
        weights[rows, guesses[rows, rank].astype(np.int64)] = 1.0 / (1 + rank)
    return RawGraph(edges=edges, num_nodes=len(y), features=sp.csr_matrix(weights), y=y, split=split)


OGB_MEMBERS = (
    *(f"raw/{name}.csv.gz" for name in ("edge", "node-feat", "node-label", "num-node-list")),
    *(f"split/time/{part}.csv.gz" for part in ("train", "valid", "test")),
)


def _contents(files: Sequence[Path]) -> dict[str, bytes]:
    """Return the compressed bytes of every member, by its path in the dataset's folder."""
    if len(files) > 1:
        return {member: regular(file).read_bytes() for member, file in zip(OGB_MEMBERS, files, strict=True)}
    with zipfile.ZipFile(regular(files[0])) as archive:
        inside = {one.filename.split("/", 1)[1]: one for one in archive.infolist() if "/" in one.filename}
        missing = [member for member in OGB_MEMBERS if member not in inside]
        if missing:
            raise DataError(f"{files[0]} has no {', '.join(missing)}; fetch the original OGB archive again")
        check_sizes(files[0], (inside[member] for member in OGB_MEMBERS))
        return {member: archive.read(inside[member]) for member in OGB_MEMBERS}


@_reader
def _read_ogbn_arxiv(files: Sequence[Path]) -> RawGraph:
    """Read `ogbn-arxiv` from its published archive: edges, 128 features, labels and the split by year."""
    contents = _contents(files)

    def table(member: str, kind: type = np.int64) -> Array:
        return np.loadtxt(io.BytesIO(inflate(contents[member])), dtype=kind, delimiter=",", ndmin=2)

    return RawGraph(
        edges=table("raw/edge.csv.gz").T,
        num_nodes=int(table("raw/num-node-list.csv.gz").sum()),
        features=table("raw/node-feat.csv.gz", np.float32),
        y=table("raw/node-label.csv.gz")[:, 0],
        split={
            name: table(f"split/time/{key}.csv.gz")[:, 0]
            for name, key in (("train", "train"), ("val", "valid"), ("test", "test"))
        },
    )
