"""What made a record: its settings and its searches, each as a short hash, and what has changed since."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.cells import Cell, current_names
from experiments.store import Store
from experiments.threats import grid_threat
from experiments.trained import settings_of, training_code
from experiments.validation import short_attack
from fgai.attacks import Attack, make_attack
from fgai.records import plain
from fgai.training import FaithfulSettings, HardenSettings

ATTACKED = ("evaluate", "attack", "search")
"""Kinds of cells whose numbers depend on a search."""
LATER = {"sharpness": 0.0}
"""Settings that records of before lack, with the values that change nothing."""

OLD = (
    "scope", "layers", "form", "k1", "divergence", "closeness_by", "contrast", "explanation_stability",
    "certified", "neighbours", "adversary", "space", "ramp", "turns", "step_size", "dropout",
)  # fmt: skip
UNUSED = {*OLD, *FaithfulSettings.names()} - {*HardenSettings.names()}
"""Old and new settings of faithful training alone."""


def fingerprint(cell: Cell) -> dict[str, Any]:
    """Return what a record of a cell is known by, if it is made now.

    That is what numbers depend on: the settings of the training and of its parent, and of every search its
    budget, members, rules and version. `code` is a hash of every line that trains; it tells where a model
    came from, and outdates nothing.
    """
    return {
        "settings": _hash(settings_of(cell)),
        "attacks": searches(cell.kind, cell.threats, cell.predicts),
        "code": training_code(),
    }


EARLIER = "settings from before there was one for every graph"
"""What differs in records of `claims.jsonl`."""


def change_of(record: Mapping[str, Any], cell: Cell, *, earlier: bool = False) -> str | None:
    """Return the first thing that would be otherwise if a record were made now, in words, or None.

    With `earlier`, records of earlier settings that nothing has replaced yet count as if they had today's.
    """
    if not is_earlier(record):
        return _other_settings(record, cell) or other_searches(record, cell)
    return other_searches(record, cell) if earlier else EARLIER


def is_earlier(record: Mapping[str, Any]) -> bool:
    """Whether a record is of settings from before there was one for every graph, and not run again since."""
    return bool(record.get("earlier"))


def is_older(record: Mapping[str, Any]) -> bool:
    """Whether a record is left out of tables: it would be made otherwise now, and a later one may exist."""
    return change_of(record, Cell.from_dict(record["cell"]), earlier=True) is not None


def earlier_note(store: Store, cells: Sequence[Cell]) -> list[str]:
    """One sentence that tells how many cells have records of other settings or searches, or none."""
    count = sum(is_earlier(record) or is_older(record) for _, record in store.finished(cells))
    said = f"{count} of {len(cells)} cells were trained with other settings than today's."
    return [said] * bool(count)


def _other_settings(record: Mapping[str, Any], cell: Cell) -> str | None:
    """The first setting that is another one now, of the training or of its parent's."""
    was, now = (_sides(values) for values in (record.get("training", {}), settings_of(cell)))
    faithful = cell.method.startswith("fgai")
    for side, settings in now.items():
        then = current_names(was[side]) if was[side] else settings
        then = {**{name: value for name, value in LATER.items() if name in settings}, **then}
        # Records of baselines also hold settings of faithful training, which they never used.
        unused = set() if faithful else UNUSED - settings.keys()
        then = {name: value for name, value in then.items() if name not in unused}
        for name in sorted({**then, **settings}):
            if then.get(name) != settings.get(name):
                return f"another {name!r} ({side}: {then.get(name)!r}, now {settings.get(name)!r})"
    return None


def _sides(training: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """All settings of a training, whether said or left to the defaults, and its parent's."""
    own = {**training.get("defaults", {}), **training.get("settings", {})}
    return {"settings": own, "parent": training.get("parent", {})}


def other_searches(record: Mapping[str, Any], cell: Cell) -> str | None:
    """Return the first search that a record's differs in from today's, in words, or None."""
    known = record.get("fingerprint", {}).get("attacks")
    now = searches(cell.kind, cell.threats, cell.predicts)
    if not now:
        return None
    if known is None:
        return "searches of before they were recorded"
    other = [name for name in now if known.get(name) != now[name]]
    return f"another search of `{other[0]}`" if other else None


@functools.cache
def searches(kind: str, threats: tuple[str, ...], task: str) -> dict[str, str]:
    """Return a hash of every search that cells of a kind make, by the name of the threat."""
    found: dict[str, list[Attack]] = {}
    if kind == "search":
        found["validation"] = [short_attack(task)]
    elif kind in ATTACKED:
        both = ("prediction", "explanation")
        found = {name: [make_attack(grid_threat(name), what, task=task) for what in both] for name in threats}
    return {name: _hash([one.specification() for one in held]) for name, held in found.items()}


def _hash(values: Any) -> str:
    return hashlib.sha256(json.dumps(plain(values), sort_keys=True).encode()).hexdigest()[:12]
