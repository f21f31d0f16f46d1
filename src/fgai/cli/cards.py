"""`fgai cards`: the cards of a folder as a leaderboard."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fgai.cli import options
from fgai.cli.files import checked_output
from fgai.cli.output import Output, command
from fgai.reports.cards import read_cards, write_page


@command
def cards(
    folder: Annotated[Path, typer.Argument(help="Folder of cards, one `.json` file per entry.")],
    *,
    output: Annotated[Path, typer.Option("--output", "--out", "-o", help="The page.")] = Path("cards.html"),
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Explanation cards",
    open_: options.Open = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """List the cards of a folder on one page: a table for each data and threat, sortable, one file.

    Files that are no usable cards are named on the page and here.

    Examples:
    - `fgai cards cards --out leaderboard.html --open`
    """
    out = Output(json, quiet)
    page = checked_output(output)
    listing = read_cards(folder)
    for name, reason in listing.unusable.items():
        out.warn(f"left out {name}: {reason}")
    write_page(listing, page, title=title)
    values = {
        "command": "cards",
        "output": str(page),
        "cards": {name: card.title for name, card in listing.cards.items()},
        "unusable": listing.unusable,
    }

    def show(console: Console) -> None:
        console.print(f"{len(listing.cards)} cards written to {page}", markup=False, soft_wrap=True)

    out.result(values, show)
    if open_:
        webbrowser.open(page.resolve().as_uri())
