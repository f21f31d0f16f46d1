"""The results folder: one JSON record per cell, whole or not there, or packed with those of its kind."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from time import time
from typing import Any, TypeVar

from experiments.cells import PROTOCOL, Cell
from fgai.errors import CheckpointError, InputError
from fgai.files import Schema, check, check_items, parse_json, regular, write_atomic
from fgai.records import to_text

T = TypeVar("T")
SCHEMA = 2
"""2: records say what they were made by (`fingerprint`), and which member of an ensemble won (`winners`)."""
READABLE = (1, SCHEMA)
RENAMED = {"fgai-paper": "fgai-injection"}
"""Methods of schema 1 by the names they have now."""
FIELDS: Schema = {"protocol": int, "key": str, "cell": dict[str, Any], "status": str, "seconds": float}
"""What every record holds; the rest depends on its kind."""
STALE_SECONDS = 600.0
PACK = ".jsonl"
"""Ending of a file that holds many records, one to a line, in the order of their paths."""
DIGITS = 9
"""Significant digits of the numbers of packed evaluations: those of a float32."""


class Store:
    """Records under one folder.

    New records are files of their own. `pack` puts those of a kind into one file, from where they are read
    like the others; a file wins over a packed record of the same cell.

    Args:
        root: the folder; made when the first record is written.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._packs: dict[Path, dict[Path, dict[str, Any]]] = {}
        self._held: dict[Path, tuple[int, dict[str, Any]]] = {}
        self._derived: dict[Hashable, tuple[Any, Any]] = {}

    def path(self, cell: Cell) -> Path:
        """Where the record of a cell lies, or would lie."""
        return self.root / cell.path

    def read(self, cell: Cell) -> dict[str, Any] | None:
        """Return the record of a cell, or None.

        Raises:
            CheckpointError: if the file is damaged, from a newer fgai, or of another cell under this name.
        """
        path = self.path(cell)
        record = read_record(path) if path.exists() else self._packed(self._pack_of(cell.folder)).get(path)
        if record is not None and (record["key"] != cell.key or record["cell"] != cell.to_dict()):
            raise CheckpointError(
                f"{path} holds another cell under this name; move it away, nothing was overwritten"
            )
        return record

    def write(self, cell: Cell, record: dict[str, Any]) -> Path:
        """Write a record in one step."""
        path = self.path(cell)
        values = {"schema": SCHEMA, "protocol": PROTOCOL, "key": cell.key, "cell": cell.to_dict(), **record}
        write_atomic(path, to_text(values, sort_keys=True) + "\n")
        return path

    def sweep(self) -> int:
        """Delete what killed processes left half written, ten minutes old or more; return how many."""
        gone = 0
        for path in (*self.root.rglob(".*.json.*"), *self.root.glob(f".*{PACK}.*")):
            with suppress(OSError):  # another process may be sweeping too
                if time() - path.stat().st_mtime > STALE_SECONDS:
                    path.unlink()
                    gone += 1
        return gone

    def records(self, kind: str = "evaluate") -> Iterator[dict[str, Any]]:
        """Yield every good record of a kind, in a fixed order; failed cells are left out."""
        files = dict.fromkeys((self.root / kind).rglob("*.json"))
        held = self._packed(self._pack_of(kind))
        packed = {path: record for path, record in held.items() if path.is_relative_to(self.root / kind)}
        for path in sorted({**packed, **files}):
            record = self._record(path) if path in files else packed[path]
            if record["status"] == "done" and record["protocol"] == PROTOCOL:
                yield record

    def derived(self, name: Hashable, kinds: Sequence[str], make: Callable[[], T]) -> T:
        """Return what `make` makes of the records of some kinds, made once until one of them changes.

        Many tables of a page begin with the same reading. What is returned is shared: nobody may change it.
        """
        files = [path for kind in kinds for path in (self.root / kind).rglob("*.json")]
        state = sorted((path, path.stat().st_mtime_ns) for path in files)
        known = self._derived.get(name)
        if known is None or known[0] != state:
            self._derived[name] = known = (state, make())
        found: T = known[1]
        return found

    def pack(self) -> int:
        """Put every good record into the file of its kind, as small as `slim` makes it; return how many.

        Equal records give equal bytes. A kill leaves every record in a file, in the pack, or in both.

        Raises:
            CheckpointError: a record or a pack is damaged; nothing was changed.
        """
        packs: dict[Path, dict[Path, dict[str, Any]]] = {}
        for path in sorted(self.root.rglob("*.json")):
            record = read_record(path)
            cell = Cell.from_dict(record["cell"])
            if record["status"] == "done" and self.path(cell) == path:  # no record of a folder within
                packs.setdefault(self._pack_of(cell.folder), {})[path] = record
        held = {pack: {**self._packed(pack), **chosen} for pack, chosen in packs.items()}
        for pack, chosen in packs.items():
            records = [slim(record) for _, record in sorted(held[pack].items())]
            lines = [json.dumps(record, sort_keys=True, allow_nan=False) + "\n" for record in records]
            write_atomic(pack, "".join(lines))
            for path in chosen:
                path.unlink()
                with suppress(OSError):  # not empty yet
                    path.parent.rmdir()
                    path.parent.parent.rmdir()
        self._packs.clear()
        self._derived.clear()
        return sum(map(len, packs.values()))

    def _record(self, path: Path) -> dict[str, Any]:
        """The record of a file, parsed once until the file changes: every table reads the same ones."""
        written = path.stat().st_mtime_ns
        known = self._held.get(path)
        if known is None or known[0] != written:
            self._held[path] = known = (written, read_record(path))
        return known[1]

    def _pack_of(self, folder: str) -> Path:
        """The file that packs a folder's records, those of other tasks included."""
        return self.root / f"{folder.partition('-')[0]}{PACK}"

    def _packed(self, pack: Path) -> dict[Path, dict[str, Any]]:
        """The records of a pack, by the paths their files would have."""
        if pack not in self._packs:
            self._packs[pack] = self._unpack(pack) if pack.exists() else {}
        return self._packs[pack]

    def _unpack(self, pack: Path) -> dict[Path, dict[str, Any]]:
        try:
            lines = regular(pack).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{pack} is damaged ({error}); restore it") from error
        records = [_with_rows(parsed(line, f"{pack}, line {number}")) for number, line in enumerate(lines, 1)]
        try:
            return {self.path(Cell.from_dict(record["cell"])): record for record in records}
        except InputError as error:
            raise CheckpointError(f"{pack} is damaged ({error}); restore it") from error


def slim(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without curves of searches, and of trainings whose losses the figure `loss` leaves out.

    Of the members of an ensemble it has names and endpoints, as columns. Evaluations have nine digits.
    """
    cell, training = record["cell"], dict(record.get("training", {}))
    if (cell["kind"], cell["method"], cell["seed"]) != ("evaluate", "fgai", 0):
        training.pop("curve", None)
    found = {**record, "training": training} if training else dict(record)
    if "evaluations" in record:
        found["evaluations"] = _rounded(_changed_ledgers(record["evaluations"], _as_columns))
    return found


def _changed_ledgers(
    evaluations: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    return {
        name: {**one, "ledgers": {what: change(ledger) for what, ledger in one["ledgers"].items()}}
        if "ledgers" in one
        else one
        for name, one in evaluations.items()
    }


def _as_columns(ledger: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in ledger.items() if name != "curve"}
    if isinstance(rows := ledger.get("members"), list) and rows:
        kept["members"] = {
            name: [row[name] for row in rows] for name in ("endpoints", "member") if name in rows[0]
        }
    return kept


def _with_rows(record: dict[str, Any]) -> dict[str, Any]:
    def as_rows(ledger: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(columns := ledger.get("members"), dict):
            return ledger
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return {**ledger, "members": rows}

    if "evaluations" not in record:
        return record
    return {**record, "evaluations": _changed_ledgers(record["evaluations"], as_rows)}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value


def read_record(path: Path) -> dict[str, Any]:
    """Read one record.

    Raises:
        CheckpointError: if it is truncated, foreign, or from a newer fgai.
    """
    try:
        text = regular(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a whole record ({error}); delete it to run the cell again"
        ) from error
    return parsed(text, str(path))


def parsed(text: str, where: str) -> dict[str, Any]:
    """Return a record from its text; `where` it stands goes into messages.

    Raises:
        CheckpointError: see `read_record`.
    """
    try:
        record: dict[str, Any] = parse_json(text)
        check(record, dict[str, Any], "the record")
        check(record.get("schema"), int, "schema of the record")
        schema = int(record["schema"])
    except (ValueError, CheckpointError) as error:
        raise CheckpointError(
            f"{where} is not a whole record ({error}); delete it to run the cell again"
        ) from error
    if schema not in READABLE:
        remedy = "update fgai" if schema > SCHEMA else "delete it to run the cell again"
        raise CheckpointError(
            f"{where} has schema {schema}, this fgai reads {min(READABLE)} to {SCHEMA}; {remedy}"
        )
    try:
        check_items({name: record[name] for name in FIELDS if name in record}, FIELDS, where, required=FIELDS)
    except CheckpointError as error:
        raise CheckpointError(f"not a whole record: {error}; delete it to run the cell again") from error
    if schema == 1 and (method := record["cell"].get("method")) in RENAMED:
        record["cell"] = {**record["cell"], "method": RENAMED[method]}
    return record
