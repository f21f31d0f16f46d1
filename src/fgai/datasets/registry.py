"""Every dataset the library knows: what it is, where it comes from, which files it needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple

from fgai.checks import one_of
from fgai.datasets.links import link_split
from fgai.datasets.ogb import ARCHIVE, MEMBERS, read_ogbn_arxiv
from fgai.datasets.pins import FINGERPRINTS, SHA256
from fgai.datasets.planted import planted
from fgai.datasets.readers import (
    Reader,
    read_ground_truth,
    read_npz,
    read_planetoid,
    read_tape,
    read_tu,
)
from fgai.errors import DataError, InputError
from fgai.graph import Graph
from fgai.tasks import TASKS
from fgai.typed import typed

PLANTED = "planted"

_SHCHUR = "Shchur et al., Pitfalls of Graph Neural Network Evaluation, 2018 (arXiv:1811.05868)"
_YANG = "Yang et al., Revisiting Semi-Supervised Learning with Graph Embeddings, ICML 2016 (arXiv:1603.08861)"
_HU = "Hu et al., Open Graph Benchmark, NeurIPS 2020 (arXiv:2005.00687)"
_MORRIS = "Morris et al., TUDataset, 2020 (arXiv:2007.08663)"
_YING = "Ying et al., GNNExplainer, NeurIPS 2019 (arXiv:1903.03894)"
_HE = "He et al., Harnessing Explanations (TAPE), ICLR 2024 (arXiv:2305.19523)"
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
        make: returns the graph of a dataset without files. Split `public` keeps the masks it brings along,
            others draw new ones.
        reader: turns the files into a `Raw` record.
        url: https address to download from, or None. `{file}` stands for the name of each file; an address
            without it is that of the only file, or of a zip archive that holds all of them.
        sha256: of the files of the first layout, in order; empty where it is not known.
        fingerprint: of the graph in them. Where it is known, files with another `sha256` but this content are
            accepted.
    """

    make: Callable[[], Graph] | None = None
    reader: Reader | None = None
    url: str | None = None
    sha256: tuple[str, ...] = ()
    fingerprint: str = ""


_INFO: dict[str, DatasetInfo] = {}
_SOURCES: dict[str, Source] = {}


class TaskSplit(NamedTuple):
    """How datasets of one task serve another: `split(graph, seed)` hides what is to be predicted."""

    of: str
    split: Callable[[Graph, int], Graph]


TASK_SPLITS: dict[str, TaskSplit] = {"link": TaskSplit("node", link_split)}
"""Tasks that datasets made for others serve as well."""


@typed
def register_dataset(info: DatasetInfo, source: Source) -> None:
    """Add a dataset: `fgai.load_dataset`, `fgai data` and `--dataset` then know its name.

    Args:
        info: what it is; its sizes are checked when it is loaded.
        source: `Source(make=...)` for a graph made in Python, `Source(reader=...)` for one read from
            `info.files`.

    Raises:
        InputError: the name is taken, the task is unknown, the graph can neither be made nor read, or it
            would be fetched without https.

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
    """Take a dataset out again.

    Raises:
        DataError: there is none of that name.
    """
    del _INFO[info(name).name], _SOURCES[name]


@typed
def register_task_split(task: str, split: Callable[[Graph, int], Graph], *, of: str) -> None:
    """Let datasets made for one task serve another, as node datasets serve link prediction.

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
    TASK_SPLITS[task] = TaskSplit(of, split)


@typed
def unregister_task_split(task: str) -> None:
    """Take a split for a task out again.

    Raises:
        InputError: there is none.
    """
    del TASK_SPLITS[one_of(task, "task", tuple(TASK_SPLITS))]


def _register_pinned(info: DatasetInfo, reader: Reader, url: str) -> None:
    sums = tuple(SHA256[file.rpartition("/")[2]] for file in info.files[0])
    prints = FINGERPRINTS.get(info.name, "")
    register_dataset(info, Source(reader=reader, url=url, sha256=sums, fingerprint=prints))


def _amazon(name: str, folder: str, file: str, n: int, e: int, f: int, c: int) -> None:
    info = DatasetInfo(
        name=name,
        description=f"Amazon {folder}: products, joined when often bought together; words of reviews (0/1);"
        " product category.",
        source="https://github.com/shchur/gnn-benchmark",
        citation=_SHCHUR,
        licence="MIT (the repository it is published in)",
        num_nodes=n,
        num_edges=e,
        num_features=f,
        num_classes=c,
        files=((f"amazon/{folder}/raw/{file}",),),
    )
    _register_pinned(info, read_npz, "https://github.com/shchur/gnn-benchmark/raw/master/data/npz/{file}")


def _coauthor(name: str, folder: str, file: str, n: int, e: int, f: int, c: int) -> None:
    info = DatasetInfo(
        name=name,
        description=f"Coauthor {folder}: authors, joined when they wrote a paper together; keywords of their"
        " papers (0/1, counts above 1 set to 1 as PyG does); most active field.",
        source="https://github.com/shchur/gnn-benchmark",
        citation=_SHCHUR,
        licence="MIT (the repository it is published in)",
        num_nodes=n,
        num_edges=e,
        num_features=f,
        num_classes=c,
        files=((f"coauthor/{folder}/raw/{file}",),),
    )
    _register_pinned(info, read_npz, "https://github.com/shchur/gnn-benchmark/raw/master/data/npz/{file}")


def _planetoid(folder: str, n: int, e: int, f: int, c: int, remark: str = "") -> None:
    name = folder.lower()
    parts = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
    info = DatasetInfo(
        name=name,
        description=f"{folder}: papers, joined by citations; words, each row divided by its sum; topic."
        f"{remark} Split `random` is 10/10/80 % by seed, `public` the published one.",
        source="https://github.com/kimiyoung/planetoid",
        citation=_YANG,
        licence=_NO_LICENCE,
        num_nodes=n,
        num_edges=e,
        num_features=f,
        num_classes=c,
        splits=("random", "public"),
        files=(tuple(f"planetoid/{folder}/raw/ind.{name}.{part}" for part in parts),),
    )
    _register_pinned(info, read_planetoid, "https://github.com/kimiyoung/planetoid/raw/master/data/{file}")


def _tu(folder: str, n: int, e: int, f: int, graphs: int, attributes: bool, words: str) -> None:
    parts = ["A", "graph_indicator", "graph_labels", "node_labels"] + ["node_attributes"] * attributes
    info = DatasetInfo(
        name=folder.lower(),
        description=f"{folder}: {words} One block-diagonal graph with `batch` and `graph_y`; masks are"
        " constant inside each graph (80/10/10 % of the graphs, every class alike); the seed is one of ten"
        " folds.",
        source="https://chrsmrrs.github.io/datasets/",
        citation=_MORRIS,
        licence=_NO_LICENCE,
        num_nodes=n,
        num_edges=e,
        num_features=f,
        num_classes=2,
        num_graphs=graphs,
        task="graph",
        splits=("folds", "random"),
        files=(tuple(f"tu/{folder}/raw/{folder}_{part}.txt" for part in parts),),
    )
    _register_pinned(info, read_tu, f"https://www.chrsmrrs.com/graphkerneldatasets/{folder}.zip")


def _ground_truth(name: str, n: int, e: int, c: int, words: str) -> None:
    info = DatasetInfo(
        name=name,
        description=f"{words} `edge_truth` marks the edges inside the houses: the true explanation.",
        source="an archive with edge_index, x, y, train_mask, val_mask, test_mask and gt_edges; PyG's"
        " `ExplainerDataset` generates graphs of the same kind",
        citation=_YING,
        licence=_NO_LICENCE,
        num_nodes=n,
        num_edges=e,
        num_features=10,
        num_classes=c,
        splits=("public", "random"),
        files=((f"ground_truth/{name.replace('-', '_')}.npz",),),
    )
    register_dataset(info, Source(reader=read_ground_truth))


def _arxiv() -> None:
    ogbn = DatasetInfo(
        name="ogbn-arxiv",
        description="arXiv papers in computer science, joined by citations (made undirected); 128 numbers"
        " averaged from word vectors; subject area; official split by year.",
        source="https://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip",
        citation=_HU,
        licence="ODC-BY",
        num_features=128,
        splits=("public", "random"),
        files=((f"ogbn_arxiv/{ARCHIVE}",), tuple(f"ogbn_arxiv/{member}" for member in MEMBERS)),
        num_nodes=169343,
        num_edges=2315598,
        num_classes=40,
    )
    register_dataset(ogbn, Source(reader=read_ogbn_arxiv, url=ogbn.source))
    tape = DatasetInfo(
        name="arxiv-tape",
        description="The graph, labels and split of ogbn-arxiv; features are five ranked guesses of the class"
        " made by a language model from each paper's text, weighted 1/(1 + rank). They alone classify 74 % of"
        " the test papers, so F1 here must not be compared with ogbn-arxiv's.",
        source="an archive with edge_index, y, train_idx, valid_idx, test_idx and gpt_preds",
        citation=f"{_HE}; {_HU}",
        licence="ODC-BY (graph), MIT (guesses)",
        num_features=40,
        splits=("public", "random"),
        files=(("ogbn_arxiv/ogbn_arxiv_nofeat.npz",),),
        num_nodes=169343,
        num_edges=2315598,
        num_classes=40,
    )
    register_dataset(tape, Source(reader=read_tape))


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
_amazon("amazon-photo", "Photo", "amazon_electronics_photo.npz", 7650, 238162, 745, 8)
_amazon("amazon-cs", "Computers", "amazon_electronics_computers.npz", 13752, 491722, 767, 10)
_coauthor("coauthor-cs", "CS", "ms_academic_cs.npz", 18333, 163788, 6805, 15)
_coauthor("coauthor-physics", "Physics", "ms_academic_phy.npz", 34493, 495924, 8415, 5)
_planetoid("Cora", 2708, 10556, 1433, 7)
_planetoid("CiteSeer", 3327, 9104, 3703, 6, " 15 papers have neither words nor label.")
_planetoid("PubMed", 19717, 88648, 500, 3)
_arxiv()
_tu("MUTAG", 3371, 7442, 7, 188, False, "molecules; one-hot atoms; mutagenic or not.")
_tu("PROTEINS", 43471, 162088, 4, 1113, True, "proteins; standardised length, one-hot kind; enzyme or not.")
_ground_truth("ba-shapes", 700, 4110, 4, "A random graph with 80 houses attached; constant features.")
_ground_truth("ba-community", 1400, 8920, 8, "Two such graphs joined; features tell them apart.")


@typed
def names() -> tuple[str, ...]:
    """Return the names `fgai.load_dataset` takes."""
    return tuple(_INFO)


@typed
def info(name: str) -> DatasetInfo:
    """Return what is known about a dataset.

    Args:
        name: one of `names()`.

    Raises:
        DataError: if there is no such dataset; the nearest name is suggested.

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
