"""`fgai card`: what was found of one model, as a card to publish and to check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fgai.cli import options
from fgai.cli.files import checked_output
from fgai.cli.output import Output, command
from fgai.reports.cards import card_from_files


@command
def card(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="RECORD...", help="One evaluation or comparison, and certificates of the same model."
        ),
    ],
    *,
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="Model of a comparison; name of the card otherwise.")
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="JSON file to write; Markdown goes beside it.")
    ] = Path("card.json"),
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Make a card of a model: data, threat, numbers beside chance, certified shares, limits, versions.

    Nothing is measured: a card holds what `fgai evaluate`, `compare` and `certify` wrote with `--output`.

    Examples:
    - `fgai card evaluation.json certificate.json -o cards/gat.json`
    - `fgai card comparison.json --name FGAI -o cards/fgai.json`
    """
    out = Output(json, quiet)
    if output.suffix != ".json":
        output = output.with_name(f"{output.name}.json")
    checked_output(output)
    made = card_from_files(files, name=name)
    for path in made.write(output):
        out.say(f"written to {path}")
    out.result(made.to_dict(), made.show)
