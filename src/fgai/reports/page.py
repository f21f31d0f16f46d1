"""The page: one HTML file that opens from disk, needs no network and runs nothing but its own script."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fgai.errors import InputError, extra
from fgai.evaluation import summary
from fgai.evaluation.summary import number_at, percent, signed
from fgai.files import write_atomic
from fgai.metrics import NULLS, Shown, chance_path, metric_at, null_path, quantity, shown_numbers
from fgai.records import ARROWS, look_up, provenance_line
from fgai.reports import words
from fgai.reports.build import Report
from fgai.reports.template import asset, fill, whatif_script
from fgai.typed import typed

LIMIT = 9_500_000  # bytes of a page; nodes are dropped from the explorer until it fits
FEWEST = 50  # nodes in the explorer; below, it is left out
SCRIPTS = ("elements", "base", "charts", "network", "explorer", "node", "main")


@typed
def write_report(report: Report, path: Path | str, *, document: bool = True) -> Path:
    """Write the page, and the document it is made of beside it (`.json`); return the path of the page.

    The ending `.html` is added where it is missing; without `document` the page alone is written.
    `MissingExtraError` if plotly is not installed, `InputError` if there is nothing to show.

    Example:
        >>> import fgai
        >>> from fgai.reports import make_report, write_report
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train(fgai.GAT.for_data(data), data, epochs=3, progress=False)
        >>> record = fgai.evaluate(model, data, "random", name="GAT", per_node=True, curves=False)
        >>> write_report(make_report(record), "report.html").name
        'report.html'
    """
    library, path = _plotly(), check_page(path)
    write_atomic(path, render(report, library))
    if document:
        report.save(path.with_suffix(".json"))
    return path


def check_page(path: Path | str) -> Path:
    """Return the path of a page, with `.html` added where it is missing; raise if plotly is not installed."""
    _plotly()
    path = Path(path)
    return path if path.suffix.lower() in (".html", ".htm") else path.with_name(f"{path.name}.html")


@typed
def render(report: Report, library: str | None = None) -> str:
    """Return the page as text; `library` is the script of plotly.js, by default of the installed package.

    `InputError` if the document holds no evaluation, `MissingExtraError` if plotly is not installed.
    """
    if not report.records:
        raise InputError("the report holds no evaluation, so there is nothing to show")
    script = _plotly() if library is None else library
    values, first, alone = report.to_dict(), report.records[0], len(report.records) == 1
    room = LIMIT - len(script.encode())
    data = _embedded(values)
    while len(data.encode()) > room and (values.get("explorer") or {}).get("nodes", {}).get("id"):
        explorer = values["explorer"]
        count = len(explorer["nodes"]["id"])
        values["explorer"] = None if count <= FEWEST else _trimmed(explorer, max(FEWEST, count // 2))
        data = _embedded(values)
    promises = (str(proof["promise"]) for proof in report.certificates.values() if proof.get("promise"))
    kinds = words._kinds_of(words.changes_in(report))
    parts = {
        "report": report,
        "first": first,
        "style": asset("style.css") + asset("whatif.css", "whatif"),
        "headline": words.headline(report),
        "warnings": _warnings(report.records),
        "lead": words.meaning(report),
        "steps": summary.next_steps(first) if alone else [],
        "recall": summary.recall_by_class(first) if alone else [],
        "percent": percent,
        "facts": _facts(report),
        "missing": words.missing(report),
        "cards": _cards(report),
        "kinds_of": lambda keys: dict.fromkeys(kinds[key] for key in keys if key in kinds),
        "phrase": summary.score_phrase(first),
        "rule": "" if alone else summary.RULE,
        "words": (values.get("explorer") or {}).get("words", ""),
        "one_attack": summary.one_attack(first),
        "output_layer": partial(words._output_layer, report.certificates),
        "promise": next(promises, ""),
        "nulls": _nulls(report),
        "numbers": {group: list(_rows(report, rows)) for group, rows in _numbers_of(report.records).items()},
        "data": data,
        "plotly": script.replace("</script", "<\\/script"),
        "script": "\n".join(asset(f"{name}.js") for name in SCRIPTS),
        "whatif": whatif_script() + asset("whatif.js"),
    }
    return fill(asset("page.html"), parts)


def _embedded(values: Any) -> str:
    """JSON that cannot end the script element it stands in, nor be read as markup."""
    plain = json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for letter in "<>&\u2028\u2029":
        plain = plain.replace(letter, f"\\u{ord(letter):04x}")
    return plain


def _trimmed(explorer: dict[str, Any], count: int) -> dict[str, Any]:
    """The explorer with its first `count` nodes only; they are in order of importance."""
    total = len(explorer["nodes"]["id"])

    def cut(value: Any) -> Any:
        if isinstance(value, list):
            short = value[:count] if len(value) == total else value
            return [cut(item) if isinstance(item, dict) else item for item in short]
        return {key: cut(item) for key, item in value.items()} if isinstance(value, dict) else value

    text = f"This page carries {count:,} of {explorer.get('total', total):,} nodes, those that matter most,"
    text += " to stay small. The numbers and curves above count all nodes."
    return {**explorer, **{key: cut(explorer[key]) for key in ("nodes", "models")}, "words": text}


def _plotly() -> str:
    return str(extra("plotly.offline").get_plotlyjs())


def _facts(report: Report) -> list[tuple[str, str]]:
    data: Mapping[str, Any] = report.records[0].get("data") or {}
    names = ("nodes", "edges", "features", "classes")
    sizes = [f"{data[name]:,} {name}" for name in names if isinstance(data.get(name), int)]
    about = f"{data.get('name', 'unnamed graph')}: {', '.join(sizes)}" if sizes else data.get("name", "")
    facts = [("Data.", about), ("Attack.", words.attack_words(report.records[0], len(report.records) > 1))]
    for name, record in zip(report.names, report.records, strict=True):
        block = record.get("provenance")
        if isinstance(block, Mapping) and (line := provenance_line(block)):
            facts.append((f"{name}.", line))
    return facts


def _warnings(records: Sequence[summary.Record]) -> dict[str, list[str]]:
    """The models that each reliability warning concerns."""
    models: dict[str, list[str]] = {}
    for record in records:
        for entry in record.get("warnings") or []:
            message = str(entry.get("message", "")) if isinstance(entry, Mapping) else str(entry)
            models.setdefault(message, []).append(str(record.get("name")))
    return models


_GROUPS = {"prediction": "Predictions", "explanation": "Explanations", "fidelity": "Does attention decide?"}


def _nulls(report: Report) -> list[str]:
    return list(NULLS) if isinstance(look_up(words._pair(report)[0], "metrics.null"), Mapping) else []


def _numbers_of(records: Sequence[summary.Record]) -> dict[str, list[Shown]]:
    """Every number that its metric has words for, by group."""
    rows: dict[str, list[Shown]] = {group: [] for group in _GROUPS.values()}
    for entry in shown_numbers([record.get("metrics") or {} for record in records]):
        spec = metric_at(entry.path)
        if entry.words and spec is not None:
            rows[_GROUPS[spec.section]].append(entry)
    return rows


def _rows(report: Report, shown: Sequence[Shown]) -> Iterator[dict[str, Any]]:
    """Metrics that any model has: the cells of the models, of null attention and of chance."""
    reference = words._pair(report)[0]
    for entry in shown:
        values = [number_at(record, entry.path) for record in report.records]
        if all(value is None for value in values):
            continue
        about, best = quantity(entry.path), _best_records(entry, report.records)
        levels = {kind: f"null.{kind}.{null_path(entry.path)}" for kind in _nulls(report)}
        levels["chance"] = chance_path(entry.path)
        yield {
            "shown": entry,
            "arrow": "≈" if entry.like else ARROWS[about.better],
            "aim": _best_value(entry),
            "cells": zip(report.names, [signed(value, about.form) for value in values], best, strict=True),
            "levels": {kind: signed(number_at(reference, path), about.form) for kind, path in levels.items()},
        }


def _best_value(shown: Shown) -> str:
    return "closest to clean is best" if shown.like else f"{quantity(shown.path).better} is better"


def _best_records(shown: Shown, records: Sequence[summary.Record]) -> list[bool]:
    """Which records hold the best value; none if all print alike, or only one has a value."""
    declared = quantity(shown.path)
    values = [number_at(record, shown.path) for record in records]
    if shown.like:
        clean = [number_at(record, shown.like) for record in records]
        values = [None if v is None or c is None else abs(v - c) for v, c in zip(values, clean, strict=True)]
        declared = replace(declared, better="lower")
    numbers = [value for value in values if value is not None]
    if len(numbers) < 2 or len({format(value, declared.form) for value in numbers}) == 1:
        return [False] * len(values)
    return [value is not None and value == declared.best(numbers) for value in values]


def _bar(
    name: str, value: str, length: float | None, tick: float | None = None, full: float = 1.0
) -> dict[str, Any]:
    """One model on a card; `length` and `tick` become percentages of a full bar."""
    shares = {"length": length, "tick": tick}
    percents = {key: None if v is None else 100 * min(1.0, max(0.0, v / full)) for key, v in shares.items()}
    return {"name": name, "value": value, **percents}


def _of_k(k: int, *shares: float | None) -> str:
    texts = [f"{k * share:.1f}" for share in shares if share is not None]
    return f"{' and '.join(texts)} of {k}" if texts else "–"


def _cards(report: Report) -> dict[str, Any]:
    """The bars of every card, and what its sentence names."""
    records, names, k = report.records, report.names, summary.size_of(report.records[0])
    keys = ("scores", "kept", "shift", "same", "gaps", "injected")
    cards: dict[str, list[dict[str, Any]]] = {key: [] for key in keys}
    shifts = [number_at(record, "g_tvd.rel") for record in records]
    furthest = max([1.0, *(v for v in shifts if v is not None)])
    gaps = [[number_at(r, f"f_slope.node.{when}.gap") for when in ("clean", "attacked")] for r in records]
    widest = max([1.0, *(v for pair in gaps for v in pair if v is not None)])
    neighbours = None
    for name, record, shift, (gap, gap_after) in zip(names, records, shifts, gaps, strict=True):
        before, after = summary.score_at(record, "clean"), summary.score_at(record, "attacked")
        cards["scores"].append(_bar(name, f"{percent(before)} → {percent(after)}", after, before))
        kept, aimed = (number_at(record, f"overlap_touched.{of}.all") for of in ("prediction", "explanation"))
        if summary.one_attack(records[0]):
            cards["kept"].append(_bar(name, _of_k(k, kept), kept))
        else:
            cards["kept"].append(_bar(name, _of_k(k, kept, aimed), kept if aimed is None else aimed, kept))
        text, tick = signed(shift, "#.2g").rstrip("."), 1.0 if furthest > 1 else None
        cards["shift"].append(_bar(name, text, shift, tick, furthest))
        if name != report.reference:
            same = number_at(record, "similarity.overlap.all")
            cards["same"].append(_bar(name, _of_k(k, same), same))
        text = f"{signed(gap, '.2f')} → {signed(gap_after, '.2f')}"
        cards["gaps"].append(_bar(name, text, gap_after, gap, widest))
        proofs = {str(one.get("where")): one for one in report.injections.get(name) or [] if one.get("known")}
        alone, every = (proofs[where]["share"] if where in proofs else None for where in ("direct", "any"))
        text = " and ".join(percent(share, 1) for share in (alone, every) if share is not None)
        cards["injected"].append(_bar(name, text or "–", every, alone))
        neighbours = next((one.get("neighbours") for one in proofs.values()), neighbours)
    paths = (f"{summary.score_of(records[0])}.chance", "overlap_touched.chance.all", "overlap.chance.all")
    score, kept, same = (number_at(records[0], path) for path in paths)
    facts = {"k": k, "furthest": furthest, "widest": signed(widest, ".3g"), "neighbours": neighbours}
    facts["chance"] = {"scores": percent(score), "kept": _of_k(k, kept), "same": _of_k(k, same)}
    certified = {"definition": words.DEFINITION_SHARE, "topk": words.TOPK_SHARE}
    return {**cards, **{key: _certified(report, path) for key, path in certified.items()}, **facts}


def _certified(report: Report, path: str) -> dict[str, Any]:
    """Bars with a share of the output layer of every certificate, and the settings of the last one."""
    shares = {name: words.output_share(report.certificates, name, path) for name in report.names}
    certified = [report.certificates[name] for name, share in shares.items() if share is not None]
    bars = [_bar(name, percent(share, 1), share) for name, share in shares.items()]
    return {"bars": bars, **{key: (certified or [{}])[-1].get(key) for key in ("k2", "radius", "norm")}}
