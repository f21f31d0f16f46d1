"""`fgai attack --explain-members`: what every search of an ensemble found, and which one won."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from fgai.attacks import Ledger
from fgai.records import Column, Table


def members_of(ledger: Ledger) -> list[dict[str, Any]]:
    """Return a row for each member at each set of endpoints, `won` at the one whose change was chosen.

    Damage is judged afresh by a full pass. Where random noise did most, no member has won.
    """
    names = ("member", "endpoints", "steps", "seconds")
    return [
        {**{name: row[name] for name in names}, "damage": damage, "won": place == ledger.won}
        for place, (row, damage) in enumerate(ledger.proposals())
        if row is not None
    ]


def show_members(console: Console, rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table, the winner marked."""
    if not rows:
        console.print("this attack has no members: it is one search", markup=False)
        return
    columns = [
        Column("member"),
        Column("endpoints"),
        Column("damage"),
        Column("steps", "d"),
        Column("seconds", ".1f"),
        Column(""),
    ]
    cells = [
        [row["member"], row["endpoints"], row["damage"], row["steps"], row["seconds"], "won" * row["won"]]
        for row in rows
    ]
    note = "Damage: one minus the score, the share of the top-k lost, or the attention that new nodes take."
    Table("Members", columns, cells, [note]).show(console)
