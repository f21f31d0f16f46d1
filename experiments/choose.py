"""Settings from the search: the best trial of each task, method, model and dataset on validation data."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from importlib.resources import files
from statistics import fmean
from typing import Any, NamedTuple

from experiments.cells import Cell
from experiments.results import DATASETS, MODELS, ROWS
from experiments.store import Store
from fgai.errors import InputError
from fgai.metrics import METRICS, Quantity
from fgai.models import current_names
from fgai.tasks import TASKS
from fgai.training import METHODS

TABLES = tuple(dict.fromkeys(task.presets for task in TASKS.values()))
"""Searched one by one: nodes, links, graphs; their presets are `[...]`, `[link....]` and `[graph....]`."""

CRITERION = Quantity(
    path="validation.criterion", title="criterion", form=".4f", direction=METRICS["f1"].direction
)
"""What trials are compared by: a mean of scores."""


class Trial(NamedTuple):
    """One trial of a search: its settings and what it scored on validation data, mean over its seeds."""

    settings: dict[str, Any]
    criterion: float
    clean: float
    attacked: float
    key: str
    seeds: int = 1


Case = tuple[str, str, str]
"""Method, model and dataset."""


def trials(store: Store, task: str = "") -> dict[Case, list[Trial]]:
    """Return the trials of each method, model and dataset, the best first.

    The criterion is the mean of clean and `standard`-attacked score on the validation part; of vanilla models
    for links and graphs it is the clean score, for what they are there for is to be compared with. Trials are
    compared by their means over seeds or folds, those run on fewer seeds than others come last. Equal trials
    are ordered by the text of their settings, so the choice never depends on the order of files.

    Args:
        store: with search records.
        task: empty for nodes, `link` or `graph`.
    """
    runs: dict[Case, dict[str, list[Trial]]] = {}
    for record in store.records(Cell(kind="search", task=task).folder):
        cell, scores = record["cell"], record["validation"]
        case = (cell["label"] or cell["method"], cell["model"], cell["dataset"])
        criterion = scores["clean" if task and cell["method"] == "vanilla" else "criterion"]
        trial = Trial(
            current_names(cell["settings"]), criterion, scores["clean"], scores["attacked"], record["key"]
        )
        text = json.dumps(cell["settings"], sort_keys=True)
        runs.setdefault(case, {}).setdefault(text, []).append(trial)
    found = {
        case: [_mean(held[text]) for text in sorted(held, key=lambda text: _order(held[text], text))]
        for case, held in runs.items()
    }
    return dict(sorted(found.items(), key=lambda item: tuple(map(_rank, item[0]))))


def _order(runs: list[Trial], text: str) -> tuple[int, float, str]:
    return (-len(runs), -_mean(runs).criterion, text)


def _mean(runs: list[Trial]) -> Trial:
    """One trial from its runs, one of each seed."""
    return Trial(
        runs[0].settings,
        criterion=fmean(run.criterion for run in runs),
        clean=fmean(run.clean for run in runs),
        attacked=fmean(run.attacked for run in runs),
        key=runs[0].key,
        seeds=len(runs),
    )


def least_regret(store: Store, method: str, models: Collection[str]) -> dict[str, Any]:
    """Return the settings for graphs that were not searched: their worst loss to a pair's best is smallest.

    Args:
        store: with search records of nodes.
        method: e.g. `fgai`.
        models: whose pairs with all graphs count; only trials run on every one of them are compared.

    Raises:
        InputError: the folder holds no such trials.
    """
    losses: dict[str, list[float]] = {}
    for case, held in trials(store).items():
        if case[0] == method and case[1] in models:
            for trial in held:
                text = json.dumps(trial.settings, sort_keys=True)
                losses.setdefault(text, []).append(held[0].criterion - trial.criterion)
    if not losses:
        raise InputError(f"no trials of {method!r} in {store.root}; run `fgai bench run search` first")
    pairs = max(map(len, losses.values()))
    best = min((max(found), text) for text, found in losses.items() if len(found) == pairs)
    settings: dict[str, Any] = json.loads(best[1])
    return settings


def presets(store: Store) -> str:
    """Return the package's presets as TOML, the best trials laid over them.

    General tables and comments stay as they are; `[method.MODEL.dataset]`, and the same under `[link]` and
    `[graph]`, are replaced where a search was run.

    Raises:
        InputError: the folder holds no search.
    """
    made = {
        ".".join(filter(None, (task, *case))): held[0].settings
        for task in TABLES
        for case, held in trials(store, task).items()
        if case[0] in METHODS
    }
    if not made:
        raise InputError(f"there are no search records in {store.root}; run `fgai bench run search` first")
    text = files("fgai.training").joinpath("presets.toml").read_text(encoding="utf-8")
    blocks = [block for block in _blocks(text) if block[0] not in made]
    for name, settings in made.items():
        general = name.rsplit(".", 2)[0]
        same = [at for at, (other, _) in enumerate(blocks) if f"{other}.".startswith(f"{general}.")]
        blocks.insert(same[-1] + 1 if same else len(blocks), (name, _table(name, settings)))
    return "".join(body for _, body in blocks)


def _blocks(text: str) -> list[tuple[str, str]]:
    """The tables of a TOML file by name, each with the comment above it; the head of the file has no name."""
    blocks = [("", "")]
    for part in re.split(r"(?m)^(?=\[)|^(?=#)", text):
        name = part.partition("]")[0].removeprefix("[") if part.startswith("[") else ""
        last, body = blocks[-1]
        comment = last == "" and body.startswith("#")
        blocks = [*blocks[:-1], (name, body + part)] if comment else [*blocks, (name, part)]
    return blocks


def _table(name: str, settings: Mapping[str, Any]) -> str:
    values = "".join(f"{key} = {_toml(value)}\n" for key, value in settings.items())
    return f"[{name}]\n{values}\n"


def _toml(value: Any) -> str:
    if isinstance(value, float | int | str | bool):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    raise InputError(f"presets hold numbers, words and lists, got {value!r}")


def _rank(name: str) -> tuple[int, str]:
    order = (*ROWS, *MODELS, *DATASETS)
    return (order.index(name) if name in order else len(order), name)
