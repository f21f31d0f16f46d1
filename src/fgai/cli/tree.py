"""`App`: a tree of commands that are imported when they are called, and whose help shows a flag as a flag."""

from __future__ import annotations

import ast
import inspect
import shlex
from collections.abc import Callable
from contextvars import ContextVar
from functools import cached_property, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_WORDS: ContextVar[list[str] | None] = ContextVar("words", default=None)


def typed_line() -> dict[str, str]:
    """Return the command that is running, as it was typed, under `command`; nothing outside of one."""
    words = _WORDS.get()
    return {} if words is None else {"command": shlex.join(["fgai", *words])}


class _Flags:
    """Takes the type off the help of options that take no value, `--help` itself among them."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters as they are, flags with nothing beside their name."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in found:
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""
        return found


class _Command(_Flags, TyperCommand):
    """A command of the tree."""


class Later(_Flags, TyperCommand):
    """A command that the tree lists by its first sentence, and imports when it is called.

    Args:
        module: where it lives: in `app` where that is a group, else in the function of the module's name.
        **options: of the command in the tree.
    """

    def __init__(self, module: str, **options: Any) -> None:
        super().__init__(**options)
        self.module = module

    @cached_property
    def loaded(self) -> Any:
        """The command or group itself."""
        module = import_module(self.module)
        found = getattr(module, "app", None)
        if found is None:
            found = App()
            found.command(self.name)(getattr(module, _name(self.module)))
        return typer.main.get_command(found)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Go on with the command itself."""
        return self.loaded.make_context(info_name, args, parent, **extra)


class _Group(_Flags, TyperGroup):
    """A group of the tree."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """Keep the words of the whole command, see `typed_line`."""
        if parent is None:
            _WORDS.set(list(args))
        return super().make_context(info_name, args, parent, **extra)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help; only now the sentences of commands not yet imported are looked up."""
        for command in self.commands.values():
            if isinstance(command, Later):
                command.help = summary(command.module)
        super().format_help(ctx, formatter)


class App(typer.Typer):
    """Typer's tree with these commands and groups; takes what `typer.Typer` does."""

    def __init__(self, **options: Any) -> None:
        usual = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": "markdown"}
        super().__init__(cls=_Group, **{**usual, **options})

    def command(self, name: str | None = None, **options: Any) -> Any:
        """Declare a command; see `typer.Typer.command`."""
        return super().command(name, **{"cls": _Command, **options})

    def later(self, module: str, panel: str) -> None:
        """Declare a command by its module: nothing is imported until it is called.

        Args:
            module: its last part is the command's name, and that of the function whose docstring explains it.
            panel: heading it stands under.
        """
        made: Any = partial(Later, module)
        self.command(_name(module), cls=made, rich_help_panel=panel)(_nothing)


def summary(module: str) -> str:
    """Return the first paragraph that explains a command, read from its source and not by importing it."""
    found = find_spec(module)
    source: Callable[[str], str | None] | None = getattr(found and found.loader, "get_source", None)
    text = None if source is None else source(module)
    for part in ast.parse(text or "").body:
        if isinstance(part, ast.FunctionDef) and part.name == _name(module):
            return inspect.cleandoc(ast.get_docstring(part) or "").partition("\n\n")[0]
    return ""


def _name(module: str) -> str:
    return module.rpartition(".")[2]


def _nothing() -> None:
    """Stands for a command that is not there yet."""
