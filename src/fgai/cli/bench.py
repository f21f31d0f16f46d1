"""`fgai bench`: the experiments of a checkout, found and handed to the command line."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import typer

MARK = Path("experiments") / "grids" / "node.toml"


def checkout() -> Path | None:
    """Return the checkout whose experiments are meant: around the package, else around the working folder."""
    here, there = Path(__file__).resolve(), Path.cwd().resolve()
    for folder in (*here.parents, there, *there.parents):
        if (folder / MARK).is_file():
            return folder
    return None


def load() -> typer.Typer | None:
    """Return the commands of the experiments, or None where there is no checkout."""
    root = checkout()
    if root is None:
        return None
    if find_spec("experiments") is None:
        sys.path.insert(0, str(root))
    app: typer.Typer = import_module("experiments.command").app
    return app


def missing() -> None:
    """Say where the experiments are."""
    typer.echo("fgai bench needs a checkout of fgai: run it inside one (it holds experiments/)", err=True)
    raise typer.Exit(2)
