"""`load_dataset`: from a name to a graph; `with_degrees`: degrees as features."""

from __future__ import annotations

import os
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fgai.checks import whole
from fgai.datasets.own import MASKS, load_graph
from fgai.datasets.readers import RawGraph
from fgai.datasets.registry import _SOURCES, PLANTED, TASK_SPLITS, DatasetInfo, info, names
from fgai.datasets.splits import Split, _masks, fold_split, random_split, stratified_split
from fgai.errors import DataError, InputError
from fgai.files import digest_of, extract, fetch
from fgai.graph import Graph
from fgai.graph.fingerprint import fingerprint
from fgai.sparse import Features, edge_keys, key_ends
from fgai.typed import typed

ENVIRONMENT = "FGAI_DATA"


def user_cache() -> Path:
    """Return the folder for downloads, which may be missing: `$XDG_CACHE_HOME/fgai` or `~/.cache/fgai`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fgai"


def search_path(root: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """Return the folders to look in, in order: `root` or `$FGAI_DATA`, then the user's cache."""
    chosen = root if root is not None else os.environ.get(ENVIRONMENT) or None
    cache = user_cache() / "data"
    if chosen is None:
        return (cache,)
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        origin = "`root`" if root is not None else f"${ENVIRONMENT}"
        raise DataError(f"{origin} is {folder}, which is not a folder; correct it or leave it out")
    return (folder, cache)


def find(about: DatasetInfo, root: str | os.PathLike[str] | None) -> tuple[Path, ...] | None:
    """Return the files of a dataset, all from one folder; None if no folder has all of them."""
    places = product(search_path(root), about.files)
    candidates = (tuple(folder / file for file in layout) for folder, layout in places)
    return next((files for files in candidates if all(file.is_file() for file in files)), None)


def _download(about: DatasetInfo) -> Graph:
    """Return a dataset from downloaded files, which are moved into the cache once they are verified."""
    cache, names = user_cache() / "data", [Path(file).name for file in about.files[0]]
    where = f"{cache}, or into a folder named by `root` or $FGAI_DATA"
    advice = f"put {', '.join(about.files[0])} (source: {about.source}) into {where}"
    url = _SOURCES[about.name].url
    if url is None:
        raise DataError(f"the files of {about.name!r} are missing and not for download; {advice}")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".download-") as scratch:
            folder = Path(scratch)
            if "{file}" in url or names == [url.rpartition("/")[2]]:
                for name in names:
                    fetch(url.replace("{file}", name), folder / name)
            else:
                fetch(url, folder / "archive.zip")
                extract(folder / "archive.zip", names, folder)
            graph = _read_verified(tuple(folder / name for name in names), about)
            for file in about.files[0]:
                (cache / file).parent.mkdir(parents=True, exist_ok=True)
                (folder / Path(file).name).replace(cache / file)
    except Exception as error:  # network, disk and remote servers fail in many ways
        text = f"{about.name!r} could not be downloaded ({type(error).__name__}: {error})"
        raise DataError(f"{text}; {advice}") from error
    return graph


@typed
def load_dataset(
    name: str = PLANTED,
    root: str | os.PathLike[str] | None = None,
    seed: int = 0,
    *,
    split: str | None = None,
    task: str | None = None,
) -> Graph:
    """Return a dataset as a graph: undirected, without duplicates, without self-loops.

    A set of small graphs (`mutag`, `proteins`) is one block-diagonal graph with `batch` and `graph_y`. Files
    are read from `root` or `$FGAI_DATA`, else from the user's cache; missing ones are downloaded into it.

    Args:
        name: one of `fgai.datasets.names()`, or a file or folder of your own, see `load_graph`.
        root: a folder with the files of `fgai.datasets.info(name).files`.
        seed: of a random split.
        split: `random` (10/10/80 % of the labelled nodes), `public` (published with the data) or, for small
            graphs, `folds` (the seed is the number of one of ten folds); by default the first of
            `info(name).splits`, or for files of your own `public` if they have masks.
        task: by default the dataset's own; `link` hides links, see `link_split` and `register_task_split`.

    Example:
        >>> load_dataset("planted", seed=1).num_nodes
        2000
    """
    whole(seed, "seed")
    graph: Graph | None = None
    splits: tuple[str, ...] = ("random",)
    if name not in names() and Path(name).exists():
        graph, own_task = load_graph(name), "node"
        if all(mask is not None for mask in (graph.train_mask, graph.val_mask, graph.test_mask)):
            splits = ("public", "random")
    else:
        about = info(name)
        own_task, splits = about.task, about.splits
    if split not in (None, *splits):
        raise DataError(f"{name!r} has no split {split!r}; use {' or '.join(map(repr, splits))}")
    task_splits = {other: draw for other, (of, draw) in TASK_SPLITS.items() if of == own_task}
    if task not in (None, own_task, *task_splits):
        tasks = " or ".join((own_task, *task_splits))
        raise InputError(f"{name!r} is for {tasks} tasks, got `task={task!r}`")
    if graph is None:
        graph = _read(about, root)
    split = split or splits[0]
    if split != "public" and graph.links is None:
        graph = _draw_split(graph, seed, split)
    elif graph.train_mask is None and graph.links is None:
        raise DataError(f"{name!r} was published without a split; register it with `splits=('random',)`")
    return task_splits[str(task)](graph, seed) if task in task_splits else graph


def _read(about: DatasetInfo, root: str | os.PathLike[str] | None) -> Graph:
    """Return the graph of a registered dataset, with the masks it was published with."""
    origin = _SOURCES[about.name]
    if origin.make is not None:
        graph = origin.make().replace(name=about.name)
        _check_sizes(graph, about)
        return graph
    files = find(about, root)
    return _download(about) if files is None else _read_verified(files, about)


def _read_verified(files: tuple[Path, ...], about: DatasetInfo) -> Graph:
    """Return the graph in some files; raise if neither their digests nor its fingerprint are as known."""
    origin = _SOURCES[about.name]
    assert origin.reader is not None
    digests = origin.sha256 if len(files) == len(origin.sha256) else ()
    foreign = [file for file, sum_ in zip(files, digests, strict=False) if digest_of(file) != sum_]
    if foreign and not origin.fingerprint:
        raise DataError(f"{foreign[0]} is not the published file, by its SHA-256; fetch it again")
    graph = _to_graph(origin.reader(files), about)
    if foreign and fingerprint(graph) != origin.fingerprint:
        raise DataError(f"{foreign[0]} does not hold {about.name!r} as it was published; fetch it again")
    return graph


def _undirected_keys(edges: Tensor) -> Tensor:
    """Return the sorted keys of both directions of every edge [2, E], without duplicates and loops."""
    edges = edges[:, edges[0] != edges[1]]
    keys: Tensor = torch.unique(torch.cat([edge_keys(*edges), edge_keys(*edges.flip(0))]))
    return keys


def _int64(values: Any) -> Tensor:
    return torch.from_numpy(np.asarray(values, np.int64))


def _to_graph(raw: RawGraph, about: DatasetInfo) -> Graph:
    keys = _undirected_keys(_int64(raw.edges))
    fields: dict[str, Any] = {
        name: _int64(values)
        for name in ("y", "batch", "graph_y")
        if (values := getattr(raw, name)) is not None
    }
    if raw.truth is not None:
        fields["edge_truth"] = torch.isin(keys, _undirected_keys(_int64(raw.truth)))
    try:
        graph = Graph.from_edges(
            torch.stack(key_ends(keys)), raw.num_nodes, raw.features, name=about.name, **fields
        )
    except InputError as error:
        raise DataError(f"the files of {about.name!r} are damaged: {error}; fetch them again") from error
    _check_sizes(graph, about)
    if raw.split is None:
        return graph
    parts = (_int64(raw.split[part]) for part in Split._fields)
    return graph.replace(**dict(zip(MASKS, _masks(parts, raw.num_nodes), strict=True)))


def _draw_split(graph: Graph, seed: int, split: str) -> Graph:
    """Return the graph with a random split of its nodes, or of its small graphs."""
    if graph.batch is not None and graph.graph_y is not None:
        of_graphs = fold_split if split == "folds" else stratified_split
        masks = [mask[graph.batch] for mask in of_graphs(graph.graph_y, seed)]
    elif graph.y is not None:
        masks = [*random_split(graph.y, seed)]
    else:
        raise DataError(f"{graph.name!r} has no labels to draw a split of; give it masks and split 'public'")
    return graph.replace(**dict(zip(MASKS, masks, strict=True)))


def _check_sizes(graph: Graph, about: DatasetInfo) -> None:
    for field in ("num_nodes", "num_edges", "num_features", "num_classes", "num_graphs"):
        size, expected = getattr(graph, field), getattr(about, field)
        if size != expected:
            text = f"the files of {about.name!r} are of something else: {field} is {size}"
            raise DataError(f"{text}, expected {expected}; fetch them again")


@typed
def with_degrees(graph: Graph, most: int = 10) -> Graph:
    """Return the graph with the degree of every node appended to its features, one-hot: [N, F + most].

    With constant features attention would be uniform on every graph. Loops do not count; degrees of `most`
    and above share the last column.

    Example:
        >>> path = Graph.from_edges(torch.tensor([[0, 1], [1, 2]]), 3, torch.ones(3, 1), undirected=True)
        >>> with_degrees(path, 2).features.to_dense().tolist()
        [[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    """
    whole(most, "most", 1, 100_000)
    real = graph.adjacency.source != graph.adjacency.destination
    degree = torch.bincount(graph.adjacency.destination[real], minlength=graph.num_nodes)
    columns = torch.nn.functional.one_hot((degree - 1).clamp(0, most - 1), most).float()
    columns[degree == 0] = 0.0
    if graph.features is not None:
        columns = torch.cat([graph.features.to_dense(), columns.to(graph.features.dtype)], dim=1)
    return graph.replace(features=Features.dense(columns))
