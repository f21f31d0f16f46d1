"""The application: a tree of commands, each imported when it is called."""

from __future__ import annotations

import os
import sys
from functools import cached_property
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fgai.cli.output import _keep_words
from fgai.version import __version__

_PANELS = {
    "See it": {"demo": "demo", "explain": "evaluate", "report": "report", "audit": "report"},
    "Make models": {"train": "train", "faithful": "train", "limit": "train"},
    "Judge models": {
        "attack": "attack",
        "evaluate": "evaluate",
        "compare": "evaluate",
        "certify": "evaluate",
        "bench": "bench",
    },
    "Publish what was found": {"card": "cards", "check": "cards", "cards": "cards"},
    "Around": {"doctor": "data", "data": "data"},
}
"""Panels of the help, their commands, and the module of each."""
_SUMMARIES = {
    "demo": "Train a model, make it faithful, attack both equally, and show what changed.",
    "explain": "Show whom a node attends to, whether that survives an attack, and what is certified"
    " about it.",
    "report": "Write one HTML page: headline numbers, attention before and after, every node,"
    " curves, settings.",
    "audit": "Attack, measure and certify a PyG model of your own on your own graph, and write one page.",
    "train": "Train a model and write it to a file that knows its data.",
    "faithful": "Make a model faithful: attention that points at the same neighbours and stays put"
    " under attack.",
    "limit": "Limit what nodes can say to a model to what they said on the graph it was made for;"
    " no training.",
    "attack": "Attack a model through its own gradients and say what that did.",
    "evaluate": "Attack a model and measure how its predictions and its attention hold.",
    "compare": "Attack several models equally and put the numbers side by side.",
    "certify": "Prove, node by node, that explanation and prediction stay while a layer's attention"
    " moves a little.",
    "bench": "Reproduce: run grids of experiments, make tables and figures from records.",
    "card": "Make a card of a model: data, threat, numbers beside chance, certified shares, limits,"
    " versions.",
    "check": "Hold a card's numbers against bars, and fail where one is missed.",
    "cards": "List the cards of a folder on one page: a table for each data and threat, sortable, one file.",
    "doctor": "Check versions, device, kernels and data, and run a tiny training, attack and certificate.",
    "data": "The datasets: which there are, what is in them, and graphs larger than memory.",
}
"""First sentences of the commands' docstrings: the help shows them without importing the modules."""


class _Flags:
    """Takes the type off the help of options that take no value, `--help` itself among them."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in found:
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""
        return found


class _Command(_Flags, TyperCommand):
    """A command of the tree."""


class _LazyCommand(_Flags, TyperCommand):
    """A command that is listed by its first sentence and imported when it is called.

    Importing all of them would load PyTorch before `fgai --help` could answer.
    """

    def __init__(self, name: str, module: str, panel: str) -> None:
        super().__init__(name, help=_SUMMARIES[name], rich_help_panel=panel)
        self._module = module

    @cached_property
    def loaded(self) -> Any:
        """The command or group itself: the function or `App` of its name in the module."""
        found = getattr(import_module(f"fgai.cli.{self._module}"), str(self.name))
        if not isinstance(found, typer.Typer):
            single = App()
            single.command(self.name)(found)
            found = single
        return typer.main.get_command(found)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.loaded.make_context(info_name, args, parent, **extra)


class _Group(_Flags, TyperGroup):
    """A group of commands."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if parent is None:
            _keep_words(args)
        return super().make_context(info_name, args, parent, **extra)


class _Root(_Group):
    """The group of all commands."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for panel, commands in _PANELS.items():
            for name, module in commands.items():
                self.add_command(_LazyCommand(name, module, panel))


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


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"fgai {__version__}")
        raise typer.Exit


@app.callback()
def _root(
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
