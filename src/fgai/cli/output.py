"""The output of a command: results on standard output, everything else on standard error."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from typer.models import ArgumentInfo

from fgai.errors import CheckpointError, DataError, DivergenceError, FgaiError, FgaiWarning
from fgai.progress import show_progress
from fgai.version import adding_facts

_notes: ContextVar[Console | None] = ContextVar("notes", default=None)
"""The console for remarks of the running command and its progress bar."""
command_words: ContextVar[list[str] | None] = ContextVar("words", default=None)
"""The command that is running, as the user typed it; its records keep it."""
FAILURE, BAD_INPUT, INTERRUPTED = 1, 2, 130


@dataclass(frozen=True)
class Output:
    """The two streams of one command, and the options that choose what is written to them."""

    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document to standard output instead of tables.")
    ] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no remarks.")] = False

    @property
    def notes(self) -> Console:
        """The console on standard error."""
        return _notes.get() or Console(stderr=True, highlight=False)

    @property
    def progress(self) -> bool | None:
        """Value for `progress` arguments: False when quiet, else None."""
        return False if self.quiet else None

    def say(self, text: str) -> None:
        """Print a remark on standard error."""
        if not self.quiet:
            self.notes.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Warn on standard error."""
        self.notes.print(f"warning: {text}", style="yellow", markup=False, soft_wrap=True)

    def result(self, values: dict[str, Any], show: Callable[[Console], None] | str) -> None:
        """Print the result: `values` as JSON, or a text, or what `show` draws."""
        if self.json:
            typer.echo(json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False))
        elif isinstance(show, str):
            Console(highlight=False).print(show, markup=False, soft_wrap=True)
        else:
            show(Console(highlight=False))


def command(work: Callable[..., None]) -> Callable[..., None]:
    """Turn a function into a command: its dataclass parameters are groups of options, its errors exit codes.

    `FgaiError` means bad input (2), other errors a failure (1), Ctrl-C 130; `FGAI_DEBUG=1` adds the
    traceback. With `--json` the error is also printed as JSON. Arguments of the library that an error names
    are spelled as flags of the command.
    """
    options: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    hints = get_type_hints(work, include_extras=True)
    for name, parameter in inspect.signature(work).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            kinds = get_type_hints(hints[name], include_extras=True)
            entries = [(field.name, kinds[field.name], field.default) for field in fields(hints[name])]
        else:
            entries = [(name, hints[name], parameter.default)]
        options += [
            inspect.Parameter(
                option,
                inspect.Parameter.KEYWORD_ONLY,
                default=parameter.empty if default is MISSING else default,
                annotation=kind,
            )
            for option, kind, default in entries
        ]
    flags = {
        option.name: f"--{option.name.strip('_').replace('_', '-')}"
        for option in options
        if not any(isinstance(entry, ArgumentInfo) for entry in option.annotation.__metadata__)
    }

    @functools.wraps(work)
    def guarded(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        output = next((value for value in values.values() if isinstance(value, Output)), Output())
        token, words = _notes.set(output.notes), command_words.get()
        facts = {} if words is None else {"command": shlex.join(["fgai", *words])}
        try:
            with (
                warnings.catch_warnings(),
                show_progress(output.progress, output.notes),
                adding_facts(**facts),
            ):
                _show_warnings(output)
                work(**values)
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            _fail(output, "interrupted", "Interrupted", INTERRUPTED)
        except DivergenceError as error:
            _fail(output, str(error), type(error).__name__, FAILURE)
        except FgaiError as error:
            text = str(error)
            if not isinstance(error, DataError | CheckpointError):  # their names are columns and fields
                text = re.sub(r"`(\w+)`", lambda name: f"`{flags.get(name[1], name[1])}`", text)
            _fail(output, text, type(error).__name__, BAD_INPUT)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 (nobody reads on)
            raise typer.Exit(FAILURE) from None
        except Exception as error:
            text = f"unexpected {type(error).__name__}: {error}; FGAI_DEBUG=1 shows where. Please report it"
            _fail(output, text, type(error).__name__, FAILURE)
        finally:
            _notes.reset(token)

    guarded.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return guarded


def _fail(output: Output, message: str, kind: str, code: int) -> None:
    if os.environ.get("FGAI_DEBUG"):
        traceback.print_exc()
    text = message if code == INTERRUPTED else f"error: {message}"
    output.notes.print(text, style="red", markup=False, soft_wrap=True)
    if output.json:
        typer.echo(json.dumps({"error": {"type": kind, "message": message, "exit_code": code}}))
    raise typer.Exit(code)


def _show_warnings(output: Output) -> None:
    """Print fgai's own warnings in one line each, once, and drop those of other packages."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", FgaiWarning)
    shown_before: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in shown_before:
            shown_before.add(str(message))
            output.warn(str(message))

    warnings.showwarning = show
