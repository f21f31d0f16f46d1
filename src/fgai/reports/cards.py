"""The headline numbers: one card per question, one bar per model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fgai.reports.balance import kind_of
from fgai.reports.document import Report
from fgai.reports.numbers import number, percent, score, score_of, score_phrase, signed
from fgai.reports.sections import esc
from fgai.reports.words import changes_in, size_of


class Bar(NamedTuple):
    """One model on a card: how long the bar is, where its tick stands (both 0 to 1), and the number."""

    name: str
    length: float | None
    value: str
    tick: float | None = None


class Card(NamedTuple):
    """One question with an answer per model, and what chance would answer.

    `key` names the measures whose change is marked.
    """

    key: str
    title: str
    about: str
    bars: list[Bar]
    chance: str = ""


def cards(report: Report) -> str:
    """All cards that have an answer, as HTML."""
    made = (
        _predictions(report), _explanations(report), _output_shift(report), _same(report), _decides(report),
        _proved(report), _injected(report),
    )  # fmt: skip
    found = changes_in(report)
    shown = "".join(
        _html(card, report.names, [kind_of(found, key) for key in card.key.split()])
        for card in made
        if any(b.length is not None for b in card.bars)
    )
    return f'<div class="cards">{shown}</div>'


def _predictions(report: Report) -> Card:
    bars = []
    for record, name in zip(report.records, report.names, strict=True):
        before, after = score(record, "clean"), score(record, "attacked")
        bars.append(Bar(name, after, f"{percent(before)} → {percent(after)}", before))
    said = score_phrase(report.records[0])
    return Card(
        "attacked",
        "Predictions that survive",
        f"{said[0].upper()}{said[1:]}: before the attack (tick) and after it (bar).",
        bars,
        _chance(number(report.records[0], f"{score_of(report.records[0])}.chance"), percent),
    )


def _explanations(report: Report) -> Card:
    k = size_of(report.records[0])
    bars = []
    for record, name in zip(report.records, report.names, strict=True):
        kept, aimed = (number(record, f"overlap_touched.{key}.all") for key in ("prediction", "explanation"))
        shown = [f"{k * share:.1f}" for share in (kept, aimed) if share is not None]
        value = f"{' and '.join(shown)} of {k}" if shown else "–"
        bars.append(Bar(name, kept if aimed is None else aimed, value, kept))
    return Card(
        "kept aimed",
        "Explanations that survive",
        f"Of the {k} neighbours a node attends to most, how many stay: when the attack aims at predictions"
        " (tick), and when it aims at the explanation itself (bar). Nodes in its reach.",
        bars,
        _chance(
            number(report.records[0], "overlap_touched.chance.all"), lambda share: f"{k * share:.1f} of {k}"
        ),
    )


def _output_shift(report: Report) -> Card:
    values = [number(record, "g_tvd.rel") for record in report.records]
    most = max(1.0, *(v for v in values if v is not None), 1.0)
    return Card(
        "moved",
        "How far outputs move",
        "Change of the outputs under attack, in units of their own spread: at 1"
        f" ({'tick' if most > 1 else 'a full bar'}) they move as far as classes differ. Shorter is better.",
        [
            Bar(
                name,
                None if v is None else v / most,
                signed(v, "#.2g").rstrip("."),
                1 / most if most > 1 else None,
            )
            for name, v in zip(report.names, values, strict=True)
        ],
    )


def _same(report: Report) -> Card:
    k = size_of(report.records[0])
    bars = []
    for record, name in zip(report.records, report.names, strict=True):
        if name == report.reference:
            continue
        shared = number(record, "similarity.overlap.all")
        bars.append(Bar(name, shared, "–" if shared is None else f"{k * shared:.1f} of {k}"))
    return Card(
        "same",
        f"Same reasons as {report.reference}",
        f"Of the {k} neighbours {report.reference} attends to most, how many are also among the"
        f" {k} strongest here, without any attack.",
        bars,
        _chance(number(report.records[0], "overlap.chance.all"), lambda share: f"{k * share:.1f} of {k}"),
    )


def _decides(report: Report) -> Card:
    pairs = [
        [number(record, f"f_slope.node.{when}.gap") for when in ("clean", "attacked")]
        for record in report.records
    ]
    most = max(1.0, *(v for p in pairs for v in p if v is not None), 1.0)
    bars = []
    for name, (before, after) in zip(report.names, pairs, strict=True):
        length, tick = (None if v is None else max(0.0, v) / most for v in (after, before))
        value = f"{signed(before, '.2f')} → {signed(after, '.2f')}"
        bars.append(Bar(name, length, value, tick))
    return Card(
        "slope_attacked",
        "Attention that decides",
        "How much more it hurts to remove the strongest edges than the weakest (F-slope gap): before the"
        f" attack (tick) and after it (bar). A full bar is {signed(most, '.3g')}; a random order gets 0.",
        bars,
    )


def _proved(report: Report) -> Card:
    bars, words = [], ""
    for name in report.names:
        proof = report.certificates.get(name) or {}
        layers: Sequence[dict[str, object]] = proof.get("layers") or []
        share = layers[-1].get("topk_share") if layers else None
        share = float(share) if isinstance(share, int | float) else None
        bars.append(Bar(name, share, percent(share, 1)))
        if layers:
            words = (
                f"Nodes whose top {proof.get('k2')} at the output layer cannot change while its explanation"
                f" vector moves by at most {proof.get('radius')} ({proof.get('norm')}), its values fixed."
            )
    return Card("proved", "Explanations that are proved", words, bars)


def _injected(report: Report) -> Card:
    bars, words = [], ""
    for name in report.names:
        told = {str(one.get("where")): one for one in report.injections.get(name) or [] if one.get("known")}
        shares = [told[where]["share"] if where in told else None for where in ("direct", "any")]
        shown = [percent(share, 1) for share in shares if share is not None]
        bars.append(Bar(name, shares[1], " and ".join(shown) or "–", shares[0]))
        if told:
            count = next(iter(told.values())).get("neighbours")
            words = (
                "Nodes whose class provably stays, whatever features new nodes have: if the node itself gains"
                f" {count} injected neighbour (tick), and if every node does (bar)."
            )
    return Card("injected", "Classes no injected node can change", words, bars)


def _html(card: Card, names: list[str], kinds: list[str | None]) -> str:
    rows = ""
    for bar in card.bars:
        colour = names.index(bar.name) % 7
        length = 100 * min(1.0, max(0.0, bar.length or 0.0))
        tick = ""
        if bar.tick is not None:
            tick = f'<span class="tick" style="left:{100 * min(1.0, max(0.0, bar.tick)):.1f}%"></span>'
        rows += (
            f'<div class="bar"><span class="bar-name">{esc(bar.name)}</span>'
            f'<span class="bar-value">{esc(bar.value)}</span>'
            f'<span class="track"><span class="fill m{colour}" style="width:{length:.1f}%"></span>{tick}'
            "</span></div>"
        )
    marks = "".join(
        f'<span class="mark {kind.partition(" ")[0]}">{kind}</span>'
        for kind in dict.fromkeys(kinds)
        if kind is not None
    )
    head = f'<h3>{esc(card.title)}<span class="marks">{marks}</span></h3>'
    level = f'<p class="chance">{esc(card.chance)}</p>' if card.chance else ""
    return f'<article class="card">{head}<p>{esc(card.about)}</p>{rows}{level}</article>'


def _chance(level: float | None, words: Callable[[float], str]) -> str:
    """What guessing would get, as a card says it."""
    return "" if level is None else f"chance: {words(level)}"
