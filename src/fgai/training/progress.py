"""A progress line for long work: shown on a terminal, silent elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """A bar over epochs, with the loss terms and the best score, on standard error.

    Args:
        total: steps in all.
        label: what is running.
        show: None shows it only when standard error is a terminal.
        done: steps already done (after a resume).
    """

    def __init__(self, total: int, label: str, *, show: bool | None = None, done: int = 0) -> None:
        self._show = sys.stderr.isatty() if show is None else show
        self._bar = RichProgress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            disable=not self._show,
            transient=True,
        )
        self._task = self._bar.add_task(label, total=total, completed=done, note="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def step(self, terms: dict[str, float] | None = None, best: float | None = None) -> None:
        """Advance by one; `terms` and `best` are shown beside the bar."""
        note = "  ".join(f"{name} {value:.4g}" for name, value in (terms or {}).items())
        if best is not None:
            note += f"  best {best:.4f}"
        self._bar.update(self._task, advance=1, note=note)
