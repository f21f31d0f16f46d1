"""A grid is a small TOML file; a cell is one point of it, known by a key of everything that matters."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

from fgai import tasks
from fgai.checks import at_least, one_of
from fgai.errors import CheckpointError, InputError
from fgai.files import check_items, regular

PROTOCOL = 1
"""Raised whenever a change of the protocol alters numbers; records of another version do not match."""

KINDS = ("evaluate", "attack", "search", "certify", "inject", "collective", "vote", "explainers", "again",
         "cost", "alone")  # fmt: skip
MOST_CELLS = 100_000
_FILE_NAME = re.compile(r"(?![.])[^\x00-\x1f/\\]{0,100}")
TASKS = ("", "link", "graph", "truth", "inductive")
"""Nodes, links, small graphs, nodes with true explanations, and nodes that are not there in training."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training and its evaluation."""

    # `evaluate` (test nodes), `attack` (the same without curves and null rows, for strong searches), `search`
    # (validation nodes only), `certify` (certificates of attention), `inject` (certificates against injected
    # nodes), `collective` (against budgets of them), `vote` (majorities over groups of neighbours),
    # `explainers` (explainers side by side on a sample of nodes), `again` (attention beside that of the same
    # training with the next seed), `cost` (seconds and memory of the training alone) or `alone` (a model of
    # features without edges)
    kind: str = "evaluate"
    model: str = "GAT"  # class name; of `alone` cells `linear` or `MLP`
    dataset: str = "planted"  # name for `fgai.load_dataset`
    method: str = "vanilla"  # see `fgai.training.METHODS`
    seed: int = 0  # of split, weights, training and attack
    threats: tuple[str, ...] = ("standard",)  # evaluated under
    settings: dict[str, Any] = field(default_factory=dict)  # over the preset's
    label: str = ""  # of the row, where it differs from the method (ablations)
    task: str = ""  # what is predicted, one of `TASKS`; records of each have a folder of their own

    def __post_init__(self) -> None:
        try:
            check_items(vars(self), _hints(), "the cell", required=())
        except CheckpointError as error:
            raise InputError(str(error)) from None
        one_of(self.kind, "kind", KINDS)
        one_of(self.task, "task", TASKS)
        at_least(self.seed, "seed", 0)
        for name in ("model", "dataset", "method", "label"):
            if not _FILE_NAME.fullmatch(getattr(self, name)):
                raise InputError(f"`{name}` of a cell is part of a file's name, got {getattr(self, name)!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; the task only where it is not node classification."""
        values = {**asdict(self), "threats": list(self.threats)}
        if not self.task:
            del values["task"]
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cell:
        """Inverse of `to_dict`; raise `InputError` if a field is missing, unknown or wrong."""
        try:
            return cls(**{**values, "threats": tuple(values["threats"])})
        except (TypeError, KeyError) as error:
            raise InputError(f"the cell has fields unknown to this fgai, or lacks some: {error}") from error

    @functools.cached_property
    def key(self) -> str:
        """A short hash of the cell and the protocol's version."""
        text = json.dumps({**self.to_dict(), "protocol": PROTOCOL}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def row(self) -> str:
        """The name of the table row."""
        return self.label or self.method

    @property
    def path(self) -> Path:
        """Where its record lies inside the results folder."""
        name = f"{self.model}-{self.row}-s{self.seed}-{self.key}.json"
        return Path(self.folder) / self.dataset / name.replace("/", "_")

    @property
    def folder(self) -> str:
        """Of its kind and task: `evaluate`, `link`, `search-link`, ..."""
        if not self.task:
            return self.kind
        return self.task if self.kind == "evaluate" else f"{self.kind}-{self.task}"

    @property
    def predicts(self) -> str:
        """The task as presets and loaders know it: `node`, `link` or `graph`."""
        return self.task if self.task in tasks.TASKS else "node"


@functools.cache
def _hints() -> dict[str, Any]:
    return get_type_hints(Cell)


def grid_names() -> list[str]:
    """The grids that come with fgai."""
    listed = files("experiments").joinpath("grids").iterdir()
    return sorted(entry.name.removesuffix(".toml") for entry in listed if entry.name.endswith(".toml"))


def read_grid(source: Path | str) -> list[Cell]:
    """Read a grid: a path, or the name of one that comes with fgai (`node`, `ablation`, ...).

    A grid holds tables `[[cells]]`; every field that is a list (other than `threats`) is a dimension of a
    product.

    Raises:
        InputError: if there is no such file or a field is unknown.
    """
    path = Path(source)
    try:
        if path.suffix == ".toml":
            text = regular(path).read_text(encoding="utf-8")
        else:
            text = files("experiments").joinpath("grids", f"{source}.toml").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(
            f"there is no grid {source!r}; give a TOML file or one of {', '.join(grid_names())}"
        ) from error
    return list(_cells_of(text, str(source)))


@functools.lru_cache(maxsize=64)
def _cells_of(text: str, source: str) -> tuple[Cell, ...]:
    """Return the cells of a grid, each once; tables read the same few grids again and again."""
    try:
        values = tomllib.loads(text)
        check_items(values, {"cells": list[dict[str, Any]]}, "the grid", required=["cells"])
    except (tomllib.TOMLDecodeError, RecursionError, CheckpointError) as error:
        raise InputError(f"{source} is not a grid: {error}") from error
    cells = [cell for table in values["cells"] for cell in _expand(table, source)]
    return tuple({cell.key: cell for cell in cells}.values())


def _expand(table: dict[str, Any], source: str) -> list[Cell]:
    threats = table.pop("threats", ["standard"])
    lists = {name: value for name, value in table.items() if isinstance(value, list)}
    fixed = {name: value for name, value in table.items() if name not in lists}
    if not isinstance(threats, list):
        raise InputError(f"`threats` of {source} must be a list of names, got {threats!r}")
    if (count := math.prod(map(len, lists.values()))) > MOST_CELLS:
        raise InputError(f"a table of {source} has {count} cells; at most {MOST_CELLS} fit into one")
    try:
        return [
            Cell(**fixed, **dict(zip(lists, choice, strict=True)), threats=tuple(threats))
            for choice in itertools.product(*lists.values())
        ]
    except TypeError as error:
        raise InputError(f"a cell of {source} has an unknown field: {error}") from error


def current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a stored record with the names that models and trainings use today.

    `layers` of a training (`"all"`, `"last"`) is an old setting and stays.
    """
    names = {"channels": "hidden_channels", "layers": "num_layers", "width": "hidden_channels"}
    renamed = {"cut": "clip_share", "soften": "shrink", "k2": "k"}
    settings = {renamed.get(name, name): value for name, value in settings.items()}
    out = {}
    for name, value in settings.items():
        known = names.get(name, name) if isinstance(value, int) else name
        out[known] = None if name in ("norm", "head") and value == "none" else value
    return out
