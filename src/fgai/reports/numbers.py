"""The table of all numbers on the page: a metric a row, a model or a null attention a column."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fgai.evaluation.summary import Record, number_at, signed
from fgai.metrics import NULLS, Shown, chance_path, metric_at, null_path, quantity, shown_numbers
from fgai.records import ARROWS
from fgai.reports.build import Report

_GROUPS = {
    "prediction": "Predictions",
    "explanation": "Explanations",
    "fidelity": "Does attention decide?",
}
_NULLS_NOTE = (
    "“uniform” gives every neighbour the same attention, “random” draws it: the values of explanations"
    " without information. "
)
_NOTE = (
    "“chance”: the mean of random rankings, or always the most frequent class. Bold: best of"
    " the models (≈: closest to its own value without attack); the headline says whether that is more than"
    " noise."
)


def _esc(value: object) -> str:
    """Text escaped for HTML."""
    return html.escape(str(value), quote=True)


def _code(text: object) -> str:
    """Text escaped for HTML, `code` between backticks and options such as --threat as `<code>`."""
    parts = re.split(r"(`[^`\n]+`|(?<![\w-])--[a-z][a-z-]*)", str(text))
    marked = (
        f"<code>{_esc(part.strip('`'))}</code>" if at % 2 else _esc(part) for at, part in enumerate(parts)
    )
    return "".join(marked)


def _number_table(report: Report) -> str:
    """Every number of a report as an HTML table."""
    reference = next((r for r in report.records if r.get("name") == report.reference), report.records[0])
    nulls = [kind for kind in NULLS if isinstance((reference.get("metrics") or {}).get("null"), Mapping)]
    head = "".join(f'<th scope="col">{_esc(name)}</th>' for name in report.names)
    head += "".join(f'<th scope="col" class="null">{_esc(kind)}</th>' for kind in (*nulls, "chance"))
    body = ""
    for group, entries in _numbers_of(report.records).items():
        rows = "".join(_number_row(report, reference, nulls, entry) for entry in entries)
        if rows:
            span = 2 + len(report.records) + len(nulls)
            body += f'<tr class="group"><th colspan="{span}" scope="colgroup">{_esc(group)}</th></tr>{rows}'
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="All numbers"><table>'
        f'<thead><tr><th scope="col">Measured</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div><p class='caption'>{_NULLS_NOTE * bool(nulls)}{_NOTE}</p>"
    )


def _number_row(report: Report, reference: Record, nulls: Sequence[str], entry: Shown) -> str:
    """One metric of every model, of null attention and of chance; an empty text if no model has it."""
    values = [number_at(record, entry.path) for record in report.records]
    if all(value is None for value in values):
        return ""
    form, best = quantity(entry.path).form, _best_records(entry, report.records)
    cells = "".join(
        f'<td class="{"best" * is_best}" data-of="{_esc(name)}">{_esc(signed(value, form))}</td>'
        for name, value, is_best in zip(report.names, values, best, strict=True)
    )
    levels = {kind: number_at(reference, f"null.{kind}.{null_path(entry.path)}") for kind in nulls}
    levels["chance"] = number_at(reference, chance_path(entry.path))
    cells += "".join(
        f'<td class="null" data-of="{kind}">{_esc(signed(level, form))}</td>'
        for kind, level in levels.items()
    )
    arrow, aim = "≈" if entry.like else ARROWS[quantity(entry.path).direction], _best_value(entry)
    return (
        f'<tr><th scope="row">{_esc(entry.words)}&nbsp;<span title="{aim}" aria-label="{aim}">{arrow}</span>'
        f"<small>{_esc(entry.about)}</small></th>{cells}</tr>"
    )


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
    """Which records hold the best value; none if all print alike, or only one has a value."""
    declared = quantity(shown.path)
    values = [number_at(record, shown.path) for record in records]
    if shown.like:
        clean = [number_at(record, shown.like) for record in records]
        values = [None if v is None or c is None else abs(v - c) for v, c in zip(values, clean, strict=True)]
        declared = replace(declared, direction="lower")
    numbers = [value for value in values if value is not None]
    if len(numbers) < 2 or len({format(value, declared.form) for value in numbers}) == 1:
        return [False] * len(values)
    return [value is not None and value == declared.best(numbers) for value in values]
