"""`fgai card`, `check` and `cards`: make a card of a model, check its numbers, list a folder of cards."""

from __future__ import annotations

import webbrowser
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from fgai.cli import options
from fgai.cli.options import check_output
from fgai.cli.output import FAILURE, Output, command
from fgai.errors import InputError
from fgai.records import Cell, Column, Table
from fgai.reports.cards import Card, card_from_files, check_card, read_cards, write_page

_Bars = Annotated[list[str] | None, typer.Option(metavar="NAME=NUMBER")]


@command
def cards(
    folder: Annotated[Path, "Folder of cards, one `.json` file per entry."],
    *,
    output: Annotated[Path, "The page.", "-o"] = Path("cards.html"),
    force: options.Force = False,
    title: Annotated[str, "Heading of the page."] = "Explanation cards",
    open_: options.Open = False,
    out: Output,
) -> None:
    """List the cards of a folder on one page, with a sortable table for each data and threat.

    Other files are named on the page and here.

    Examples:
    - `fgai cards cards --output leaderboard.html --open`
    """
    page = check_output(output, force)
    listing = read_cards(folder)
    for name, reason in listing.unusable.items():
        out.warn(f"left out {name}: {reason}")
    write_page(listing, page, title=title)
    titles = {name: card.title for name, card in listing.cards.items()}
    values = {"command": "cards", "output": str(page), "cards": titles, "unusable": listing.unusable}
    out.result(values, f"{len(titles)} cards written to {page}")
    if open_:
        webbrowser.open(page.resolve().as_uri())


@command
def card(
    files: Annotated[
        list[Path],
        "One evaluation or comparison, and certificates of the same model.",
        typer.Argument(metavar="RECORD..."),
    ],
    *,
    name: Annotated[str | None, "Model of a comparison; name of the card otherwise."] = None,
    output: Annotated[Path, "JSON file to write; Markdown goes beside it.", "-o"] = Path("card.json"),
    force: options.Force = False,
    all_: options.All = False,
    out: Output,
) -> None:
    """Make a card of a model: data, threat, numbers beside chance, certified shares, limits, versions.

    Nothing is measured: a card holds what `fgai evaluate`, `compare` and `certify` wrote with `--output`.

    Examples:
    - `fgai card evaluation.json certificate.json -o cards/gat.json`
    - `fgai card comparison.json --name FGAI -o cards/fgai.json`
    """
    if output.suffix != ".json":
        output = output.with_name(f"{output.name}.json")
    for file in (output, output.with_suffix(".md")):
        check_output(file, force)
    result = card_from_files(files, name=name)
    for path in result.write(output):
        out.say(f"written to {path}")
    out.result(result.to_dict(), partial(result.show, every=all_))


@command
def check(
    card: Annotated[Path, "A card written by `fgai card`."],
    *,
    min_: Annotated[_Bars, "Least value allowed; may be repeated."] = None,
    max_: Annotated[_Bars, "Largest value allowed; may be repeated."] = None,
    out: Output,
) -> None:
    """Compare a card's numbers with bars, and fail if one is missed.

    Exit codes: 0 all met, 1 a bar is missed, 2 the card is unusable or has no such quantity. Names are those
    on the card or readable ones; `top 5 kept` stands for all that begin with it. An undefined number meets
    no bar.

    Examples:
    - `fgai check card.json --min "top 5 kept=0.8" --min "F1, under attack=0.9"`
    - `fgai check card.json --min f1.attacked=0.9 --max g_tvd_rel=0.2 --json`
    """
    bars = _bars(min_, "--min"), _bars(max_, "--max")
    read = Card.load(card)
    findings, words = check_card(read, *bars), read.readable()
    missed, count = sum(not entry.met for entry in findings), len(findings)
    rows, cells = list[dict[str, Any]](), list[list[Cell]]()
    for one in findings:
        rows.append({"quantity": one.path, "value": one.value, one.side: one.bound, "met": one.met})
        bar = f"{'≥' if one.side == 'min' else '≤'} {one.bound:g}"
        cells.append([words.get(one.path, one.path), one.value, bar, "met" if one.met else "MISSED"])
    columns = [Column("quantity"), Column("value", ".4g"), Column("bar"), Column("")]
    note = f"{missed} of {count} bars missed" if missed else f"all {count} bars met"
    values = {"command": "check", "card": str(card), "passed": not missed, "bars": rows}
    out.result(values, Table(str(card), columns, cells, [note]).show)
    if missed:
        raise typer.Exit(FAILURE)


def _bars(words: list[str] | None, flag: str) -> dict[str, float]:
    bars: dict[str, float] = {}
    for word in words or ():
        name, _, text = word.partition("=")
        try:
            if not name or name in bars:
                raise ValueError
            bars[name] = float(text)
        except ValueError:
            raise InputError(f"`{flag}` takes NAME=NUMBER, each name once, got {word!r}") from None
    return bars
