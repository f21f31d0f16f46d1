"""The page of a folder of cards: one file that opens from disk and needs no network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from fgai.errors import CheckpointError, InputError
from fgai.files import write_atomic
from fgai.records import Column
from fgai.reports.cards.card import Card, _evidence, _form_of
from fgai.reports.template import asset, fill
from fgai.typed import typed
from fgai.version import __version__


class Listing(NamedTuple):
    """The `cards` of a folder by the name of their file, in order, and why other files are `unusable`."""

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
    parts = {
        "title": title,
        "style": asset("style.css") + asset("cards.css", "cards"),
        "count": len(listing.cards),
        "unusable": listing.unusable,
        "sections": sorted(map(_section, groups.values()), key=lambda section: str(section["heading"])),
        "anchor": _anchor,
        "script": asset("cards.js", "cards"),
        "version": __version__,
    }
    write_atomic(Path(path), fill(asset("cards.html", "cards"), parts))
    return Path(path)


def _section(group: dict[str, Card]) -> dict[str, Any]:
    """One table of comparable cards."""
    first = next(iter(group.values()))
    options = ", ".join(f"{name} {value}" for name, value in first.protocol.items())
    columns = {
        path: Column(number["title"], _form_of(path), number["direction"])
        for card in group.values()
        for path, number in card.numbers.items()
        if number["value"] is not None
    }
    return {
        "heading": f"{first.data['name']}, threat {first.threat['words']} ({options})",
        "columns": [Column("model"), Column("class"), *columns.values()],
        "details": [(file, card, _details(file, card)) for file, card in group.items()],
        "rows": [(file, card, _cells(card, columns, "value")) for file, card in _ranked(group, columns)],
        "chance": _cells(first, columns, "chance"),  # the same for all cards of a table
    }


def _ranked(group: dict[str, Card], columns: dict[str, Column]) -> list[tuple[str, Card]]:
    """Cards by the first number under attack, the best first; those without it last."""
    path = next((path for path in columns if path.endswith(".attacked")), next(iter(columns), ""))
    sign = -1.0 if columns and columns[path].better == "higher" else 1.0

    def rank(entry: tuple[str, Card]) -> tuple[bool, float, str]:
        value = entry[1].numbers.get(path, {}).get("value")
        return value is None, sign * (value or 0.0), entry[0]

    return sorted(group.items(), key=rank)


def _cells(card: Card, columns: dict[str, Column], part: str) -> list[tuple[float | None, str]]:
    values = {path: card.numbers.get(path, {}).get(part) for path in columns}
    return [(values[path], column.text(values[path])) for path, column in columns.items()]


def _details(file: str, card: Card) -> list[str]:
    facts = {
        "file": file,
        "model": card.model,
        "fingerprint": card.data["fingerprint"],
        "versions": card.version,
        "evidence": _evidence(card),
    }
    return [*(f"{name}: {value}" for name, value in facts.items()), *card.tables()[0].notes]


def _anchor(file: str) -> str:
    """A unique identifier that is valid in addresses and attributes."""
    stem = file.removesuffix(".json")
    return "card-" + re.sub(r"[^A-Za-z0-9_-]", lambda letter: f".{ord(letter[0]):x}.", stem)
