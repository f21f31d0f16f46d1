"""The page's text: every section that needs no drawing, as HTML; whatever comes from data is escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from fgai.evaluation.layout import chance_path
from fgai.records import ARROWS, provenance_line
from fgai.reports.document import Report
from fgai.reports.numbers import Record, number, numbers_of, of_null, signed
from fgai.reports.words import attack_words, headline, meaning, missing

NULLS = ("uniform", "random")


def esc(value: object) -> str:
    """Text as HTML shows it, never as markup."""
    return html.escape(str(value), quote=True)


def header(report: Report) -> str:
    """What this is, whether it helped, and what the attack was."""
    lead = "".join(f"<p>{esc(line)}</p>" for line in meaning(report))
    data: Mapping[str, Any] = report.records[0].get("data") or {}
    sizes = [
        f"{data[name]:,} {name}"
        for name in ("nodes", "edges", "features", "classes")
        if isinstance(data.get(name), int)
    ]
    about = f"{data.get('name', 'unnamed graph')}: {', '.join(sizes)}" if sizes else data.get("name", "")
    return (
        f'<p class="kicker">{esc(report.title)}</p>'
        f"<h1>{esc(headline(report))}</h1>"
        f'<div class="lead">{lead}</div>'
        f'<p class="facts"><strong>Data.</strong> {esc(about)}</p>'
        f'<p class="facts"><strong>Attack.</strong> {esc(attack_words(report.records[0]))}</p>'
        f"{''.join(map(_evidence, report.records))}"
    )


def _evidence(record: Record) -> str:
    """Weights, data, code, date, command and seed of one model in a line; nothing in records of before."""
    block = record.get("provenance")
    line = provenance_line(block) if isinstance(block, Mapping) else ""
    name = f"{record.get('name', 'model')}."
    return f'<p class="facts"><strong>{esc(name)}</strong> {esc(line)}</p>' if line else ""


def missing_box(report: Report) -> str:
    """What the page cannot show, folded away unless something is odd."""
    lines = missing(report)
    if not lines:
        return ""
    listed = "".join(f"<li>{esc(line)}</li>" for line in lines)
    opened = " open" if report.notes else ""
    return (
        f'<details class="notice" id="missing"{opened}><summary>What this page cannot show</summary>'
        f"<ul>{listed}</ul></details>"
    )


def warnings_box(records: Sequence[Record]) -> str:
    """Reliability warnings, once each, with the models they concern."""
    found: dict[str, list[str]] = {}
    for record in records:
        for entry in record.get("warnings") or []:
            message = str(entry.get("message", "")) if isinstance(entry, Mapping) else str(entry)
            found.setdefault(message, []).append(str(record.get("name")))
    if not found:
        return ""
    listed = "".join(f"<li>{esc(', '.join(who))}: {esc(what)}</li>" for what, who in found.items())
    return f'<div class="notice"><p><strong>Read these numbers with care.</strong></p><ul>{listed}</ul></div>'


def all_numbers(report: Report) -> str:
    """Every number as a table: metrics down, models across, attention that says nothing beside them."""
    reference = next((r for r in report.records if r.get("name") == report.reference), report.records[0])
    nulls = [kind for kind in NULLS if isinstance((reference.get("metrics") or {}).get("null"), Mapping)]
    head = "".join(f'<th scope="col">{esc(name)}</th>' for name in report.names)
    head += "".join(f'<th scope="col" class="null">{esc(kind)}</th>' for kind in (*nulls, "chance"))
    body = ""
    for group, listed in numbers_of(report.records).items():
        rows = ""
        for row in listed:
            values = [number(record, row.path) for record in report.records]
            if all(value is None for value in values):
                continue
            shown = row.quantity
            cells = "".join(
                f'<td class="{"best" * best}" data-of="{esc(name)}">{esc(signed(value, shown.form))}</td>'
                for name, value, best in zip(report.names, values, row.best(report.records), strict=True)
            )
            beside = {kind: of_null(reference, kind, row.path) for kind in nulls}
            beside["chance"] = number(reference, chance_path(row.path))
            cells += "".join(
                f'<td class="null" data-of="{kind}">{esc(signed(level, shown.form))}</td>'
                for kind, level in beside.items()
            )
            arrow = "≈" if row.like else ARROWS[shown.direction]
            rows += (
                f'<tr><th scope="row">{esc(row.title)}&nbsp;'
                f'<span title="{row.wanted}" aria-label="{row.wanted}">{arrow}</span>'
                f"<small>{esc(row.about)}</small></th>{cells}</tr>"
            )
        if rows:
            span = 2 + len(report.records) + len(nulls)
            body += f'<tr class="group"><th colspan="{span}" scope="colgroup">{esc(group)}</th></tr>{rows}'
    note = (
        "<p class='caption'>"
        + "“uniform” gives every neighbour the same attention, “random” rolls dice: what explanations score"
        " that say nothing. "
        * bool(nulls)
        + "“chance”: what a random ranking gets on average, or always naming the most frequent class."
        " Bold: best of the models (≈: closest to its own value without attack); whether that is more than"
        " noise, the headline says.</p>"
    )
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="All numbers"><table>'
        f'<thead><tr><th scope="col">Measured</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>{note}"
    )


def configuration(report: Report) -> str:
    """The exact settings, and how to get the same numbers again."""
    first = report.records[0]
    blocks = [
        _listing("Data", first.get("data")),
        _listing("Attack", {"name": (first.get("threat") or {}).get("name"), **_budget(first)}),
        _listing("Evaluation", {**(first.get("config") or {}), "seed": first.get("seed")}),
        _listing("Versions", {**(first.get("version") or {}), "device": first.get("device")}),
    ]
    for record in report.records:
        model: Mapping[str, Any] = record.get("model") or {}
        settings = {"class": model.get("class"), **(model.get("config") or {})}
        settings["parameters"] = model.get("parameters")
        history = report.histories.get(str(record.get("name"))) or {}
        settings |= _training(history)
        seconds = history.get("seconds")
        if isinstance(seconds, int | float):
            settings["training seconds"] = f"{seconds:.1f}"
        spent = (record.get("seconds") or {}).get("total")
        if isinstance(spent, int | float):
            settings["evaluation seconds"] = f"{spent:.1f}"
        blocks.append(_listing(f"Model: {record.get('name')}", settings))
    commands = "\n".join(report.reproduce) or snippet(report)
    return (
        f'<h3>Reproduce it</h3><pre tabindex="0"><code>{esc(commands)}</code></pre>'
        f'<div class="listings">{"".join(blocks)}</div>'
    )


def snippet(report: Report) -> str:
    """Python that evaluates the same models in the same way."""
    first = report.records[0]
    config: Mapping[str, Any] = first.get("config") or {}
    name = (first.get("data") or {}).get("name", "planted")
    models = ", ".join(f"{json.dumps(name)}: …" for name in report.names)
    threat = (first.get("threat") or {}).get("name", "standard")
    return (
        "import fgai\n\n"
        f"data = fgai.load_dataset({json.dumps(name)}, seed={first.get('seed', 0)})\n"
        f"models = {{{models}}}\n"
        f'fgai.report(models, data, "report.html", threat={json.dumps(threat)}, k={config.get("k", 5)},'
        f" seed={first.get('seed', 0)})"
    )


def _training(history: Mapping[str, Any]) -> dict[str, Any]:
    """What a training came to; the kept epoch counted from 1, as the charts do."""
    found: dict[str, Any] = {}
    if "epochs" in history:
        found["training epochs"] = history["epochs"]
    if isinstance(history.get("best_epoch"), int):
        found["training kept epoch"] = history["best_epoch"] + 1
    if "stopped" in history:
        found["training ended"] = history.get("ending", history["stopped"])
    return found


def _budget(record: Record) -> dict[str, Any]:
    budget = (record.get("threat") or {}).get("budget")
    return dict(budget) if isinstance(budget, Mapping) else {}


def _listing(title: str, values: Any) -> str:
    items = values.items() if isinstance(values, Mapping) else ()
    rows = "".join(
        f"<div><dt>{esc(str(name).replace('_', ' '))}</dt><dd>{esc(_plain(value))}</dd></div>"
        for name, value in items
        if value is not None and not isinstance(value, Mapping)
    )
    return f"<section class='listing'><h4>{esc(title)}</h4><dl>{rows}</dl></section>" if rows else ""


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
