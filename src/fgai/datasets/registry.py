"""Every dataset the library knows: what it is, where it comes from, which files it needs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files as resource_files

from fgai.checks import one_of
from fgai.datasets.planted import planted
from fgai.datasets.readers import READERS, Reader
from fgai.datasets.splits import link_split
from fgai.errors import DataError, InputError
from fgai.graph import Graph
from fgai.tasks import TASKS
from fgai.typed import typed

PLANTED = "planted"


@typed
@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Description of a dataset."""

    name: str  # argument of `fgai.load_dataset`
    description: str  # nodes, edges, features and classes in words, and how they were prepared
    source: str  # where the publishers offer it
    citation: str
    licence: str  # as stated by the publishers
    num_nodes: int
    num_edges: int  # directed edges, after reverses were added and duplicates and loops dropped
    num_features: int
    num_classes: int  # of the nodes, or of the graphs if these have the labels
    num_graphs: int = 1
    task: str = "node"  # its own task, see `fgai.tasks`
    splits: tuple[str, ...] = ("random",)  # values of `split`; the first is the default
    files: tuple[tuple[str, ...], ...] = ()  # in the data folder; each inner tuple alone is enough


@typed
@dataclass(frozen=True, kw_only=True)
class Source:
    """How a dataset is made or read, where it is downloaded from, and how it is verified.

    In the `url` (https) `{file}` stands for the name of each file; an address without it is that of the only
    file, or of a zip archive of all.
    """

    make: Callable[[], Graph] | None = None  # makes the graph in Python; split `public` keeps its masks
    reader: Reader | None = None  # returns the content of the files as a `fgai.datasets.readers.RawGraph`
    url: str | None = None
    sha256: tuple[str, ...] = ()  # of the files of the first layout, in order; empty if unknown
    fingerprint: str = ""  # of the graph; files of this content, but other `sha256`, are accepted


_INFO: dict[str, DatasetInfo] = {}
_SOURCES: dict[str, Source] = {}


TASK_SPLITS: dict[str, tuple[str, Callable[[Graph, int], Graph]]] = {"link": ("node", link_split)}
"""By derived task: the task whose datasets it uses, and `split(graph, seed)`, which prepares them."""


@typed
def register_dataset(info: DatasetInfo, source: Source) -> None:
    """Add a dataset for `fgai.load_dataset`, `fgai data` and `--data`.

    The source has `make`, for a graph made in Python, or `reader`, for files. Sizes are checked when it is
    loaded.
    """
    if info.name in _INFO:
        raise InputError(f"the dataset {info.name!r} exists already; choose another name")
    one_of(info.task, "task", tuple(TASKS))
    if (source.make is None) == (source.reader is None):
        raise InputError(f"the source of {info.name!r} needs `make` or `reader`, one of the two")
    if source.url is not None and not source.url.startswith("https://"):
        raise InputError(f"`url` of {info.name!r} must begin with https://, got {source.url!r}")
    if source.sha256 and len(source.sha256) != len(info.files[0]):
        count = len(info.files[0])
        raise InputError(f"`sha256` of {info.name!r} must have {count} entries, one for each file")
    _INFO[info.name], _SOURCES[info.name] = info, source


@typed
def register_task_split(task: str, split: Callable[[Graph, int], Graph], *, of: str) -> None:
    """Use datasets of the task `of` for another one; `split` maps a graph and a seed to a graph of `task`."""
    one_of(task, "task", tuple(TASKS))
    one_of(of, "of", tuple(TASKS))
    if task in TASK_SPLITS:
        raise InputError(f"the task {task!r} has a split already; choose another task")
    TASK_SPLITS[task] = of, split


def _register_catalog() -> None:
    """Register the datasets of `catalog.json`; one without a reader is made by `planted`."""
    folder = resource_files("fgai.datasets")
    sums = (folder / "SHA256SUMS").read_text(encoding="utf-8")  # `sha256sum -c` reads it, too
    digests = {file: digest for digest, file in map(str.split, sums.splitlines())}
    for name, facts in json.loads((folder / "catalog.json").read_text(encoding="utf-8")).items():
        files, reader = tuple(map(tuple, facts.pop("files", ()))), facts.pop("reader", None)
        origin = Source(
            make=planted if reader is None else None,
            reader=None if reader is None else READERS[reader],
            url=facts.pop("url", None),
            sha256=tuple(digests[file] for file in (files[0] if files else ()) if file in digests),
            fingerprint=facts.pop("fingerprint", ""),
        )
        splits = tuple(facts.pop("splits"))
        register_dataset(DatasetInfo(name=name, files=files, splits=splits, **facts), origin)


_register_catalog()


@typed
def names() -> tuple[str, ...]:
    """Return the names `fgai.load_dataset` takes."""
    return tuple(_INFO)


@typed
def info(name: str) -> DatasetInfo:
    """Return the description of a dataset; if there is none, `DataError` suggests the nearest name.

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
