"""Progress over a grid: a bar with the time left on a terminal, a line per cell elsewhere."""

from __future__ import annotations

import sys
from datetime import timedelta
from time import monotonic
from types import TracebackType

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments import Cell
from fgai.cli import Output


class GridProgress:
    """Says which cell finished and how long the rest will take, at the pace so far."""

    def __init__(self, total: int, output: Output) -> None:
        self._total, self._output, self._done, self._began = total, output, 0, monotonic()
        self._bar = Progress(
            TextColumn("cells"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=output.notes,
            disable=output.quiet or not sys.stderr.isatty(),
            transient=True,
        )
        self._task = self._bar.add_task("cells", total=total, note="")

    def __enter__(self) -> GridProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def finished(self, cell: Cell, status: str, seconds: float) -> None:
        """Count a cell and say what became of it."""
        self._done += 1
        left = (monotonic() - self._began) / self._done * (self._total - self._done)
        name = f"{cell.model} {cell.row} {cell.dataset} seed {cell.seed}"
        note = f"{name} {status} ({seconds:.1f} s), {timedelta(seconds=round(left))} left"
        self._bar.update(self._task, advance=1, note=note)
        if self._bar.disable:
            self._output.say(f"{self._done}/{self._total} {note}")
        elif status != "done":
            self._output.say(f"{name} {status}")
