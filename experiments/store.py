"""The results folder: one JSON record per cell, whole or not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any

from experiments.cells import PROTOCOL, Cell
from fgai.errors import CheckpointError
from fgai.files import write_atomic

SCHEMA = 1
FIELDS = ("protocol", "key", "cell", "status", "seconds")
STALE_SECONDS = 600.0


class Store:
    """Records under one folder.

    Args:
        root: the folder; made when the first record is written.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def path(self, cell: Cell) -> Path:
        """Where the record of a cell lies."""
        return self.root / cell.path

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """Return the record of a cell, or None.

        Raises:
            CheckpointError: if the file is damaged, from a newer fgai, or of another cell under this name.
        """
        path = self.path(cell)
        if not path.exists():
            return None
        record = read_record(path)
        if record["key"] != cell.key or record["cell"] != cell.to_dict():
            raise CheckpointError(
                f"{path} holds another cell under this name; move it away, nothing was overwritten"
            )
        return record

    def write(self, cell: Cell, record: dict[str, Any]) -> Path:
        """Write a record in one step."""
        path = self.path(cell)
        text = {"schema": SCHEMA, "protocol": PROTOCOL, "key": cell.key, "cell": cell.to_dict(), **record}
        write_atomic(path, json.dumps(text, indent=1, sort_keys=True, allow_nan=False) + "\n")
        return path

    def sweep(self) -> int:
        """Delete what killed processes left half written, ten minutes old or more; return how many."""
        gone = 0
        for path in self.root.rglob(".*.json.*"):
            with suppress(OSError):  # another process may be sweeping too
                if time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()
                    gone += 1
        return gone

    def records(self, kind: str = "evaluate") -> Iterator[dict[str, Any]]:
        """Yield every good record of a kind, in a fixed order; failed cells are left out."""
        for path in sorted((self.root / kind).rglob("*.json")):
            record = read_record(path)
            if record["status"] == "done" and record["protocol"] == PROTOCOL:
                yield record


def read_record(path: Path) -> dict[str, Any]:
    """Read one record.

    Raises:
        CheckpointError: if it is truncated, foreign, or from a newer fgai.
    """
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        schema = int(record["schema"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is not a whole record ({error}); delete it to run the cell again"
        ) from error
    if schema != SCHEMA:
        remedy = "update fgai" if schema > SCHEMA else "delete it to run the cell again"
        raise CheckpointError(f"{path} has schema {schema}, this fgai reads {SCHEMA}; {remedy}")
    if missing := [name for name in FIELDS if name not in record]:
        raise CheckpointError(
            f"{path} is not a whole record (no {missing[0]}); delete it to run the cell again"
        )
    return record
