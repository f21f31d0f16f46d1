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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, get_args, get_type_hints

import typer
from rich.console import Console
from typer.models import OptionInfo, ParameterInfo

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

    json: Annotated[bool, "Print one JSON document to standard output instead of tables."] = False
    quiet: Annotated[bool, "No progress and no remarks.", "-q"] = False

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

    `Annotated[type, "help", "-x"]` declares an option `--name` (and `--no-name` if its default is True),
    or an argument if it comes before `*`. A `typer.Option` or `typer.Argument` in it declares all else.
    """
    options: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    hints = get_type_hints(work, include_extras=True)
    for name, parameter in inspect.signature(work).parameters.items():
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            kinds = get_type_hints(hints[name], include_extras=True)
            options += [_declare(one.name, kinds[one.name], one.default) for one in fields(hints[name])]
        else:
            is_argument = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            options.append(_declare(name, hints[name], parameter.default, is_argument))
    declared = {option.name: option.annotation.__metadata__[0] for option in options}
    flags = {name: _flag(name) for name, info in declared.items() if isinstance(info, OptionInfo)}

    @functools.wraps(work)
    def guarded(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        output = next((value for value in values.values() if isinstance(value, Output)), Output())
        token, words = _notes.set(output.notes), command_words.get()
        facts = {} if words is None else {"command": shlex.join(["fgai", *words])}
        try:
            with _warnings_to(output), show_progress(output.progress, output.notes), adding_facts(**facts):
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


def _flag(name: str) -> str:
    return f"--{name.strip('_').replace('_', '-')}"


def _declare(name: str, hint: Any, default: Any, is_argument: bool = False) -> inspect.Parameter:
    """Return the parameter that typer reads, see `command`."""
    kind, *metadata = get_args(hint)
    words = [entry for entry in metadata if isinstance(entry, str)]
    (info,) = [copy(entry) for entry in metadata if isinstance(entry, ParameterInfo)] or [
        typer.Argument() if is_argument else typer.Option()
    ]
    if words:
        info.help = words[0]
    if isinstance(info, OptionInfo) and info.default is ...:  # it declares no flags
        flag = _flag(name)
        info.param_decls = (f"{flag}/--no-{flag[2:]}" if default is True else flag, *words[1:])
    if default is MISSING:
        default = inspect.Parameter.empty
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, only, default=default, annotation=Annotated[kind, info])


def _fail(output: Output, message: str, kind: str, code: int) -> None:
    if os.environ.get("FGAI_DEBUG"):
        traceback.print_exc()
    text = message if code == INTERRUPTED else f"error: {message}"
    output.notes.print(text, style="red", markup=False, soft_wrap=True)
    if output.json:
        typer.echo(json.dumps({"error": {"type": kind, "message": message, "exit_code": code}}))
    raise typer.Exit(code)


@contextmanager
def _warnings_to(output: Output) -> Iterator[None]:
    """Print fgai's own warnings of the block in one line each, once, and drop those of other packages."""
    shown_before: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in shown_before:
            shown_before.add(str(message))
            output.warn(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", FgaiWarning)
        warnings.showwarning = show
        yield
