"""Sentences: whether it helped, what the attack was, what is missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fgai.report.document import Report
from fgai.report.numbers import Record, number, percent

SLIGHT = 0.01
"""A difference below this is called none."""
COST = 0.02
"""A loss of clean F1 above this is named."""


def verdict(records: Sequence[Record], reference: str) -> str:
    """In a few words: did it help?"""
    base, twin = pair(records, reference)
    if twin is None:
        return "How far can its attention be trusted?"
    before, after = number(base, "f1.attacked"), number(twin, "f1.attacked")
    kept = [number(record, "overlap_touched.explanation.all") for record in (base, twin)]
    if before is None or after is None:
        return f"{twin.get('name')} beside {base.get('name')}"
    gain = 0.0 if kept[0] is None or kept[1] is None else kept[1] - kept[0]
    steadier = gain > SLIGHT
    name = twin.get("name")
    if after > before + SLIGHT:
        tail = ", and so do its explanations" if steadier else ""
        tail = ", but its explanations do not" if gain < -SLIGHT / 2 else tail
        clean = [number(record, "f1.clean") for record in (base, twin)]
        if clean[0] is not None and clean[1] is not None and clean[1] < clean[0] - COST:
            tail += ", and predicts worse without one" if tail else ", but predicts worse without one"
        return f"{name} holds up better under attack than {base.get('name')}{tail}"
    if after < before - SLIGHT:
        return f"{name} did not help here: {base.get('name')} holds better under attack"
    if steadier:
        return f"Predictions hold alike; the explanations of {name} hold better"
    return f"{name} made no clear difference here"


def meaning(records: Sequence[Record], reference: str) -> list[str]:
    """What the headline numbers mean, in plain sentences."""
    base, twin = pair(records, reference)
    shown = [base] if twin is None else [base, twin]
    out, parts = [], []
    for record in shown:
        before, after = number(record, "f1.clean"), number(record, "f1.attacked")
        if before is not None and after is not None:
            verb = "falls" if after < before - 0.005 else "stays" if after <= before + 0.005 else "rises"
            way = f"at {percent(after)}" if verb == "stays" else f"from {percent(before)} to {percent(after)}"
            parts.append(f"{record.get('name')} {verb} {way}")
    if parts:
        same = "Under the same attack" if len(parts) > 1 else "Under attack"
        out.append(f"{same}, {' and '.join(parts)} of the tested nodes classified right.")
    k = size_of(base)
    kept = [(record.get("name"), number(record, "overlap_touched.explanation.all")) for record in shown]
    told = [f"{k * share:.1f} in {name}" for name, share in kept if share is not None]
    if told:
        out.append(
            f"Of the {k} neighbours that explain a node, an attack on the explanation leaves"
            f" {' and '.join(told)}."
        )
    return out


def pair(records: Sequence[Record], reference: str) -> tuple[Record, Record | None]:
    """The reference, and the model that is compared with it: the last other one."""
    base = next((record for record in records if record.get("name") == reference), records[0])
    others = [record for record in records if record is not base]
    return base, others[-1] if others else None


def size_of(record: Record) -> int:
    """K, the neighbours in an explanation."""
    k = (record.get("config") or {}).get("k", 5)
    return k if isinstance(k, int) else 5


def attack_words(record: Record) -> str:
    """What the attack may do, from its budget."""
    threat: Mapping[str, Any] = record.get("threat") or {}
    budget: Mapping[str, Any] = threat.get("budget") or {}
    who = {"test": "test", "val": "validation"}.get(str(budget.get("targets")), "tested")
    nodes, edges, steps = (budget.get(name) or 0 for name in ("nodes", "edges", "steps"))
    did = []
    if nodes:
        did.append(f"adds {nodes} fake nodes and joins each to {edges} {who} nodes")
    elif edges:
        did.append(f"adds {edges} edges between {who} nodes")
    if budget.get("radius"):
        share = percent(budget.get("rows") or 0)
        did.append(f"moves the features of {share} of the {who} nodes by at most {budget['radius']}")
    if not did:
        return "The record does not say what the attack may do."
    restarts = budget.get("restarts") or 1
    search = f"in {steps} steps" + (f", {restarts} times over" if restarts > 1 else "")
    tail = (
        f" It knows the model and tunes what it adds {search} to do the most harm."
        if steps
        else " It does not search: what it adds is random."
    )
    return (
        f"The {threat.get('name', '')} attack {' and '.join(did)}.{tail} Every model gets the same budget"
        " and the same places to attack."
    )


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
