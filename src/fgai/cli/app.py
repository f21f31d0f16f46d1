"""The application: a tree of commands, each imported when it is called."""

from __future__ import annotations

import ast
import os
import sys
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fgai.cli.output import command_words
from fgai.version import __version__

_PANELS = {
    "Explain and report": ("demo", "explain", "explore", "report", "audit"),
    "Train models": ("train", "faithful", "harden", "limit"),
    "Evaluate models": ("attack", "evaluate", "compare", "certify", "bench"),
    "Publish numbers": ("card", "check", "cards"),
    "Installation and data": ("doctor", "data"),
}  # of the help, and their commands


@cache
def _summaries() -> dict[str, tuple[str, str]]:
    """Module, and first line of the docstring, of every command, read without importing it."""
    summaries = {}
    for module in ("report", "evaluate", "train", "bench", "cards", "data"):
        for node in ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                summaries[node.name.strip("_")] = module, (ast.get_docstring(node) or "").partition("\n")[0]
    return summaries


class _Flags:
    """Removes the type from the help of options that take no value, `--help` included."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""
        return parameters


class _Command(_Flags, TyperCommand):
    pass


class _Group(_Flags, TyperGroup):
    pass


class _LazyCommand(TyperCommand):
    """A command that is imported when it is called, so that `--help` need not import PyTorch."""

    def __init__(self, name: str, panel: str) -> None:
        self._module, summary = _summaries()[name]
        super().__init__(name, help=summary, rich_help_panel=panel)

    @cached_property
    def loaded(self) -> Any:
        app = getattr(import_module(f"fgai.cli.{self._module}"), str(self.name))
        if not isinstance(app, typer.Typer):
            work, app = app, App()
            app.command(self.name)(work)
        return typer.main.get_command(app)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.loaded.make_context(info_name, args, parent, **extra)


class _Root(_Group):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for panel, commands in _PANELS.items():
            for name in commands:
                self.add_command(_LazyCommand(name, panel))

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        command_words.set(list(args))
        return super().make_context(info_name, args, parent, **extra)


class App(typer.Typer):
    """Typer's tree with these commands and groups; takes the arguments of `typer.Typer`."""

    def __init__(self, **options: Any) -> None:
        usual = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": "markdown"}
        super().__init__(**{"cls": _Group, **usual, **options})

    def command(self, name: str | None = None, **options: Any) -> Any:
        """Declare a command; see `typer.Typer.command`."""
        return super().command(name, **{"cls": _Command, **options})


app = App(
    name="fgai",
    cls=_Root,
    epilog="Start with: fgai demo",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Stable attention explanations for graph neural networks: train, attack, measure and certify models.

    Results go to standard output, everything else to standard error; --json prints one JSON document instead
    of tables. Exit codes: 0 good, 1 failure, 2 bad input, 130 interrupted.
    """
    if version:
        typer.echo(f"fgai {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the `fgai` script."""
    if not os.environ.get("FGAI_DEBUG"):  # after an interrupt, incomplete objects raise when they are deleted
        sys.unraisablehook = lambda _: None
    if "OMP_WAIT_POLICY" not in os.environ:
        # Waiting OpenMP threads spin for milliseconds and slow small graphs down on shared cores: let them
        # sleep after some ten microseconds. OpenMP reads this when PyTorch is imported.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    app()
