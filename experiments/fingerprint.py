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

ATTACKED = ("evaluate", "attack", "search")
"""Kinds of cells whose numbers depend on a search."""
LATER = {
    "certified": 0.0,
    "sharpness": 0.0,
    "neighbours": 1,
    "closeness_by": "relative",
    "form": "tv",
    "lean": 0.0,
}
"""Settings that records of before lack, with the values that change nothing."""


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


def change_of(record: Mapping[str, Any], cell: Cell) -> str | None:
    """Return the first thing that would be otherwise if a record were made now, in words, or None."""
    return _other_settings(record, cell) or other_searches(record, cell)


def is_older(record: Mapping[str, Any]) -> bool:
    """Whether a record would be made otherwise now."""
    return change_of(record, Cell.from_dict(record["cell"])) is not None


def earlier_note(store: Store, cells: Sequence[Cell]) -> list[str]:
    """One sentence that tells how many cells have records of other settings or searches, or none."""
    held = [record for cell in cells if (record := store.read(cell)) is not None]
    count = sum(record["status"] == "done" and is_older(record) for record in held)
    said = f"{count} of {len(cells)} cells were trained with other settings than today's presets."
    return [said] * bool(count)


def _other_settings(record: Mapping[str, Any], cell: Cell) -> str | None:
    """The first setting that is another one now, of the training or of its parent's."""
    was, now = (_sides(values) for values in (record.get("training", {}), settings_of(cell)))
    for side, settings in now.items():
        then = current_names(was[side]) if was[side] else settings
        then = {**{name: value for name, value in LATER.items() if name in settings}, **then}
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
