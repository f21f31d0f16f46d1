"""Every dataset the library knows: what it is, where it comes from, which files it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files as resource_files
from typing import Any

from fgai.checks import one_of
from fgai.datasets.planted import planted
from fgai.datasets.readers import (
    OGB_MEMBERS,
    Reader,
    _read_ground_truth,
    _read_npz,
    _read_ogbn_arxiv,
    _read_planetoid,
    _read_tape,
    _read_tu,
)
from fgai.datasets.splits import link_split
from fgai.errors import DataError, InputError
from fgai.graph import Graph
from fgai.tasks import TASKS
from fgai.typed import typed

_DIGESTS = (resource_files("fgai.datasets") / "SHA256SUMS").read_text(encoding="utf-8")
_SHA256 = {file: digest for digest, file in map(str.split, _DIGESTS.splitlines())}
"""Digests by the path of a file inside the data folder; `sha256sum -c` reads the same list."""
_FINGERPRINTS = {
    "amazon-photo": "91fd6815e79a221efe6cacf493d2d0fe",
    "amazon-cs": "ef196a4f4870cad45353cd641f691bd2",
    "coauthor-cs": "2c3c68872fe1a57682673efb65496729",
    "coauthor-physics": "709f37e727164a1a394170bf9a09556f",
    "mutag": "9b72bc74166dcc171eac338fe1b2e9b1",
    "proteins": "b22730fdf7f461c46d9fd7bb3e26d895",
}
"""Fingerprints of the graphs by the name of the dataset, see `fgai.datasets.fingerprint`."""

PLANTED = "planted"

_HU = "Hu et al., Open Graph Benchmark, NeurIPS 2020 (arXiv:2005.00687)"
_NO_LICENCE = "none stated by the publishers; published for research"


@typed
@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """What `fgai.datasets.info` tells about a dataset.

    Attributes:
        name: what `fgai.load_dataset` takes.
        description: nodes, edges, features and classes in words, and how they were prepared.
        source: where it can be had.
        citation: whom to cite.
        licence: as stated by the publishers.
        num_nodes: N.
        num_edges: directed edges after every edge got its reverse and duplicates and loops were dropped.
        num_features: F.
        num_classes: classes of the nodes, or of the graphs where those carry the labels.
        num_graphs: 1, or the number of graphs in a graph classification set.
        task: what it is made for, e.g. `node` or `graph`; see `fgai.tasks`.
        splits: the words `split` may be; the first is the default.
        files: what must be in the data folder; each inner tuple alone is enough.
    """

    name: str
    description: str
    source: str
    citation: str
    licence: str
    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    num_graphs: int = 1
    task: str = "node"
    splits: tuple[str, ...] = ("random",)
    files: tuple[tuple[str, ...], ...] = ()


@typed
@dataclass(frozen=True, kw_only=True)
class Source:
    """How a dataset is made or read, where it is downloaded from, and how it is recognised.

    Attributes:
        make: returns the graph of a dataset without files; split `public` keeps its masks.
        reader: turns the files into a `Raw` record.
        url: https address to download from, or None. `{file}` stands for the name of each file; an address
            without it is that of the only file, or of a zip archive that holds all of them.
        sha256: of the files of the first layout, in order; empty where it is not known.
        fingerprint: of the graph; where it is known, files of this content but other `sha256` are accepted.
    """

    make: Callable[[], Graph] | None = None
    reader: Reader | None = None
    url: str | None = None
    sha256: tuple[str, ...] = ()
    fingerprint: str = ""


_INFO: dict[str, DatasetInfo] = {}
_SOURCES: dict[str, Source] = {}


TASK_SPLITS: dict[str, tuple[str, Callable[[Graph, int], Graph]]] = {"link": ("node", link_split)}
"""Tasks that datasets made for another serve as well: that other, and `split(graph, seed)`."""


@typed
def register_dataset(info: DatasetInfo, source: Source) -> None:
    """Add a dataset: `fgai.load_dataset`, `fgai data` and `--data` then know its name.

    Args:
        info: what it is; its sizes are checked when it is loaded.
        source: `Source(make=...)` for a graph made in Python, `Source(reader=...)` for one read from files.

    Raises:
        InputError: the name is taken, the task unknown, not one of `make` and `reader`, or no https.

    Example:
        >>> mine = DatasetInfo(
        ...     name="planted-again", description="The same", source="me", citation="none", licence="MIT",
        ...     num_nodes=2000, num_edges=15914, num_features=308, num_classes=5,
        ... )
        >>> register_dataset(mine, Source(make=planted))
        >>> "planted-again" in names()
        True
        >>> unregister_dataset("planted-again")
    """
    if info.name in _INFO:
        raise InputError(f"there is a dataset {info.name!r} already; choose another name")
    one_of(info.task, "task", tuple(TASKS))
    if (source.make is None) == (source.reader is None):
        raise InputError(f"the source of {info.name!r} needs `make` or `reader`, one of the two")
    if source.url is not None and not source.url.startswith("https://"):
        raise InputError(f"`url` of {info.name!r} must begin with https://, got {source.url!r}")
    if source.sha256 and len(source.sha256) != len(info.files[0]):
        raise InputError(
            f"`sha256` of {info.name!r} must have one entry for each of {len(info.files[0])} files"
        )
    _INFO[info.name], _SOURCES[info.name] = info, source


@typed
def unregister_dataset(name: str) -> None:
    """Remove a dataset; `DataError` if there is none of that name."""
    del _INFO[info(name).name], _SOURCES[name]


@typed
def register_task_split(task: str, split: Callable[[Graph, int], Graph], *, of: str) -> None:
    """Let datasets made for the task `of` serve another, as node datasets serve link prediction.

    Args:
        task: the name of the task they serve, too.
        split: from a graph and a seed to a graph of that task.
        of: the name of the task the datasets are made for.

    Raises:
        InputError: a task is unknown, or `task` has such a split already.
    """
    one_of(task, "task", tuple(TASKS))
    one_of(of, "of", tuple(TASKS))
    if task in TASK_SPLITS:
        raise InputError(f"datasets are split for the task {task!r} already")
    TASK_SPLITS[task] = of, split


@typed
def unregister_task_split(task: str) -> None:
    """Remove a split for a task; `InputError` if there is none."""
    del TASK_SPLITS[one_of(task, "task", tuple(TASK_SPLITS))]


def _add(
    name: str, sizes: tuple[int, int, int, int], reader: Reader, url: str | None = None, **words: Any
) -> None:
    """Register a dataset that is read from files: its sizes are nodes, edges, features and classes."""
    nodes, edges, features, classes = sizes
    words |= {"num_nodes": nodes, "num_edges": edges, "num_features": features, "num_classes": classes}
    info = DatasetInfo(name=name, **words)
    digests = tuple(_SHA256[file] for file in info.files[0] if file in _SHA256)
    fingerprint = _FINGERPRINTS.get(name, "")
    register_dataset(info, Source(reader=reader, url=url, sha256=digests, fingerprint=fingerprint))


def _shchur(name: str, folder: str, file: str, sizes: tuple[int, int, int, int]) -> None:
    family = name.partition("-")[0]
    words = {
        "amazon": "products, joined when often bought together; words of reviews (0/1); product category.",
        "coauthor": "authors, joined when they wrote a paper together; keywords of their papers (0/1, counts"
        " above 1 set to 1 as PyG does); most active field.",
    }
    _add(
        name,
        sizes,
        _read_npz,
        "https://github.com/shchur/gnn-benchmark/raw/master/data/npz/{file}",
        description=f"{family.title()} {folder}: {words[family]}",
        source="https://github.com/shchur/gnn-benchmark",
        citation="Shchur et al., Pitfalls of Graph Neural Network Evaluation, 2018 (arXiv:1811.05868)",
        licence="MIT (the repository it is published in)",
        files=((f"{family}/{folder}/raw/{file}",),),
    )


def _planetoid(
    folder: str, sizes: tuple[int, int, int, int], words: str = "words (0/1)", remark: str = ""
) -> None:
    parts = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
    _add(
        folder.lower(),
        sizes,
        _read_planetoid,
        "https://github.com/kimiyoung/planetoid/raw/master/data/{file}",
        description=f"{folder}: papers, joined by citations; {words}; topic."
        f"{remark} Split `random` is 10/10/80 % by seed, `public` the published one.",
        source="https://github.com/kimiyoung/planetoid",
        citation="Yang et al., Revisiting Semi-Supervised Learning with Graph Embeddings, ICML 2016"
        " (arXiv:1603.08861)",
        licence=_NO_LICENCE,
        splits=("random", "public"),
        files=(tuple(f"planetoid/{folder}/raw/ind.{folder.lower()}.{part}" for part in parts),),
    )


def _tu(folder: str, sizes: tuple[int, int, int, int], graphs: int, words: str, *more: str) -> None:
    parts = ("A", "graph_indicator", "graph_labels", "node_labels", *more)
    _add(
        folder.lower(),
        sizes,
        _read_tu,
        f"https://www.chrsmrrs.com/graphkerneldatasets/{folder}.zip",
        description=f"{folder}: {words} One block-diagonal graph with `batch` and `graph_y`; masks are"
        " constant inside each graph (80/10/10 % of the graphs, every class alike); the seed is one of ten"
        " folds.",
        source="https://chrsmrrs.github.io/datasets/",
        citation="Morris et al., TUDataset, 2020 (arXiv:2007.08663)",
        licence=_NO_LICENCE,
        num_graphs=graphs,
        task="graph",
        splits=("folds", "random"),
        files=(tuple(f"tu/{folder}/raw/{folder}_{part}.txt" for part in parts),),
    )


def _ground_truth(name: str, sizes: tuple[int, int, int, int], words: str) -> None:
    _add(
        name,
        sizes,
        _read_ground_truth,
        description=f"{words} `edge_truth` marks the edges inside the houses: the true explanation.",
        source="an archive with edge_index, x, y, train_mask, val_mask, test_mask and gt_edges; PyG's"
        " `ExplainerDataset` generates graphs of the same kind",
        citation="Ying et al., GNNExplainer, NeurIPS 2019 (arXiv:1903.03894)",
        licence=_NO_LICENCE,
        splits=("public", "random"),
        files=((f"ground_truth/{name.replace('-', '_')}.npz",),),
    )


register_dataset(
    DatasetInfo(
        name=PLANTED,
        description="Built in: a citation-like graph whose informative edges (`edge_truth`) are known. The"
        " graph is always the same; the seed draws the split.",
        source="fgai.datasets.planted",
        citation="this library",
        licence="MIT",
        num_nodes=2000,
        num_edges=15914,
        num_features=308,
        num_classes=5,
    ),
    Source(make=planted),
)
_shchur("amazon-photo", "Photo", "amazon_electronics_photo.npz", (7650, 238162, 745, 8))
_shchur("amazon-cs", "Computers", "amazon_electronics_computers.npz", (13752, 491722, 767, 10))
_shchur("coauthor-cs", "CS", "ms_academic_cs.npz", (18333, 163788, 6805, 15))
_shchur("coauthor-physics", "Physics", "ms_academic_phy.npz", (34493, 495924, 8415, 5))
_planetoid("Cora", (2708, 10556, 1433, 7))
_planetoid("CiteSeer", (3327, 9104, 3703, 6), remark=" 15 papers have neither words nor label.")
_planetoid("PubMed", (19717, 88648, 500, 3), "TF-IDF of words")
_add(
    "ogbn-arxiv",
    (169343, 2315598, 128, 40),
    _read_ogbn_arxiv,
    "https://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip",
    description="arXiv papers in computer science, joined by citations (made undirected); 128 numbers"
    " averaged from word vectors; subject area; official split by year.",
    source="https://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip",
    citation=_HU,
    licence="ODC-BY",
    splits=("public", "random"),
    files=(("ogbn_arxiv/arxiv.zip",), tuple(f"ogbn_arxiv/{member}" for member in OGB_MEMBERS)),
)
_add(
    "arxiv-tape",
    (169343, 2315598, 40, 40),
    _read_tape,
    description="The graph, labels and split of ogbn-arxiv; features are five ranked guesses of the class"
    " made by a language model from each paper's text, weighted 1/(1 + rank). They alone classify 74 % of"
    " the test papers, so F1 here must not be compared with ogbn-arxiv's.",
    source="an archive with edge_index, y, train_idx, valid_idx, test_idx and gpt_preds",
    citation=f"He et al., Harnessing Explanations (TAPE), ICLR 2024 (arXiv:2305.19523); {_HU}",
    licence="ODC-BY (graph), MIT (guesses)",
    splits=("public", "random"),
    files=(("ogbn_arxiv/ogbn_arxiv_nofeat.npz",),),
)
_tu("MUTAG", (3371, 7442, 7, 2), 188, "molecules; one-hot atoms; mutagenic or not.")
_tu(
    "PROTEINS",
    (43471, 162088, 4, 2),
    1113,
    "proteins; standardised length, one-hot kind; enzyme or not.",
    "node_attributes",
)
_ground_truth("ba-shapes", (700, 4110, 10, 4), "A random graph with 80 houses attached; constant features.")
_ground_truth("ba-community", (1400, 8920, 10, 8), "Two such graphs joined; features tell them apart.")


@typed
def names() -> tuple[str, ...]:
    """Return the names `fgai.load_dataset` takes."""
    return tuple(_INFO)


@typed
def info(name: str) -> DatasetInfo:
    """Return what is known about a dataset; `DataError` suggests the nearest name if there is none.

    Example:
        >>> info("cora").num_nodes
        2708
    """
    if name in _INFO:
        return _INFO[name]
    word = str(name).lower().replace("_", "-").replace(" ", "-")
    near = [word] if word in _INFO else get_close_matches(word, _INFO, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise DataError(f"there is no dataset {name!r}; {hint}known are {', '.join(_INFO)}")


def source(name: str) -> Source:
    """Return how the dataset is read; `info` has checked the name."""
    return _SOURCES[name]
