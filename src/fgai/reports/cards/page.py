"""The page of a folder of cards: one file that opens from disk and needs no network."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fgai.errors import CheckpointError, InputError
from fgai.files import write_atomic
from fgai.records import Column, provenance_line
from fgai.reports.cards.card import Card, _form_of
from fgai.reports.numbers import _esc
from fgai.reports.template import asset, fill
from fgai.typed import typed
from fgai.version import __version__


@typed
@dataclass(frozen=True, kw_only=True)
class Listing:
    """The cards of a folder.

    Attributes:
        cards: by the name of their file, in order.
        unusable: why other files are no cards, by name.
    """

    cards: dict[str, Card]
    unusable: dict[str, str]


@typed
def read_cards(folder: Path | str) -> Listing:
    """Read every card of a folder, one `.json` file each; other files are listed with the reason.

    Raises:
        InputError: there is no such folder, or not one card in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"`folder` must be a folder of cards, got {folder}; `fgai card` writes cards")
    cards, unusable = {}, {}
    for path in sorted(folder.glob("*.json")):
        try:
            cards[path.name] = Card.load(path)
        except CheckpointError as error:
            unusable[path.name] = str(error)
    if not cards:
        raise InputError(f"there is no card in {folder}; `fgai card` writes cards")
    return Listing(cards=cards, unusable=unusable)


@typed
def write_page(listing: Listing, path: Path | str, *, title: str = "Explanation cards") -> Path:
    """Write the page in one step; a crash leaves the old one as it was.

    Cards share a table if they have the same data, threat, budget and protocol. Texts of cards are escaped.
    """
    groups: dict[str, dict[str, Card]] = {}
    for name, card in listing.cards.items():
        alike = [card.data["fingerprint"], card.threat["name"], card.threat.get("budget"), card.protocol]
        groups.setdefault(json.dumps(alike, sort_keys=True), {})[name] = card
    ordered = sorted(groups.values(), key=lambda group: _heading(next(iter(group.values()))))
    parts = {
        "title": _esc(title),
        "style": asset("style.css"),
        "own_style": asset("cards.css", "cards"),
        "count": str(len(listing.cards)),
        "unusable": _unusable(listing.unusable),
        "sections": "\n".join(_section(group) for group in ordered),
        "script": asset("cards.js", "cards"),
        "version": _esc(__version__),
    }
    write_atomic(Path(path), fill(asset("cards.html", "cards"), parts))
    return Path(path)


def _heading(card: Card) -> str:
    options = ", ".join(f"{name} {value}" for name, value in card.protocol.items())
    return f"{card.data['name']}, threat {card.threat['words']} ({options})"


def _section(group: dict[str, Card]) -> str:
    """One table of comparable cards, and the details of each below it."""
    columns = {
        path: Column(number["title"], _form_of(path), number["direction"])
        for card in group.values()
        for path, number in card.numbers.items()
        if number["value"] is not None
    }
    first = next(iter(group.values()))
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button" data-best="{column.better}">'
        f"{_esc(column.heading)}</button></th>"
        for column in (Column("model"), Column("class"), *columns.values())
    )
    rows = ""
    for file, card in _ranked(group, columns):
        name = f'<th scope="row"><a href="#{_anchor(file)}">{_esc(card.name)}</a></th>'
        cells = _cells(card, columns, "value")
        rows += f"<tr>{name}<td>{_esc(card.model['class'])}</td>{cells}</tr>"
    # chance is the same for all cards of a table
    chance = f'<th scope="row">chance</th><td></td>{_cells(first, columns, "chance")}'
    details = "".join(_details(file, card) for file, card in group.items())
    return (
        f"<section><h2>{_esc(_heading(first))}</h2>"
        f'<div class="scroll"><table class="board"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody><tfoot><tr>{chance}</tr></tfoot></table></div>{details}</section>"
    )


def _ranked(group: dict[str, Card], columns: dict[str, Column]) -> Sequence[tuple[str, Card]]:
    """Cards by the first number under attack, the best first; those without it last."""
    path = next((path for path in columns if path.endswith(".attacked")), next(iter(columns), ""))
    sign = -1.0 if columns and columns[path].better == "higher" else 1.0

    def rank(entry: tuple[str, Card]) -> tuple[bool, float, str]:
        value = entry[1].numbers.get(path, {}).get("value")
        return value is None, sign * (value or 0.0), entry[0]

    return sorted(group.items(), key=rank)


def _cells(card: Card, columns: dict[str, Column], part: str) -> str:
    cells = ""
    for path, column in columns.items():
        value = card.numbers.get(path, {}).get(part)
        mark = "" if value is None else f' data-value="{value!r}"'
        cells += f"<td{mark}>{_esc(column.text(value))}</td>"
    return cells


def _details(file: str, card: Card) -> str:
    (table,) = card.tables()
    facts: dict[str, Any] = {
        "file": file,
        "model": card.model,
        "fingerprint": card.data["fingerprint"],
        "versions": card.version,
        "evidence": provenance_line(card.provenance) or "none: the record is of an older fgai",
    }
    lines = [f"<li>{_esc(name)}: {_esc(value)}</li>" for name, value in facts.items()]
    lines += [f"<li>{_esc(note)}</li>" for note in table.notes]
    return (
        f'<details class="card" id="{_anchor(file)}"><summary>{_esc(card.name)}</summary>'
        f"<ul>{''.join(lines)}</ul></details>"
    )


def _anchor(file: str) -> str:
    """A unique identifier that is valid in addresses and attributes."""
    stem = file.removesuffix(".json")
    return "card-" + re.sub(r"[^A-Za-z0-9_-]", lambda letter: f".{ord(letter[0]):x}.", stem)


def _unusable(reasons: dict[str, str]) -> str:
    lines = "".join(f"<li>{_esc(name)}: {_esc(reason)}</li>" for name, reason in reasons.items())
    summary = f"<summary>{len(reasons)} files are no usable cards</summary>"
    return lines and f'<details class="notice">{summary}<ul>{lines}</ul></details>'
