"""Settings from the search: the best trial of each method, model and dataset on validation nodes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple

from fgai.bench.results import DATASETS, MODELS, ROWS
from fgai.bench.store import Store
from fgai.errors import InputError
from fgai.training import METHODS


class Trial(NamedTuple):
    """One trial of a search: its settings and what it scored on validation nodes."""

    settings: dict[str, Any]
    criterion: float
    clean: float
    attacked: float
    key: str


Case = tuple[str, str, str]
"""Method, model and dataset."""


def trials(store: Store) -> dict[Case, list[Trial]]:
    """Return the trials of each method, model and dataset, the best first.

    The criterion is the mean of clean and `standard`-attacked accuracy on validation nodes. Equal trials are
    ordered by the text of their settings, so the choice never depends on the order of files.
    """
    found: dict[Case, list[Trial]] = {}
    for record in store.records("search"):
        cell, scores = record["cell"], record["validation"]
        case = (cell["label"] or cell["method"], cell["model"], cell["dataset"])
        trial = Trial(
            cell["settings"], scores["criterion"], scores["clean"], scores["attacked"], record["key"]
        )
        found.setdefault(case, []).append(trial)
    for held in found.values():
        held.sort(key=lambda trial: (-trial.criterion, json.dumps(trial.settings, sort_keys=True)))
    return dict(sorted(found.items(), key=lambda item: tuple(map(_rank, item[0]))))


def presets(store: Store) -> str:
    """Return the package's presets as TOML, the best trials laid over them.

    General tables and comments stay as they are; `[method.MODEL.dataset]` is replaced where a search was run.

    Raises:
        InputError: the folder holds no search.
    """
    best = {case: held[0].settings for case, held in trials(store).items() if case[0] in METHODS}
    if not best:
        raise InputError(f"there are no search records in {store.root}; run `fgai bench run search` first")
    text = files("fgai.training").joinpath("presets.toml").read_text(encoding="utf-8")
    made = {".".join(case): settings for case, settings in best.items()}
    blocks = [block for block in _blocks(text) if block[0] not in made]
    for name, settings in made.items():
        method = name.partition(".")[0]
        same = [at for at, (other, _) in enumerate(blocks) if other.partition(".")[0] == method]
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
