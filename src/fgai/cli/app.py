"""The application: every command in one tree."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from fgai.cli import (
    attack,
    audit,
    bench,
    certify,
    compare,
    data,
    demo,
    doctor,
    evaluate,
    explain,
    faithful,
    limit,
    report,
    train,
)
from fgai.cli.tree import App
from fgai.version import __version__

app = App(
    name="fgai",
    epilog="Start with: fgai demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo", rich_help_panel="See it")(demo.demo)
app.command("explain", rich_help_panel="See it")(explain.explain)
app.command("report", rich_help_panel="See it")(report.report)
app.command("audit", rich_help_panel="See it")(audit.audit)
app.command("train", rich_help_panel="Make models")(train.train)
app.command("faithful", rich_help_panel="Make models")(faithful.faithful)
app.command("limit", rich_help_panel="Make models")(limit.limit)
app.command("attack", rich_help_panel="Judge models")(attack.attack)
app.command("evaluate", rich_help_panel="Judge models")(evaluate.evaluate)
app.command("compare", rich_help_panel="Judge models")(compare.compare)
app.command("certify", rich_help_panel="Judge models")(certify.certify)
experiments = bench.load()
if experiments is not None:
    app.add_typer(experiments, name="bench", rich_help_panel="Judge models")
else:
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("bench", rich_help_panel="Judge models", context_settings=anything)(bench.missing)
app.add_typer(data.app, name="data", rich_help_panel="Around")
app.command("doctor", rich_help_panel="Around")(doctor.doctor)


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
    """Attention explanations of graph neural networks that stay put: train them, attack them, certify them.

    Results go to standard output, everything else to standard error; --json prints one JSON document instead
    of tables. Exit codes: 0 good, 1 failure, 2 bad input, 130 interrupted.
    """


def main() -> None:
    """Entry point of the `fgai` script."""
    if not os.environ.get("FGAI_DEBUG"):  # an interrupt leaves half-made objects that complain as they go
        sys.unraisablehook = lambda _: None
    app()
