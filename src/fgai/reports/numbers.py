"""Numbers out of records, and the words for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fgai.evaluation.summary import Record, number_at
from fgai.metrics import Shown, metric_at, null_path, quantity, shown_numbers

_GROUPS = {
    "prediction": "Predictions",
    "explanation": "Explanations",
    "fidelity": "Does attention decide?",
}


def _numbers_of(records: Sequence[Record]) -> dict[str, list[Shown]]:
    """Every number that its metric has words for, by group."""
    rows: dict[str, list[Shown]] = {group: [] for group in _GROUPS.values()}
    for entry in shown_numbers([record.get("metrics") or {} for record in records]):
        spec = metric_at(entry.path)
        if entry.words and spec is not None:
            rows[_GROUPS[spec.section]].append(entry)
    return rows


def _best_value(shown: Shown) -> str:
    return "closest to clean is best" if shown.like else f"{quantity(shown.path).direction} is better"


def _best_records(shown: Shown, records: Sequence[Record]) -> list[bool]:
    """Which records hold the best value; none where all print alike, or only one has any."""
    declared = quantity(shown.path)
    values = [number_at(record, shown.path) for record in records]
    if shown.like:
        aims = [number_at(record, shown.like) for record in records]
        values = [None if v is None or a is None else abs(v - a) for v, a in zip(values, aims, strict=True)]
        declared = replace(declared, direction="lower")
    known = [value for value in values if value is not None]
    if len(known) < 2 or len({format(value, declared.form) for value in known}) == 1:
        return [False] * len(values)
    return [value is not None and value == declared.best(known) for value in values]


def _of_null(record: Record, kind: str, path: str) -> float | None:
    return number_at(record, f"null.{kind}.{null_path(path)}")
