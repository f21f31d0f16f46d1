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
from typing import Any, ParamSpec

import typer
from rich.console import Console

from fgai.errors import DivergenceError, FgaiError, FgaiWarning
from fgai.progress import shown
from fgai.version import stating

P = ParamSpec("P")
_notes: ContextVar[Console | None] = ContextVar("notes", default=None)
"""Where a running command writes remarks; its progress bar shares the console."""
_words: ContextVar[list[str] | None] = ContextVar("words", default=None)
"""The command that is running, as it was typed."""
FAILURE, BAD_INPUT, INTERRUPTED = 1, 2, 130


def _keep_words(words: list[str]) -> None:
    """Keep the words of a command for its records."""
    _words.set(list(words))


class Output:
    """The two streams of one command.

    Args:
        json: print the result as one JSON document.
        quiet: no progress and no remarks, only warnings and errors.
    """

    def __init__(self, json: bool, quiet: bool) -> None:
        self.json, self.quiet = json, quiet
        self.console = Console(highlight=False)
        self.notes = _notes.get() or Console(stderr=True, highlight=False)

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

    def result(self, values: dict[str, Any], show: Callable[[Console], None]) -> None:
        """Print the result: `values` as JSON, or what `show` draws."""
        if self.json:
            typer.echo(json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False))
        else:
            show(self.console)


def command(work: Callable[P, None]) -> Callable[P, None]:
    """Turn what a command raises into a message and an exit code; `FGAI_DEBUG=1` adds the traceback.

    `FgaiError` means bad input (2), other errors a failure (1), Ctrl-C 130. With `--json` the error is also
    printed as JSON. Arguments of the library that an error names are spelled as flags of the command.
    """
    parameters = inspect.signature(work).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    flags = {name: f"--{name.strip('_').replace('_', '-')}" for name in names}

    @functools.wraps(work)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> None:
        output = Output(bool(kwargs.get("json")), bool(kwargs.get("quiet")))
        token, words = _notes.set(output.notes), _words.get()
        typed = {} if words is None else {"command": shlex.join(["fgai", *words])}
        try:
            with warnings.catch_warnings(), shown(output.progress, output.notes), stating(**typed):
                _tell_warnings(output)
                work(*args, **kwargs)
        except typer.Exit:
            raise
        except KeyboardInterrupt:
            _fail(output, "interrupted", "Interrupted", INTERRUPTED)
        except DivergenceError as error:
            _fail(output, str(error), type(error).__name__, FAILURE)
        except FgaiError as error:
            text = re.sub(r"`(\w+)`", lambda name: f"`{flags.get(name[1], name[1])}`", str(error))
            _fail(output, text, type(error).__name__, BAD_INPUT)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115 (nobody reads on)
            raise typer.Exit(FAILURE) from None
        except Exception as error:
            text = f"unexpected {type(error).__name__}: {error}; FGAI_DEBUG=1 shows where. Please report it"
            _fail(output, text, type(error).__name__, FAILURE)
        finally:
            _notes.reset(token)

    return guarded


def _fail(output: Output, message: str, kind: str, code: int) -> None:
    if os.environ.get("FGAI_DEBUG"):
        traceback.print_exc()
    text = message if code == INTERRUPTED else f"error: {message}"
    output.notes.print(text, style="red", markup=False, soft_wrap=True)
    if output.json:
        typer.echo(json.dumps({"error": {"type": kind, "message": message, "exit_code": code}}))
    raise typer.Exit(code)


def _tell_warnings(output: Output) -> None:
    """Print fgai's own warnings in one line each, once, and drop those of other packages."""
    warnings.simplefilter("ignore")
    warnings.simplefilter("always", FgaiWarning)
    shown_before: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in shown_before:
            shown_before.add(str(message))
            output.warn(str(message))

    warnings.showwarning = show
