"""Numbers out of records, and the words for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fgai.metrics import Shown, metric_at, null_path, quantity, shown_numbers
from fgai.records import look_up
from fgai.tasks import TASKS, Task

Record = Mapping[str, Any]
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
    values = [_number(record, shown.path) for record in records]
    if shown.like:
        aims = [_number(record, shown.like) for record in records]
        values = [None if v is None or a is None else abs(v - a) for v, a in zip(values, aims, strict=True)]
        declared = replace(declared, direction="lower")
    known = [value for value in values if value is not None]
    if len(known) < 2 or len({format(value, declared.form) for value in known}) == 1:
        return [False] * len(values)
    return [value is not None and value == declared.best(known) for value in values]


def _number(record: Record, path: str) -> float | None:
    """A metric of a record by its dotted path, None where it is missing or no number."""
    found = look_up(record.get("metrics") or {}, path)
    return float(found) if isinstance(found, int | float) and not isinstance(found, bool) else None


SCORES = {
    "f1": "F1",
    "accuracy": "accuracy",
    "roc_auc": "ROC-AUC",
    "balanced_accuracy": "balanced accuracy",
}
"""Headings of scores by their names in records."""
SHARES = ("f1", "accuracy")  # scores that are shares of what is classified right


def _task_in(record: Record) -> Task:
    """The task of a record; nodes if it names none that is registered."""
    return TASKS.get((record.get("config") or {}).get("task", ""), TASKS["node"])


def _score_of(record: Record) -> str:
    """Name of a record's headline score: its own, the task's, any that is there, or `f1`."""
    metrics, own = record.get("metrics") or {}, str((record.get("config") or {}).get("headline"))
    return next((name for name in (own, _task_in(record).headline, *SCORES) if name in metrics), "f1")


def _heading_of(record: Record) -> str:
    name = _score_of(record)
    return SCORES.get(name, name)


def _score_phrase(record: Record) -> str:
    """The headline score in words, e.g. `tested nodes classified right`."""
    rows = _task_in(record).rows_are
    if _score_of(record) in SHARES:
        return f"tested {rows} classified right"
    return f"{_heading_of(record)} on the tested {rows}"


def _share_phrase(record: Record) -> str:
    """The same after a percentage, e.g. `of the tested nodes classified right`."""
    return f"of the {_score_phrase(record)}" if _score_of(record) in SHARES else _score_phrase(record)


def _score(record: Record, when: str) -> float | None:
    return _number(record, f"{_score_of(record)}.{when}")


def _of_null(record: Record, kind: str, path: str) -> float | None:
    return _number(record, f"null.{kind}.{null_path(path)}")


def _percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f}\u00a0%"


def _signed(value: float | None, form: str) -> str:
    """A number with a real minus sign, a dash where there is none."""
    return "–" if value is None else format(value, form).replace("-", "−")
