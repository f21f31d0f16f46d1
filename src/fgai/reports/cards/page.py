"""The leaderboard: every card of a folder on one page that opens from disk and needs no network."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from fgai.errors import CheckpointError, InputError
from fgai.files import write_atomic
from fgai.records import Column, provenance_line
from fgai.reports.cards.card import Card, _form_of
from fgai.reports.page import _esc
from fgai.typed import typed
from fgai.version import __version__


@typed
@dataclass(frozen=True, kw_only=True)
class Listing:
    """The cards of a folder.

    Attributes:
        cards: by the name of their file, in order.
        unusable: what is wrong with other files, by name.
    """

    cards: dict[str, Card]
    unusable: dict[str, str]


@typed
def read_cards(folder: Path | str) -> Listing:
    """Read every card of a folder, one `.json` file per entry; files that are none are named with the reason.

    Raises:
        InputError: there is no such folder, or not one card in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"`folder` must be a folder of cards, and {folder} is none; `fgai card` writes them")
    cards, unusable = {}, {}
    for path in sorted(folder.glob("*.json")):
        try:
            cards[path.name] = Card.load(path)
        except CheckpointError as error:
            unusable[path.name] = str(error)
    if not cards:
        raise InputError(f"there is no card in {folder}; `fgai card` writes them")
    return Listing(cards=cards, unusable=unusable)


@typed
def write_page(listing: Listing, path: Path | str, *, title: str = "Explanation cards") -> Path:
    """Write the page in one step; a crash leaves the old one as it was.

    Numbers stand in one table only where they were measured alike: same data, threat, budget and protocol.
    """
    path = Path(path)
    write_atomic(path, render(listing, title))
    return path


def render(listing: Listing, title: str) -> str:
    """Return the page as text; whatever comes from a card is text on it, never markup."""
    groups: dict[str, dict[str, Card]] = {}
    for name, found in listing.cards.items():
        groups.setdefault(_measured_alike(found), {})[name] = found
    ordered = sorted(groups.values(), key=lambda group: _heading(next(iter(group.values()))))
    sections = [_section(group) for group in ordered]
    parts = {
        "title": _esc(title),
        "style": (files("fgai.reports") / "assets" / "style.css").read_text(encoding="utf-8"),
        "own_style": _asset("cards.css"),
        "count": str(len(listing.cards)),
        "unusable": _unusable(listing.unusable),
        "sections": "\n".join(sections),
        "script": _asset("cards.js"),
        "version": _esc(__version__),
    }
    first, *pieces = _asset("cards.html").split("{{")
    filled = [piece.partition("}}") for piece in pieces]
    return first + "".join(parts[name.strip()] + rest for name, _, rest in filled)


def _measured_alike(card: Card) -> str:
    """What two cards must share for their numbers to be compared."""
    alike = [card.data["fingerprint"], card.threat["name"], card.threat.get("budget"), card.protocol]
    return json.dumps(alike, sort_keys=True)


def _heading(card: Card) -> str:
    options = ", ".join(f"{name} {value}" for name, value in card.protocol.items())
    return f"{card.data['name']}, threat {card.threat['words']} ({options})"


def _section(group: dict[str, Card]) -> str:
    """One table of cards that were measured alike, and below it what each says further."""
    columns = _columns(group.values())
    head = "".join(
        f'<th scope="col" aria-sort="none"><button type="button" data-best="{column.better}">'
        f"{_esc(column.heading)}</button></th>"
        for column in (Column("model"), Column("class"), *columns.values())
    )
    rows = "".join(_row(file, card, columns) for file, card in _ranked(group, columns))
    chance = _chance(next(iter(group.values())), columns)
    said = "".join(_details(file, card) for file, card in group.items())
    return (
        f"<section><h2>{_esc(_heading(next(iter(group.values()))))}</h2>"
        f'<div class="scroll"><table class="board"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody>{chance}</table></div>{said}</section>"
    )


def _columns(cards: Iterable[Card]) -> dict[str, Column]:
    """What any card has a number for, in the order of the first that has it."""
    return {
        path: Column(number["title"], _form_of(path), number["direction"])
        for card in cards
        for path, number in card.numbers.items()
        if number["value"] is not None
    }


def _ranked(group: dict[str, Card], columns: dict[str, Column]) -> Sequence[tuple[str, Card]]:
    """Cards by the first number under attack, the best first; those without it last."""
    path = next((path for path in columns if path.endswith(".attacked")), next(iter(columns), ""))
    sign = -1.0 if columns and columns[path].better == "higher" else 1.0

    def place(entry: tuple[str, Card]) -> tuple[bool, float, str]:
        value = _value(entry[1], path)
        return value is None, sign * (value or 0.0), entry[0]

    return sorted(group.items(), key=place)


def _value(card: Card, path: str) -> float | None:
    return card.numbers[path]["value"] if path in card.numbers else None


def _row(file: str, card: Card, columns: dict[str, Column]) -> str:
    cells = "".join(_cell(column, _value(card, path)) for path, column in columns.items())
    name = f'<th scope="row"><a href="#{_anchor(file)}">{_esc(card.name)}</a></th>'
    return f"<tr>{name}<td>{_esc(card.model['class'])}</td>{cells}</tr>"


def _chance(card: Card, columns: dict[str, Column]) -> str:
    """What chance gets, below the models; it is the same for all that were measured alike."""
    cells = "".join(
        _cell(column, card.numbers[path]["chance"] if path in card.numbers else None)
        for path, column in columns.items()
    )
    return f'<tfoot><tr><th scope="row">chance</th><td></td>{cells}</tr></tfoot>'


def _cell(column: Column, value: float | None) -> str:
    mark = "" if value is None else f' data-value="{value!r}"'
    return f"<td{mark}>{_esc(column.text(value))}</td>"


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
    """A name that addresses and attributes take as it is, another one for every file."""
    stem = file.removesuffix(".json")
    return "card-" + re.sub(r"[^A-Za-z0-9_-]", lambda found: f".{ord(found[0]):x}.", stem)


def _unusable(reasons: dict[str, str]) -> str:
    if not reasons:
        return ""
    lines = "".join(f"<li>{_esc(name)}: {_esc(reason)}</li>" for name, reason in reasons.items())
    summary = f"<summary>{len(reasons)} files are no usable cards</summary>"
    return f'<details class="notice">{summary}<ul>{lines}</ul></details>'


def _asset(name: str) -> str:
    return (files("fgai.reports.cards") / "assets" / name).read_text(encoding="utf-8")
