"""`fgai attack --list` and `--breaking-point`: what can be attacked with, and how little is enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from fgai.attacks import THREATS
from fgai.cli.files import Opened
from fgai.cli.output import Output
from fgai.evaluation import breaking_point
from fgai.files import write_atomic
from fgai.graph import Graph
from fgai.records import Column, Table


def list_threats(wanted: bool) -> None:
    """Print every threat by name and stop."""
    if not wanted:
        return
    rows = [[name, threat.attack.name, threat.about] for name, threat in THREATS.items()]
    Table("Threats", [Column("name"), Column("attack"), Column("what")], rows).show(Console(highlight=False))
    raise typer.Exit()


def find_breaking_point(
    out: Output, opened: Opened[Graph], path: Path | None, options: dict[str, Any]
) -> None:
    """Search the smallest injection budget that breaks explanations, and print it.

    Args:
        out: the command's streams.
        opened: the model with its data.
        path: of the record, or None.
        options: for `fgai.evaluation.breaking_point`.
    """
    found = breaking_point(opened.model, opened.graph, **options)
    values = {"command": "attack", "dataset": opened.graph.name, "breaking_point": found.to_dict()}
    if path is not None:
        import json as encoder

        write_atomic(path, encoder.dumps(values, indent=1) + "\n")
    out.result(values, found.show)
