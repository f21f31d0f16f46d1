"""`App`: a tree of commands whose help shows a flag as a flag, without a value to give."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup


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


class _Group(_Flags, TyperGroup):
    """A group of the tree."""


class App(typer.Typer):
    """Typer's tree with these commands and groups; takes what `typer.Typer` does."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_Group, **options)

    def command(self, name: str | None = None, **options: Any) -> Any:
        """Declare a command; see `typer.Typer.command`."""
        return super().command(name, cls=_Command, **options)
