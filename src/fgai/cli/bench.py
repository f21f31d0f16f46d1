"""`fgai bench`: the commands of the experiments in a checkout."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import typer

from fgai.cli.app import App
from fgai.cli.output import BAD_INPUT


def _load() -> typer.Typer | None:
    """The experiments of the checkout around the package, else around the working folder."""
    here, there = Path(__file__).resolve(), Path.cwd().resolve()
    folders = (*here.parents, there, *there.parents)
    root = next((folder for folder in folders if (folder / "experiments/grids/node.toml").is_file()), None)
    if root is None:
        return None
    if str(root) not in sys.path[:1]:
        sys.path.insert(0, str(root))
    app: typer.Typer = import_module("experiments.command").app
    return app


def _bench() -> None:
    """Reproduce: run grids of experiments, make tables and figures from records.

    Needs a checkout of fgai.
    """
    where = "run it inside one, where experiments/ is"
    typer.echo(f"error: `fgai bench` needs a checkout of fgai: {where}", err=True)
    raise typer.Exit(BAD_INPUT)


bench = _load()
if bench is None:
    bench = App()
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    bench.command("bench", context_settings=anything)(_bench)
