"""Progress of long work: stages count their steps, and `show_progress` displays them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

__all__ = ["Bar", "current_stage", "show_progress", "stage"]

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

_FIXED = 28  # largest width of a short bar, count and time left, in columns


@dataclass
class Bar:
    """Progress of a stage of work."""

    label: str
    total: int | None = None  # number of steps, if known
    done: int = 0
    note: str = ""  # for example a loss

    def advance(self, steps: int = 1, note: str | None = None) -> None:
        """Add `steps` to those done, and show them."""
        self.done += steps
        self.note = self.note if note is None else note
        _show()


_stages: ContextVar[tuple[Bar, ...]] = ContextVar("stages", default=())
_display: ContextVar[_Display | Literal[False] | None] = ContextVar("display", default=None)  # False: none


@contextmanager
def stage(label: str, total: int | None = None, *, done: int = 0) -> Iterator[Bar]:
    """Open a stage for the work in the block; stages may be nested.

    Example:
        >>> with stage("counting", 3) as counting:
        ...     current_stage().advance(2)
        >>> counting.done
        2
    """
    opened = Bar(label, total, done)
    token = _stages.set((*_stages.get(), opened))
    _show()
    try:
        yield opened
    finally:
        _stages.reset(token)
        _show()


def current_stage() -> Bar:
    """Return the innermost stage, or a hidden one if there is none."""
    return (_stages.get() or (Bar(""),))[-1]


@contextmanager
def show_progress(show: bool | None = None, console: Console | None = None) -> Iterator[None]:
    """Show the stages of the block on a console or standard error, or on the display that is already open.

    False shows nothing, also where a block inside asks for it.
    """
    display = _display.get()
    opened: _Display | None = None
    if show is not False and display is None:
        terminal = sys.stderr.isatty() if console is None else console.is_terminal
        opened = _Display(console) if terminal else _Lines(console)
    token = _display.set(False if show is False else opened or display)
    try:
        yield
    finally:
        _display.reset(token)
        if opened is not None:
            opened.stop()


class _Display:
    """One line on a terminal while a stage is open: label, bar, count, time left, and a note if it fits."""

    def __init__(self, console: Console | None = None) -> None:
        from rich.console import Console as RichConsole

        self._console = console or RichConsole(stderr=True)
        self._bar: Progress | None = None
        self._stage: Bar | None = None
        self._task: Any = None

    def update(self, stages: tuple[Bar, ...]) -> None:
        if not stages:
            self.stop()
            return
        if self._bar is None:
            self._bar = _progress_line(self._console)
            self._bar.start()
        inner = stages[-1]
        if inner is not self._stage:
            if self._task is not None:
                self._bar.remove_task(self._task)
            room = max(12, self._console.width - _FIXED)
            label = " · ".join(stage.label for stage in stages)
            label = label if len(label) <= room else f"…{label[1 - room :]}"
            self._task = self._bar.add_task(label, total=inner.total, completed=inner.done, note="")
            self._stage = inner
        done = inner.done if inner.total is None else min(inner.done, inner.total)
        self._bar.update(self._task, completed=done, note=inner.note)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._stage = self._task = None


EVERY = 10.0  # seconds between two lines without a terminal; shorter work writes none
ENOUGH = 0.03  # share of a stage that must be done before its time is estimated


class _Lines(_Display):
    """One plain line every few seconds: stages, steps done, and time left, at once if that is long."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self._began = self._printed = perf_counter()
        self._first = 0
        self._estimated = False

    def update(self, stages: tuple[Bar, ...]) -> None:
        now = perf_counter()
        if not stages:
            return
        inner = stages[-1]
        if inner is not self._stage:
            self._stage, self._began, self._first, self._estimated = inner, now, inner.done, False
        done, total = inner.done - self._first, inner.total
        left = 0.0
        if total and done >= max(1, ENOUGH * (total - self._first)):
            left = (now - self._began) / done * (total - inner.done)
        early = not self._estimated and left >= EVERY
        if now - self._printed < EVERY and not early:
            return
        self._printed, self._estimated = now, self._estimated or left > 0
        text = " · ".join(stage.label for stage in stages)
        if total:
            text += f": {min(inner.done, total)} of {total}"
            if left > 0:
                duration = f"{left:.0f} s" if left < 90 else f"{left / 60:.0f} min"
                text += f", about {duration} left in this step"
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _progress_line(console: Console) -> Progress:
    """Return the progress line; where it is too wide, the note is cut first, then the label."""
    from rich import progress
    from rich.table import Column

    column = partial(Column, no_wrap=True, overflow="ellipsis")
    columns = (
        progress.TextColumn("{task.description}", markup=False, table_column=column()),
        progress.BarColumn(8 if console.width < 80 else 24, table_column=column()),
        progress.MofNCompleteColumn(table_column=column()),
        progress.TimeRemainingColumn(compact=True, table_column=column(min_width=5)),
        progress.TextColumn("{task.fields[note]}", markup=False, table_column=column(ratio=1)),
    )
    options: dict[str, Any] = {"redirect_stdout": False, "redirect_stderr": False}  # results go elsewhere
    return progress.Progress(*columns, console=console, transient=True, expand=True, **options)


def _show() -> None:
    if display := _display.get():
        display.update(_stages.get())
