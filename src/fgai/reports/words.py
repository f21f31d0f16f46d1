"""Sentences: whether it helped, what the attack was, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fgai.attacks import THREATS, doubt, make_attack
from fgai.evaluation.paired import Interval
from fgai.records import Cell, Column, Table, look_up
from fgai.reports.build import Report
from fgai.reports.numbers import (
    Record,
    _heading_of,
    _number,
    _percent,
    _score,
    _score_of,
    _share_phrase,
    _signed,
)
from fgai.reports.parts import FALL, Intervals, _interval_in
from fgai.typed import typed

SLIGHT = 0.02  # slopes, and shares not known node by node, count as equal if they differ by no more
RATIO = 1.1  # so do distances that differ by no more than this factor
BETTER, SAME, WORSE = "better", "as before", "worse"
RULE = (
    "As before: shares whose difference is within the noise over nodes (paired 95 % interval), slopes within"
    f" {SLIGHT}, distances within a factor of {RATIO}. One run, one seed."
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One measure of the reference (`before`) and of another model (`after`).

    Attributes:
        key: of the measure.
        name: as the tables call it.
        title: in plain words.
        before: value of the reference.
        after: value of the other model.
        texts: both, as printed.
        kind: `better`, `as before` or `worse`.
        chance: what a random ranking or the most frequent class gets, or None.
    """

    key: str
    name: str
    title: str
    before: float
    after: float
    texts: tuple[str, str]
    kind: str
    chance: float | None = None


@dataclass(frozen=True)
class _Measure:
    key: str
    name: str
    title: str
    path: str
    form: str  # "share", "distance" or "slope"
    chance: str = ""  # path of what chance gets

    def text(self, value: float) -> str:
        if self.form == "share":
            return _percent(value, 1)
        return _signed(value, "#.2g" if self.form == "distance" else ".2f").rstrip(".")

    def kind(self, before: float, after: float, interval: Interval | None) -> str:
        if interval is not None:
            return SAME if not interval.exceeds_noise else BETTER if interval.low > 0 else WORSE
        if self.form != "distance":
            gain = after - before
            return SAME if abs(gain) <= SLIGHT + 1e-9 else BETTER if gain > 0 else WORSE
        if after * RATIO >= before and before * RATIO >= after:
            return SAME
        return BETTER if after < before else WORSE


def _kept(key: str, words: str, attack: str) -> _Measure:
    path = "overlap_touched.{}.all"
    return _Measure(key, "overlap", words, path.format(attack), "share", path.format("chance"))


MEASURES = (
    _Measure("attacked", "F1 attacked", "right under attack", "f1.attacked", "share", "f1.chance"),
    _Measure("clean", "F1", "right without attack", "f1.clean", "share", "f1.chance"),
    _Measure("moved", "g-TVD", "how far predictions move", "g_tvd.rel", "distance"),
    _Measure("attention", "g-JSD", "how far attention moves", "g_jsd.all", "distance"),
    _kept("kept", "top {k} kept, attack on predictions", "prediction"),
    _kept("aimed", "top {k} kept, attack on explanations", "explanation"),
    _Measure("slope", "F-slope gap", "attention decides", "f_slope.node.clean.gap", "slope"),
    _Measure("slope_attacked", "F-slope gap", "… under attack", "f_slope.node.attacked.gap", "slope"),
    _Measure("proved", "certified", "top {k} proved to stay", "", "share"),
    _Measure("definition", "Definition 1", "all four properties", "definition.r01.all_four.last", "share"),
)


def _changes(
    reference: Record,
    other: Record,
    certificates: Mapping[str, Mapping[str, Any]] | None = None,
    intervals: Intervals | None = None,
) -> list[Change]:
    """Every measure both records hold; the certified share from the certificates, output layer."""
    k, score, out = (reference.get("config") or {}).get("k", 5), f"{_score_of(reference)}.", []
    for measure in MEASURES:
        path, chance = (text.replace("f1.", score) for text in (measure.path, measure.chance))
        before, after = (
            _number(record, path) if path else proved_share(certificates or {}, str(record.get("name")))
            for record in (reference, other)
        )
        if before is None or after is None:
            continue
        interval = _interval_in(intervals, str(other.get("name")), measure.key)
        out.append(
            Change(
                key=measure.key,
                name=measure.name.replace("F1", _heading_of(reference)),
                title=measure.title.format(k=k),
                before=before,
                after=after,
                texts=(measure.text(before), measure.text(after)),
                kind=measure.kind(before, after, interval),
                chance=_number(reference, chance) if chance else None,
            )
        )
    return out


def _kind_of(found: Sequence[Change], key: str) -> str | None:
    return next((change.kind for change in found if change.key == key), None)


def _verdict(found: Sequence[Change], reference: str, other: str) -> str:
    attacked, clean = _kind_of(found, "attacked"), _kind_of(found, "clean")
    kept, aimed = _kind_of(found, "kept"), _kind_of(found, "aimed")
    if attacked is None:
        return f"{other} beside {reference}"
    if attacked == WORSE:
        return f"{other} did not help here: {reference} holds better under attack"
    if attacked == SAME:
        if BETTER in (kept, aimed) and WORSE not in (kept, aimed):
            return f"Predictions hold alike; the explanations of {other} hold better"
        return f"{other} made no clear difference here"
    tail = _explanations(kept, aimed)
    if clean == WORSE:
        tail += "; without attack it predicts worse"
    return f"{other} holds up better under attack than {reference}{tail}"


def _explanations(kept: str | None, aimed: str | None) -> str:
    """How explanations hold when predictions are attacked, and when they are the target themselves."""
    if WORSE in (kept, aimed):
        return f", but its explanations hold less well{' when they are the target' if kept != WORSE else ''}"
    if aimed == BETTER or (kept == BETTER and aimed is None):
        return ", and so do its explanations"
    if kept == BETTER:
        return ", and so do its explanations unless they are the target"
    return "; its explanations hold as well as before" if (kept or aimed) else ""


def balance_words(found: Sequence[Change]) -> str:
    """How much got better, and what did not, with its numbers."""
    count = sum(change.kind == BETTER for change in found)
    parts = [f"{count} of {len(found)} measures got better"]
    for kind in (SAME, WORSE):
        held = [f"{c.title} ({' → '.join(c.texts)})" for c in found if c.kind == kind]
        if held:
            parts.append(f"{kind.capitalize()}: {'; '.join(held)}")
    return ". ".join(parts) + "."


def table(found: Sequence[Change], reference: str, other: str) -> Table:
    """The same as a table, one measure a row."""
    columns = [Column(""), Column(reference), Column(other), Column("chance"), Column("")]
    rows: list[list[Cell]] = [
        [f"{change.title} ({change.name})", *change.texts, _percent(change.chance, 1), change.kind]
        for change in found
    ]
    return Table(f"What changed from {reference} to {other}", columns, rows)


def proved_share(certificates: Mapping[str, Mapping[str, Any]], name: str) -> float | None:
    """Share of the nodes whose top-k is proved to stay at a model's output layer, None if unknown."""
    return _last_share(certificates, name, "topk_share")


def definition_share(certificates: Mapping[str, Mapping[str, Any]], name: str) -> float | None:
    """Share of the nodes with all four properties of Definition 1 at a model's output layer."""
    return _last_share(certificates, name, "definition.all_four")


def _last_share(certificates: Mapping[str, Mapping[str, Any]], name: str, path: str) -> float | None:
    """A share of the output layer; None where a document does not have it."""
    proof = certificates.get(name) if isinstance(certificates, Mapping) else None
    layers = proof.get("layers") if isinstance(proof, Mapping) else None
    last = layers[-1] if isinstance(layers, list | tuple) and layers else None
    share = look_up(last, path) if isinstance(last, Mapping) else None
    return float(share) if isinstance(share, int | float) else None


def headline(report: Report) -> str:
    """In a few words: did it help?"""
    reference, other = _pair(report.records, report.reference)
    if other is None:
        return "How far can its attention be trusted?"
    return _verdict(changes_in(report), str(reference.get("name")), str(other.get("name")))


def changes_in(report: Report) -> list[Change]:
    """What changed from the reference to the model compared with it; empty if there is only one model."""
    reference, other = _pair(report.records, report.reference)
    return [] if other is None else _changes(reference, other, report.certificates, report.intervals)


def meaning(report: Report) -> list[str]:
    """What the headline numbers mean, in plain sentences."""
    reference, other = _pair(report.records, report.reference)
    shown = [reference] if other is None else [reference, other]
    out, parts = [], [words for record in shown if (words := _fall(record, report.intervals))]
    if parts:
        same = "Under the same attack" if len(parts) > 1 else "Under attack"
        level = _number(reference, f"{_score_of(reference)}.chance")
        chance = "" if level is None else f" (chance: {_percent(level)})"
        out.append(f"{same}, {' and '.join(parts)} {_share_phrase(reference)}{chance}.")
    if missed := _missed(report, shown):
        out.append(missed)
    k, told = _size_of(reference), []
    for key, when in (("prediction", "aims at predictions"), ("explanation", "aims at explanations")):
        kept = [(r.get("name"), _number(r, f"overlap_touched.{key}.all")) for r in shown]
        stay = [f"{k * share:.2f} in {name}" for name, share in kept if share is not None]
        if stay:
            told.append(f"{' and '.join(stay)} when the attack {when}")
    if told:
        level = _number(reference, "overlap_touched.chance.all")
        chance = "" if level is None else f" By chance {k * level:.2f} would."
        out.append(f"Of the {k} neighbours that explain a node there stay {', and '.join(told)}.{chance}")
    if sharp := _sharpness(shown):
        out.append(sharp)
    return out


def _missed(report: Report, records: Sequence[Record]) -> str:
    """How many nodes of the rarest class each model misses, where classes are imbalanced."""
    found = [look_up(record.get("metrics") or {}, "recall") for record in records]
    support = look_up(records[0].get("metrics") or {}, "recall.support") or []
    if _score_of(records[0]) != "balanced_accuracy" or not any(support) or not all(found):
        return ""
    count, rare = min((count, place) for place, count in enumerate(support) if count)
    names, parts = (report.explorer or {}).get("classes") or [], []
    for record, shares in zip(records, found, strict=True):
        before, after = (round(count * (1 - shares[view][rare])) for view in ("clean", "attacked"))
        parts.append(f"{record.get('name')} misses {before} without the attack and {after} under it")
    label = names[rare] if rare < len(names) else rare
    return f"Of the {count} tested nodes of class {label}, the rarest, {' and '.join(parts)}."


def _sharpness(records: Sequence[Record]) -> str:
    """The share of the strongest neighbour, beside that of uniform attention."""
    uniform, parts = _number(records[0], "top_share.uniform.all"), []
    for record in records:
        top, sharp = _number(record, "top_share.clean.all"), _number(record, "sharpness.clean.all")
        if top is not None and sharp is not None:
            parts.append(f"{_percent(top)} of its attention in {record.get('name')} (sharpness {sharp:#.2g})")
    if not parts or uniform is None:
        return ""
    gets = f"A node's strongest neighbour gets {' and '.join(parts)}"
    return f"{gets}; {_percent(uniform)} if all got the same."


def _fall(record: Record, intervals: Intervals) -> str:
    """How a model's score changes under attack, and whether that may be noise."""
    before, after = _score(record, "clean"), _score(record, "attacked")
    if before is None or after is None:
        return ""
    name, ends = record.get("name"), (_percent(before), _percent(after))
    if ends[0] == ends[1]:
        return f"{name} stays at {ends[1]}"
    interval = _interval_in(intervals, str(name), FALL)
    if interval is not None and not interval.exceeds_noise:
        return f"{name} goes from {ends[0]} to {ends[1]}, which may be noise,"
    return f"{name} {'falls' if after < before else 'rises'} from {ends[0]} to {ends[1]}"


def _pair(records: Sequence[Record], name: str) -> tuple[Record, Record | None]:
    """The reference, and the model that is compared with it: the last other one."""
    reference = next((record for record in records if record.get("name") == name), records[0])
    others = [record for record in records if record is not reference]
    return reference, others[-1] if others else None


def _size_of(record: Record) -> int:
    k = (record.get("config") or {}).get("k", 5)
    return k if isinstance(k, int) else 5


def attack_words(record: Record) -> str:
    """What the attack may do, from its budget."""
    threat: Mapping[str, Any] = record.get("threat") or {}
    budget = threat.get("budget")
    budget = budget if isinstance(budget, Mapping) else {}
    name = str(threat.get("name", ""))
    who = {"test": "test", "val": "validation"}.get(str(budget.get("targets")), "tested")
    nodes, edges, steps = (budget.get(name) or 0 for name in ("nodes", "edges", "steps"))
    did, what = [], "what it adds"
    if nodes:
        did.append(f"adds {nodes} fake nodes and joins each to {edges} {who} nodes")
    elif edges:
        removes = name not in THREATS or THREATS[name].attack.removes  # if unknown, suppose that it does
        did.append(f"{'adds or removes' if removes else 'adds'} {edges} edges between {who} nodes")
        what = "what it changes" if removes else what
    if budget.get("radius"):
        what = "what it changes"
        share = _percent(budget.get("rows") or 0)
        did.append(f"moves the features of {share} of the {who} nodes by at most {budget['radius']}")
    if not did:
        return "The record does not say what the attack may do."
    if steps:
        restarts = budget.get("restarts") or 1
        search = f"in {steps} steps" + (f", {restarts} times over" if restarts > 1 else "")
        tail = f" It knows the model and tunes {what} {search} to do the most harm."
    elif name in THREATS and make_attack(name).searches:
        tail = f" It knows the model and tunes {what} in every way there is; what does the most harm counts."
    else:
        tail = f" It does not search: {what} is random."
    aims = name not in THREATS or make_attack(name).aims
    where = "; where it is spent is chosen for each" if aims else " and the same places to attack"
    return (
        f"The {name} attack {' and '.join(did)}.{tail} Every model gets the same budget{where}. {doubt(name)}"
    ).rstrip()


@typed
def missing(report: Report) -> list[str]:
    """What the page cannot show, and how to get it."""
    out = list(report.notes)
    if report.subgraph is None:
        out.append(
            "Attention before and after is not in this record. Give the models too:"
            " fgai report GAT=gat.safetensors FGAI=fgai.safetensors"
        )
    if report.distribution is None:
        out.append("Per-node overlaps are not in this record. Evaluate with --per-node.")
    if not any(look_up(record, "metrics.f_slope") is not None for record in report.records):
        out.append("F-curves are not in this record. Evaluate with --curves.")
    if not report.certificates:
        out.append("Nothing was certified. Add a record made by fgai certify -o.")
    if not report.histories:
        out.append("Loss curves are not in this record. Give the models too.")
    return out
