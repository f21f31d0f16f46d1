"""The application: every command in one tree, each imported when it is called."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from fgai.cli.tree import App
from fgai.version import __version__

PANELS = {
    "See it": ("demo", "explain", "report", "audit"),
    "Make models": ("train", "faithful", "limit"),
    "Judge models": ("attack", "evaluate", "compare", "certify", "bench"),
    "Publish what was found": ("card", "check", "cards"),
    "Around": ("doctor", "data"),
}

app = App(
    name="fgai",
    epilog="Start with: fgai demo",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _panel, _names in PANELS.items():
    for _name in _names:
        app.later(f"fgai.cli.{_name}", _panel)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fgai {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Stable attention explanations for graph neural networks: train them, attack them, measure what holds.

    Results go to standard output, everything else to standard error; --json prints one JSON document instead
    of tables. Exit codes: 0 good, 1 failure, 2 bad input, 130 interrupted.
    """


def main() -> None:
    """Entry point of the `fgai` script."""
    if not os.environ.get("FGAI_DEBUG"):  # an interrupt leaves half-made objects that complain as they go
        sys.unraisablehook = lambda _: None
    app()
