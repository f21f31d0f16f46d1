"""What got better, stayed as it was, or got worse: each measure once, judged by one rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fgai.evaluation.paired import Interval
from fgai.records import Cell, Column, Table
from fgai.reports.noise import Intervals, interval_in
from fgai.reports.numbers import Record, heading_of, number, percent, score_of, signed

SLIGHT = 0.02
"""Slopes, and shares that are not known node by node, count as the same where they differ by no more."""
RATIO = 1.1
"""So do distances that differ by no more than this factor."""
BETTER, SAME, WORSE = "better", "as before", "worse"
RULE = (
    "As before: shares whose difference is within the noise over nodes (paired 95 % interval), slopes within"
    f" {SLIGHT}, distances within a factor of {RATIO}. One run, one seed."
)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One measure of two models.

    Attributes:
        key: of the measure.
        name: as the tables call it.
        title: in plain words.
        before: of the reference.
        after: of the other model.
        texts: both, as printed.
        kind: `better`, `as before` or `worse`.
        chance: what a random ranking or the most frequent class gets, None where there is no such level.
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
            return percent(value, 1)
        return signed(value, "#.2g" if self.form == "distance" else ".2f").rstrip(".")

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
    """What stays of explanations under one attack."""
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
)


def changes(
    reference: Record,
    other: Record,
    certificates: Mapping[str, Mapping[str, Any]] | None = None,
    intervals: Intervals | None = None,
) -> list[Change]:
    """Every measure both records hold; the certified share from the certificates, output layer.

    Args:
        reference: the record of the model the others are compared with.
        other: the other model's.
        certificates: by the names of the records, as the report's document carries them.
        intervals: likewise; a share that has one is judged by it.
    """
    k = (reference.get("config") or {}).get("k", 5)
    out = []

    def scored(path: str) -> str:
        return path.replace("f1.", f"{score_of(reference)}.")

    for measure in MEASURES:
        path = scored(measure.path)
        values = [
            number(record, path) if path else _proved(record, certificates or {})
            for record in (reference, other)
        ]
        before, after = values
        if before is None or after is None:
            continue
        out.append(
            Change(
                key=measure.key,
                name=measure.name.replace("F1", heading_of(reference)),
                title=measure.title.format(k=k),
                before=before,
                after=after,
                texts=(measure.text(before), measure.text(after)),
                kind=measure.kind(before, after, interval_in(intervals, str(other.get("name")), measure.key)),
                chance=number(reference, scored(measure.chance)) if measure.chance else None,
            )
        )
    return out


def kind_of(found: Sequence[Change], key: str) -> str | None:
    """How one measure changed, None if it is not there."""
    return next((change.kind for change in found if change.key == key), None)


def verdict(found: Sequence[Change], reference: str, other: str) -> str:
    """In a few words: did it help, with predictions and with explanations?"""
    attacked, clean = kind_of(found, "attacked"), kind_of(found, "clean")
    kept, aimed = kind_of(found, "kept"), kind_of(found, "aimed")
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
        return ", but its explanations hold less well" + (
            " when they are the target" if kept != WORSE else ""
        )
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
        [
            f"{change.title} ({change.name})",
            *change.texts,
            None if change.chance is None else percent(change.chance, 1),
            change.kind,
        ]
        for change in found
    ]
    return Table(f"What changed from {reference} to {other}", columns, rows)


def _proved(record: Record, certificates: Mapping[str, Mapping[str, Any]]) -> float | None:
    layers = (certificates.get(str(record.get("name"))) or {}).get("layers") or []
    share = layers[-1].get("topk_share") if layers else None
    return float(share) if isinstance(share, int | float) else None
