"""Trackers: callbacks for every epoch of a training or an attack, and logs in files."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fgai.errors import CheckpointError, FgaiError, InputError
from fgai.files import regular, write_atomic
from fgai.typed import typed

__all__ = ["LogFile", "Tracker"]

Values = Mapping[str, float]  # terms of a loss, a validation score, the value of an attack
Summary = Mapping[str, float | str]  # the outcome of a run


class Tracker:
    """Base of callbacks for runs: `train`, `make_faithful` (a run per attempt) and attacks take a `tracker`.

    Override what you need. Calls come in order and from the thread that trains. An exception stops the run,
    after its state is saved if it has a checkpoint; the same call resumes it.
    """

    def on_start(self, run: str, past: Sequence[Values]) -> None:
        """A run, e.g. `vanilla`, begins; `past` holds the values of earlier epochs if it is resumed.

        A log with more epochs than these drops the others.
        """

    def on_epoch(self, run: str, epoch: int, values: Values) -> None:
        """An epoch, counted from 0, is done; for attacks, a value was computed."""

    def on_end(self, run: str, summary: Summary) -> None:
        """A run has ended without an error."""


@typed
class LogFile(Tracker):
    r"""A file with one row per epoch, written at once; a run that starts again replaces its rows.

    A `.csv` has one column per name, a `.jsonl` one object per line and the summary of a run as `end`.
    `InputError` for another suffix, `CheckpointError` if the file exists and is no such log.

    Example:
        >>> log = LogFile("log.jsonl")
        >>> log.on_epoch("vanilla", 0, {"total": 0.5})
        >>> log.path.read_text()
        '{"run": "vanilla", "epoch": 0, "total": 0.5}\n'
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._csv = self.path.suffix.lower() == ".csv"
        if not self._csv and self.path.suffix.lower() != ".jsonl":
            raise InputError(f"`log` must be *.csv or *.jsonl, got {str(path)!r}")
        self._columns = ["run", "epoch"]
        self._rows = self._parse() if self.path.exists() else []
        self._write()

    def on_start(self, run: str, past: Sequence[Values]) -> None:
        """Keep the rows of other runs, and `past` of this one."""
        self._rows = [row for row in self._rows if row["run"] != run]
        self._rows += [{"run": run, "epoch": epoch, **values} for epoch, values in enumerate(past)]
        self._write()

    def on_epoch(self, run: str, epoch: int, values: Values) -> None:
        """Add a row."""
        self._add({"run": run, "epoch": epoch, **values})

    def on_end(self, run: str, summary: Summary) -> None:
        """Add the summary, to a `.jsonl` alone."""
        if not self._csv:
            self._add({"run": run, "end": dict(summary)})

    def _add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if self._csv and not row.keys() <= {*self._columns}:
            self._write()
            return
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                file.write(self._text([row]))
        except OSError as error:
            raise FgaiError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _write(self) -> None:
        self._columns = list(dict.fromkeys([*self._columns, *(name for row in self._rows for name in row)]))
        heading = [dict(zip(self._columns, self._columns, strict=True))] if self._csv else []
        write_atomic(self.path, self._text([*heading, *self._rows]))

    def _text(self, rows: Sequence[dict[str, Any]]) -> str:
        if not self._csv:
            return "".join(json.dumps(row) + "\n" for row in rows)
        out = io.StringIO()
        csv.DictWriter(out, self._columns, restval="", lineterminator="\n").writerows(rows)
        return out.getvalue()

    def _parse(self) -> list[dict[str, Any]]:
        """Return the rows of the file, without a last line that a killed process left incomplete."""
        try:
            text = regular(self.path).read_text(encoding="utf-8")
            text = text[: text.rfind("\n") + 1]
            rows: list[Any]
            if self._csv:
                reader = csv.DictReader(io.StringIO(text), strict=True)
                rows, self._columns = list(reader), list(reader.fieldnames or self._columns)
            else:
                rows = [json.loads(line) for line in text.splitlines()]
            if self._columns[:2] != ["run", "epoch"]:
                raise ValueError("it has other columns")
            if any(not isinstance(row, dict) or not isinstance(row.get("run"), str) for row in rows):
                raise ValueError("a line has no run")
            if any(None in [*row, *row.values()] for row in rows):
                raise ValueError("a line has more or fewer columns")
        except (OSError, ValueError) as error:
            text = f"{self.path} is no log of this kind ({error})"
            raise CheckpointError(f"{text}; name another file") from error
        return [{name: value for name, value in row.items() if value != ""} for row in rows]
