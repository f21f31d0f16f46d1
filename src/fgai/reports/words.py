"""Sentences of the page: the headline, what changed, what the attack may do, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fgai.attacks import THREATS, make_attack, weak_search_note
from fgai.evaluation import summary
from fgai.records import Cell, Column, Table, look_up
from fgai.reports.build import Report
from fgai.typed import typed

DEFINITION_SHARE, TOPK_SHARE = "definition.all_four", "topk_share"
"""Shares of a certified layer: nodes with all four properties of Definition 1, nodes whose top-k stays."""


@dataclass(frozen=True)
class Change:
    """One measure of the reference (`before`) and of another model (`after`)."""

    key: str
    name: str  # as the tables call it
    title: str  # as sentences call it
    before: float
    after: float
    texts: tuple[str, str]  # both, as printed
    kind: str  # `better`, `as before` or `worse`
    chance: float | None = None  # the value of a random ranking or of the most frequent class


def _changes(
    reference: summary.Record,
    other: summary.Record,
    certificates: Mapping[str, Mapping[str, Any]] | None = None,
    intervals: summary.Intervals | None = None,
) -> list[Change]:
    """Every measure both records hold; the certified share from the certificates, output layer."""
    score, out = summary.score_of(reference), []
    for measure in summary.MEASURES:
        (path, chance), pair = measure.paths(score), []
        for record in (reference, other):
            proved = output_share(certificates or {}, str(record.get("name")), TOPK_SHARE)
            pair.append(summary.number_at(record, path) if path else proved)
        before, after = pair
        if before is not None and after is not None:
            interval = summary.interval_in(intervals, str(other.get("name")), measure.key)
            name = measure.name.replace("F1", summary.heading_of(reference))
            title = measure.title.format(k=summary.size_of(reference))
            texts = measure.text(before), measure.text(after)
            kind = measure.kind(before, after, interval)
            level = summary.number_at(reference, chance) if chance else None
            out.append(Change(measure.key, name, title, before, after, texts, kind, level))
    return out


def _kinds_of(changes: Sequence[Change]) -> dict[str, str]:
    """The kind of each change by its key."""
    return {change.key: change.kind for change in changes}


def _verdict(changes: Sequence[Change], reference: str, other: str) -> str:
    attacked, clean, kept, aimed = map(_kinds_of(changes).get, ("attacked", "clean", "kept", "aimed"))
    if attacked is None:
        return f"{other} beside {reference}"
    if attacked == summary.WORSE:
        return f"{other} did not help here: {reference} holds better under attack"
    if attacked == summary.SAME:
        if summary.BETTER in (kept, aimed) and summary.WORSE not in (kept, aimed):
            return f"Predictions hold alike; the explanations of {other} hold better"
        return f"{other} made no clear difference here"
    # `kept`: explanations when predictions are attacked; `aimed`: when they are the target themselves.
    tail = ""
    if summary.WORSE in (kept, aimed):
        when = "" if kept == summary.WORSE else " when they are the target"
        tail = f", but its explanations hold less well{when}"
    elif aimed == summary.BETTER or (kept == summary.BETTER and aimed is None):
        tail = ", and so do its explanations"
    elif kept == summary.BETTER:
        tail = ", and so do its explanations unless they are the target"
    elif kept or aimed:
        tail = "; its explanations hold as well as before"
    if clean == summary.WORSE:
        tail += "; without attack it predicts worse"
    return f"{other} holds up better under attack than {reference}{tail}"


def balance_words(changes: Sequence[Change]) -> str:
    """How many measures got better, and the numbers of those that did not."""
    count = sum(change.kind == summary.BETTER for change in changes)
    parts = [f"{count} of {len(changes)} measures got better"]
    for kind in (summary.SAME, summary.WORSE):
        others = [f"{c.title} ({' → '.join(c.texts)})" for c in changes if c.kind == kind]
        if others:
            parts.append(f"{kind.capitalize()}: {'; '.join(others)}")
    return ". ".join(parts) + "."


def table(changes: Sequence[Change], reference: str, other: str) -> Table:
    """The changes as a table, one measure a row."""
    columns = [Column(title) for title in ("", reference, other, "chance", "")]
    rows: list[list[Cell]] = [
        [f"{change.title} ({change.name})", *change.texts, summary.percent(change.chance, 1), change.kind]
        for change in changes
    ]
    return Table(f"What changed from {reference} to {other}", columns, rows)


def output_share(certificates: Mapping[str, Mapping[str, Any]], name: str, path: str) -> float | None:
    """A share of a model's output layer, `DEFINITION_SHARE` or `TOPK_SHARE`; None where it is not known."""
    share = look_up(_output_layer(certificates, name), path)
    return float(share) if isinstance(share, int | float) else None


def _output_layer(certificates: Mapping[str, Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    layers = (certificates.get(name) or {}).get("layers")
    last = layers[-1] if isinstance(layers, list) and layers else {}
    return last if isinstance(last, Mapping) else {}


def headline(report: Report) -> str:
    """The verdict in a few words."""
    reference, *other = _pair(report)
    if not other:
        return summary.verdict(reference, (report.explorer or {}).get("classes"))
    return _verdict(changes_in(report), str(reference.get("name")), str(other[0].get("name")))


def changes_in(report: Report) -> list[Change]:
    """The measures of the reference and of the model compared with it; empty if there is only one model."""
    reference, *other = _pair(report)
    return _changes(reference, other[0], report.certificates, report.intervals) if other else []


def meaning(report: Report) -> list[str]:
    """The headline numbers in sentences."""
    return summary.sentences(_pair(report), report.intervals, (report.explorer or {}).get("classes"))


def _pair(report: Report) -> list[summary.Record]:
    """The record of the reference, and of the model that is compared with it: the last other one, if any."""
    records = report.records
    reference = next((record for record in records if record.get("name") == report.reference), records[0])
    return [reference, *[record for record in records if record is not reference][-1:]]


def attack_words(record: summary.Record, several: bool = True) -> str:
    """What the attack may do, from its budget; `several`: whether more than one model is attacked."""
    threat: Mapping[str, Any] = record.get("threat") or {}
    budget, name = threat.get("budget"), str(threat.get("name", ""))
    budget = budget if isinstance(budget, Mapping) else {}
    attack = make_attack(name) if name in THREATS else None
    who = {"test": "test", "val": "validation"}.get(str(budget.get("targets")), "tested")
    nodes, edges, steps = (budget.get(name) or 0 for name in ("nodes", "edges", "steps"))
    did, what = [], "what it adds"
    if nodes:
        new = "1 fake node and joins it" if nodes == 1 else f"{nodes} fake nodes and joins each"
        did.append(f"adds {new} to {edges} {who} node{_plural(edges)}")
    elif edges:
        removes = attack is None or attack.removes_edges  # if unknown, suppose that it does
        verb = "adds or removes" if removes else "adds"
        did.append(f"{verb} {edges} edge{_plural(edges)} between {who} nodes")
        what = "what it changes" if removes else what
    if budget.get("radius"):
        what = "what it changes"
        share = summary.percent(budget.get("rows") or 0)
        did.append(f"moves the features of {share} of the {who} nodes by at most {budget['radius']}")
    if not did:
        return "The record does not say what the attack may do."
    if steps:
        restarts = budget.get("restarts") or 1
        search = f"in {steps} steps" + (f", {restarts} times over" if restarts > 1 else "")
        tail = f" It knows the model and tunes {what} {search} to do the most harm."
    elif attack is not None and attack.follows_gradients:
        tail = f" It knows the model and tunes {what} in every way there is; what does the most harm counts."
    else:
        tail = f" It does not search: {what} is random."
    chosen = attack is None or attack.endpoints_depend_on_model or attack.budget.restarts > 1
    where = "; where it is spent is chosen for each" if chosen else " and the same places to attack"
    fair = f" Every model gets the same budget{where}." if several else ""
    return f"The {name} attack {' and '.join(did)}.{tail}{fair} {weak_search_note(name)}".rstrip()


def _plural(count: Any) -> str:
    return "" if count == 1 else "s"


@typed
def missing(report: Report) -> list[str]:
    """What the page cannot show, and the command that adds it."""
    out = list(report.notes)
    if report.subgraph is None:
        text = "Attention before and after is not in this record. Give the models too:"
        out.append(f"{text} fgai report GAT=gat.safetensors FGAI=fgai.safetensors")
    elif report.whatif is None:
        out.append("What if? is not on this page: Python computes it. Run fgai explore.")
    if report.distribution is None:
        out.append("Per-node overlaps are not in this record. Evaluate with --per-node.")
    if not any(look_up(record, "metrics.f_slope") is not None for record in report.records):
        out.append("F-curves are not in this record. Evaluate with --curves.")
    if not report.certificates:
        out.append("Nothing was certified. Add a record made by fgai certify -o.")
    if not report.histories and report.subgraph is None:
        out.append("Loss curves are not in this record. Give the models too.")
    return out
