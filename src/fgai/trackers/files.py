"""Logs in files: CSV and JSON lines. A resumed run neither repeats nor skips an epoch in them."""

from __future__ import annotations

import csv
import io
import json
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fgai.errors import CheckpointError, FgaiError
from fgai.files import regular, write_atomic
from fgai.trackers.base import Summary, Tracker, Values

Row = dict[str, Any]


class FileTracker(Tracker):
    """A log of rows in one file; several runs may share it.

    A run that begins anew replaces its rows, one that goes on is put back to what its checkpoint knows. Every
    row is written as it comes, so a killed process loses none.

    Args:
        path: of the file; it is made with the folder around it.
        name: put before the names of runs, for files that several trainings share.

    Raises:
        CheckpointError: there is a file, and it is no such log.
        FgaiError: it cannot be written.
    """

    def __init__(self, path: Path | str, *, name: str = "") -> None:
        self.path, self.name = Path(path), name
        self._rows: list[Row] = self._parse() if self.path.exists() else []
        self._write()

    def on_start(self, run: str, past: Sequence[Values]) -> None:
        """Keep the rows of other runs, and of this one what is known."""
        run = self._named(run)
        kept = [row for row in self._rows if row["run"] != run]
        self._rows = kept + [_row(run, epoch, values) for epoch, values in enumerate(past)]
        self._write()

    def on_epoch(self, run: str, epoch: int, values: Values) -> None:
        """Add a row."""
        self._add(_row(self._named(run), epoch, values))

    def _named(self, run: str) -> str:
        return f"{self.name}/{run}" if self.name else run

    def _write(self) -> None:
        write_atomic(self.path, self._text(self._rows))

    def _add(self, row: Row) -> None:
        self._rows.append(row)
        self._append(self._line(row))

    def _append(self, line: str) -> None:
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                file.write(line)
        except OSError as error:
            raise FgaiError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _parse(self) -> list[Row]:
        """Rows of the file; a last line that a killed process left half-written is dropped."""
        try:
            text = regular(self.path).read_text(encoding="utf-8")
            whole = text[: text.rfind("\n") + 1]
            rows = self._read(whole)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.path} is no log of this kind ({error}); name another file"
            ) from error
        if any(not isinstance(row, dict) or not isinstance(row.get("run"), str) for row in rows):
            raise self._foreign("a line has no run")
        return rows

    def _foreign(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is no log of this kind ({reason}); name another file")

    @abstractmethod
    def _read(self, text: str) -> list[Row]:
        """The rows of whole lines; raises ValueError where they are none."""

    @abstractmethod
    def _text(self, rows: Sequence[Row]) -> str:
        """The whole file."""

    @abstractmethod
    def _line(self, row: Row) -> str:
        """What one more row adds to the file."""


class JsonlTracker(FileTracker):
    r"""One JSON object in a line for every epoch, and one with `end` for what a run came to.

    Example:
        >>> tracker = JsonlTracker("log.jsonl")
        >>> tracker.on_start("vanilla", [])
        >>> tracker.on_epoch("vanilla", 0, {"total": 0.5})
        >>> tracker.path.read_text()
        '{"run": "vanilla", "epoch": 0, "total": 0.5}\n'
    """

    def on_end(self, run: str, summary: Summary) -> None:
        """Add a line with what the run came to."""
        self._add({"run": self._named(run), "end": dict(summary)})

    def _read(self, text: str) -> list[Row]:
        return [json.loads(line) for line in text.splitlines()]

    def _text(self, rows: Sequence[Row]) -> str:
        return "".join(map(self._line, rows))

    def _line(self, row: Row) -> str:
        return json.dumps(row) + "\n"


class CsvTracker(FileTracker):
    r"""One row for every epoch and one column for every name; cells of names a run has not are empty.

    Example:
        >>> tracker = CsvTracker("log.csv")
        >>> tracker.on_start("vanilla", [])
        >>> tracker.on_epoch("vanilla", 0, {"total": 0.5})
        >>> tracker.path.read_text()
        'run,epoch,total\nvanilla,0,0.5\n'
    """

    def __init__(self, path: Path | str, *, name: str = "") -> None:
        self._columns = ["run", "epoch"]
        super().__init__(path, name=name)

    def _add(self, row: Row) -> None:
        if new := [name for name in row if name not in self._columns]:
            self._rows.append(row)
            self._columns += new
            self._write()
        else:
            super()._add(row)

    def _read(self, text: str) -> list[Row]:
        reader = csv.DictReader(io.StringIO(text), strict=True)
        rows = list(reader)
        found = list(reader.fieldnames or self._columns)
        if found[:2] != self._columns or any(None in row or None in row.values() for row in rows):
            raise ValueError("it has other columns")
        self._columns = found
        return [{name: value for name, value in row.items() if value != ""} for row in rows]

    def _text(self, rows: Sequence[Row]) -> str:
        self._columns += sorted({name for row in rows for name in row} - set(self._columns))
        return self._written([dict(zip(self._columns, self._columns, strict=True)), *rows])

    def _line(self, row: Row) -> str:
        return self._written([row])

    def _written(self, rows: Sequence[Row]) -> str:
        out = io.StringIO()
        csv.DictWriter(out, self._columns, restval="", lineterminator="\n").writerows(rows)
        return out.getvalue()


def _row(run: str, epoch: int, values: Values) -> Row:
    return {"run": run, "epoch": epoch, **values}
