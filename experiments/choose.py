"""Settings from the search: the best trial of each task, method, model and dataset on validation data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import Any, NamedTuple

from experiments import methods
from experiments.cells import Cell, current_names, read_grid
from experiments.fingerprint import change_of
from experiments.results import DATASETS, MODELS, ROWS
from experiments.store import Store
from experiments.trained import settings_of
from fgai.errors import InputError
from fgai.metrics import METRICS
from fgai.records import Column

UNTUNED = ("fgai", "limits", "harden")
"""Methods with one setting for every graph."""
TABLES = ("", "link", "graph")
"""Searched one by one: nodes, links, graphs; their presets are `[...]`, `[link....]` and `[graph....]`."""

CRITERION = Column("criterion", ".4f", METRICS["f1"].direction)
"""What trials are compared by: a mean of scores."""


SEEDS = 2
"""A setting for nodes ships only if it holds on so many."""
MOST_BELOW = 0.03
"""How far a seed may lie below the mean of all in the criterion. A trial whose criterion falls further ships
if its worst seed is above those of all others."""
NOISE = 0.01
"""Differences of the criterion that two seeds cannot tell apart (one standard error of F1 on the validation
nodes of Photo is .009): within them the preset in use stays."""


class Trial(NamedTuple):
    """One trial of a search: its settings and what it scored on validation data, mean over its seeds."""

    settings: dict[str, Any]  # over the preset's
    criterion: float  # mean of the clean and the attacked score
    clean: float  # score
    attacked: float  # score
    seeds: int  # it was run on
    least: float  # criterion of its worst seed
    reason: str  # why it may not become a preset; empty if it may
    fell: str  # by how much one seed is worse than the others, where that is too much; empty if not


Case = tuple[str, str, str]
"""Method, model and dataset."""


def trials(store: Store, task: str = "") -> dict[Case, list[Trial]]:
    """Return the trials of each method, model and dataset, the best first.

    The criterion is the mean of clean and attacked score on the validation part; of vanilla models for links
    and graphs it is the clean score, for what they are there for is to be compared with. Trials are compared
    by their means over seeds or folds, those run on fewer seeds than others come last. Equal trials are
    ordered by the text of their settings, so the choice never depends on the order of files. Trials that
    would be run or judged otherwise now are passed over.
    """
    runs: dict[Case, dict[str, list[Mapping[str, Any]]]] = {}
    for record in store.records(Cell(kind="search", task=task).folder):
        cell = Cell.from_dict(record["cell"])
        if change_of(record, cell, earlier=True) is None:
            text = json.dumps(cell.settings, sort_keys=True)
            runs.setdefault((cell.row, cell.model, cell.dataset), {}).setdefault(text, []).append(record)
    found = {}
    for case, by_text in runs.items():
        held = [(_trial(records, task), text) for text, records in by_text.items()]
        held.sort(key=lambda item: (-item[0].seeds, -item[0].criterion, item[1]))
        found[case] = [trial for trial, _ in held]
    return dict(sorted(found.items(), key=lambda item: tuple(map(_rank, item[0]))))


def _trial(records: Sequence[Mapping[str, Any]], task: str) -> Trial:
    """One trial from its records on every seed."""
    cell = records[0]["cell"]
    criterion = "clean" if task and cell["method"] == "vanilla" else "criterion"
    scores = {record["cell"]["seed"]: record["validation"][criterion] for record in records}
    mean, (seed, least) = fmean(scores.values()), min(scores.items(), key=lambda item: item[1])
    reason = fell = ""
    if not task and len(scores) < SEEDS:
        reason = f"run on {len(scores)} of {SEEDS} seeds"
    if not task and least < mean - MOST_BELOW:
        fell = f"seed {seed} has {least:.3f} of `criterion`, where the mean is {mean:.3f}"
    clean, attacked = (fmean(one["validation"][name] for one in records) for name in ("clean", "attacked"))
    settings = current_names(cell["settings"])
    return Trial(settings, mean, clean, attacked, len(scores), least, reason, fell)


def presets(store: Store) -> str:
    """Return `experiments/presets.toml` with the best trials laid over it.

    Comments and general tables stay; `[method.MODEL.dataset]`, and the same under `[link]` and `[graph]`, are
    replaced where a search was run and its best setting holds (see `chosen`). Methods with one setting for
    every graph, and labelled rows, are left.

    Raises:
        InputError: the folder holds no search, or of some method, model and dataset no setting holds.
    """
    made, refused = dict[str, dict[str, Any]](), list[str]()
    for task in TABLES:
        for case, held in trials(store, task).items():
            name = ".".join(filter(None, (task, *case)))
            if case[0] in UNTUNED or case[0] not in methods.METHODS:
                continue
            good = chosen(case, held, task)
            if good is not None:
                made[name] = good.settings
            else:
                refused.append(f"{name} (the best: {held[0].reason or held[0].fell})")
    if refused:
        raise InputError(f"no setting holds on {SEEDS} seeds for {'; '.join(refused)}; add trials or seeds")
    if not made:
        raise InputError(f"there are no search records in {store.root}; run `fgai bench run search` first")
    blocks = [block for block in _blocks(methods.PRESETS.read_text(encoding="utf-8")) if block[0] not in made]
    for name, settings in made.items():
        general = name.rsplit(".", 2)[0]
        same = [at for at, (other, _) in enumerate(blocks) if f"{other}.".startswith(f"{general}.")]
        blocks.insert(same[-1] + 1 if same else len(blocks), (name, _table(name, settings)))
    return "".join(body for _, body in blocks)


def chosen(case: Case, held: Sequence[Trial], task: str = "") -> Trial | None:
    """The best trial that holds, or the one that is the preset in use if that is as good; None if none does.

    A trial whose criterion falls on one seed counts as holding where even that seed is above the worst of
    every trial that does not fall: to pass it over would be to ship what is worse on all seeds.
    """
    able = [trial for trial in held if not trial.reason]
    floor = max((trial.least for trial in able if not trial.fell), default=float("inf"))
    good = [trial for trial in able if not trial.fell or trial.least > floor]
    for trial in good:
        if good[0].criterion - trial.criterion <= NOISE and is_in_use(case, trial, task):
            return trial
    return good[0] if good else None


def is_in_use(case: Case, trial: Trial, task: str = "") -> bool:
    """Whether the presets of today give a method all that a trial sets."""
    method, model, dataset = case
    now = settings_of(Cell(method=method, model=model, dataset=dataset, task=task))
    given = {**now["defaults"], **now["settings"]}
    return all(given.get(name) == value for name, value in trial.settings.items())


def best_of_all(grid: str, store: Store) -> dict[str, dict[str, Any]]:
    """Return for each method the settings of a search grid with the best mean criterion over all its graphs.

    A method is left out until every trial is run.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for cell in read_grid(grid):
        record = store.read(cell) or {}
        score = record.get("validation", {}).get("criterion", float("nan"))
        found.setdefault(cell.method, {}).setdefault(json.dumps(cell.settings), []).append(score)
    means = {method: {text: fmean(held) for text, held in tried.items()} for method, tried in found.items()}
    whole = {method: held for method, held in means.items() if all(map(isfinite, held.values()))}
    return {method: json.loads(max(held, key=lambda text: held[text])) for method, held in whole.items()}


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
