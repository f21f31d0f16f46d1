"""Sentences: whether it helped, what the attack was, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fgai.attacks import THREATS, doubt, make_attack
from fgai.records import look_up
from fgai.reports.balance import Change, changes, verdict
from fgai.reports.document import Report
from fgai.reports.noise import FALL, Intervals, interval_in
from fgai.reports.numbers import Record, number, percent, score, score_of, share_phrase
from fgai.typed import typed


def headline(report: Report) -> str:
    """In a few words: did it help?"""
    reference, other = pair(report.records, report.reference)
    if other is None:
        return "How far can its attention be trusted?"
    return verdict(changes_in(report), str(reference.get("name")), str(other.get("name")))


def changes_in(report: Report) -> list[Change]:
    """What changed from the reference to the model compared with it; nothing where there is only one."""
    reference, other = pair(report.records, report.reference)
    return [] if other is None else changes(reference, other, report.certificates, report.intervals)


def meaning(report: Report) -> list[str]:
    """What the headline numbers mean, in plain sentences."""
    reference, other = pair(report.records, report.reference)
    shown = [reference] if other is None else [reference, other]
    out, parts = [], [words for record in shown if (words := _fall(record, report.intervals))]
    if parts:
        same = "Under the same attack" if len(parts) > 1 else "Under attack"
        level = number(reference, f"{score_of(reference)}.chance")
        chance = "" if level is None else f" (chance: {percent(level)})"
        out.append(f"{same}, {' and '.join(parts)} {share_phrase(reference)}{chance}.")
    if missed := _missed(report, shown):
        out.append(missed)
    k, told = size_of(reference), []
    for key, when in (("prediction", "aims at predictions"), ("explanation", "aims at explanations")):
        kept = [(r.get("name"), number(r, f"overlap_touched.{key}.all")) for r in shown]
        stay = [f"{k * share:.2f} in {name}" for name, share in kept if share is not None]
        if stay:
            told.append(f"{' and '.join(stay)} when the attack {when}")
    if told:
        level = number(reference, "overlap_touched.chance.all")
        chance = "" if level is None else f" By chance {k * level:.2f} would."
        out.append(f"Of the {k} neighbours that explain a node there stay {', and '.join(told)}.{chance}")
    if sharp := _sharpness(shown):
        out.append(sharp)
    return out


def _missed(report: Report, records: Sequence[Record]) -> str:
    """How many nodes of the rarest class each model misses, where classes are imbalanced."""
    found = [look_up(record.get("metrics") or {}, "recall") for record in records]
    support = look_up(records[0].get("metrics") or {}, "recall.support") or []
    if score_of(records[0]) != "balanced_accuracy" or not any(support) or not all(found):
        return ""
    count, rare = min((count, place) for place, count in enumerate(support) if count)
    names, parts = (report.explorer or {}).get("classes") or [], []
    for record, shares in zip(records, found, strict=True):
        before, after = (round(count * (1 - shares[view][rare])) for view in ("clean", "attacked"))
        parts.append(f"{record.get('name')} misses {before} without the attack and {after} under it")
    label = names[rare] if rare < len(names) else rare
    return f"Of the {count} tested nodes of class {label}, the rarest, {' and '.join(parts)}."


def _sharpness(records: Sequence[Record]) -> str:
    """What the sharpness of models means: what the strongest neighbour gets, and if all got the same."""
    uniform, parts = number(records[0], "top_share.uniform.all"), []
    for record in records:
        top, sharp = number(record, "top_share.clean.all"), number(record, "sharpness.clean.all")
        if top is not None and sharp is not None:
            parts.append(f"{percent(top)} of its attention in {record.get('name')} (sharpness {sharp:#.2g})")
    if not parts or uniform is None:
        return ""
    return f"A node's strongest neighbour gets {' and '.join(parts)}; {percent(uniform)} if all got the same."


def _fall(record: Record, intervals: Intervals) -> str:
    """What becomes of a model's score under attack; a fall or rise within the noise is called none."""
    before, after = score(record, "clean"), score(record, "attacked")
    if before is None or after is None:
        return ""
    name, ends = record.get("name"), (percent(before), percent(after))
    if ends[0] == ends[1]:
        return f"{name} stays at {ends[1]}"
    interval = interval_in(intervals, str(name), FALL)
    if interval is not None and not interval.exceeds_noise:
        return f"{name} goes from {ends[0]} to {ends[1]}, which may be noise,"
    return f"{name} {'falls' if after < before else 'rises'} from {ends[0]} to {ends[1]}"


def pair(records: Sequence[Record], name: str) -> tuple[Record, Record | None]:
    """The reference, and the model that is compared with it: the last other one."""
    reference = next((record for record in records if record.get("name") == name), records[0])
    others = [record for record in records if record is not reference]
    return reference, others[-1] if others else None


def size_of(record: Record) -> int:
    """K, the neighbours in an explanation."""
    k = (record.get("config") or {}).get("k", 5)
    return k if isinstance(k, int) else 5


def attack_words(record: Record) -> str:
    """What the attack may do, from its budget."""
    threat: Mapping[str, Any] = record.get("threat") or {}
    found = threat.get("budget")
    budget: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    who = {"test": "test", "val": "validation"}.get(str(budget.get("targets")), "tested")
    nodes, edges, steps = (budget.get(name) or 0 for name in ("nodes", "edges", "steps"))
    did, what = [], "what it adds"
    if nodes:
        did.append(f"adds {nodes} fake nodes and joins each to {edges} {who} nodes")
    elif edges:
        removes = removes_edges(str(threat.get("name")))
        did.append(f"{'adds or removes' if removes else 'adds'} {edges} edges between {who} nodes")
        what = "what it changes" if removes else what
    if budget.get("radius"):
        what = "what it changes"
        share = percent(budget.get("rows") or 0)
        did.append(f"moves the features of {share} of the {who} nodes by at most {budget['radius']}")
    if not did:
        return "The record does not say what the attack may do."
    restarts = budget.get("restarts") or 1
    search = f"in {steps} steps" + (f", {restarts} times over" if restarts > 1 else "")
    name = str(threat.get("name", ""))
    if steps:
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


def removes_edges(threat: str) -> bool:
    """Whether a threat removes edges, too; of one whose name is not known it must be supposed."""
    return threat not in THREATS or THREATS[threat].attack.removes


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
    if not any(_curves(record) for record in report.records):
        out.append("F-curves are not in this record. Evaluate with --curves.")
    if not report.certificates:
        out.append("Nothing was certified. Add a record made by fgai certify -o.")
    if not report.histories:
        out.append("Loss curves are not in this record. Give the models too.")
    return out


def _curves(record: Record) -> bool:
    metrics = record.get("metrics")
    return isinstance(metrics, Mapping) and "f_slope" in metrics
