"""The results folder: one JSON record per cell, whole or not there; old searches packed into one file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any, TypeVar

from experiments.cells import PROTOCOL, Cell
from fgai.errors import CheckpointError, InputError
from fgai.files import Schema, check, check_items, gunzip, parse_json, regular, write_atomic
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
PACK = ".jsonl.gz"
"""Ending of a file that holds many records, one to a line, in the order of their paths."""


@dataclass(frozen=True)
class Packed:
    """What packing did.

    Attributes:
        packed: records that were put into the pack.
        rewritten: records that were written anew, smaller.
        before: bytes of all records before.
        after: and now.
    """

    packed: int
    rewritten: int
    before: int
    after: int


class Store:
    """Records under one folder.

    New records are files of their own. `pack` puts those of a search into one compressed file, from where
    they are read like the others; a file wins over a packed record of the same cell.

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
        record = read_record(path) if path.exists() else self._packed(cell.folder).get(path)
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
        packed = {path: r for path, r in self._packed(kind).items() if path.is_relative_to(self.root / kind)}
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

    def pack(self, kind: str = "search") -> Packed:
        """Put every good record of a kind, whatever its task, into one file, and write the others compactly.

        Nothing but white space changes in a record. Equal records give equal bytes. A kill leaves every
        record in a file, in the pack, or in both.

        Args:
            kind: of the cells to pack; its folders are `kind` and `kind-task`.

        Raises:
            CheckpointError: a record is damaged; nothing was changed.
        """
        pack = self.root / f"{kind}{PACK}"
        files = {path: read_record(path) for path in sorted(self.root.rglob("*.json"))}
        before = sum(path.stat().st_size for path in (*files, *([pack] if pack.exists() else [])))
        chosen = {
            path: record
            for path, record in files.items()
            if path.relative_to(self.root).parts[0].partition("-")[0] == kind and record["status"] == "done"
        }
        if chosen:
            held = sorted({**self._packed(kind), **chosen}.items())
            lines = [json.dumps(record, sort_keys=True, allow_nan=False) + "\n" for _, record in held]
            write_atomic(pack, gzip.compress("".join(lines).encode(), 9, mtime=0))
            self._packs.clear()
            self._derived.clear()
            for path in chosen:
                path.unlink()
                with suppress(OSError):  # not empty yet
                    path.parent.rmdir()
                    path.parent.parent.rmdir()
        rewritten = 0
        for path in files.keys() - chosen.keys():
            held_text = path.read_text(encoding="utf-8")
            text = to_text(parse_json(held_text), sort_keys=True) + "\n"  # as it is, not as it is read today
            if text != held_text:
                write_atomic(path, text)
                rewritten += 1
        kept = (*(files.keys() - chosen.keys()), *([pack] if pack.exists() else []))
        return Packed(len(chosen), rewritten, before, sum(path.stat().st_size for path in kept))

    def _record(self, path: Path) -> dict[str, Any]:
        """The record of a file, parsed once until the file changes: every table reads the same ones."""
        written = path.stat().st_mtime_ns
        known = self._held.get(path)
        if known is None or known[0] != written:
            self._held[path] = known = (written, read_record(path))
        return known[1]

    def _packed(self, folder: str) -> dict[Path, dict[str, Any]]:
        """The packed records of a folder's kind, by the paths their files would have."""
        pack = self.root / f"{folder.partition('-')[0]}{PACK}"
        if pack not in self._packs:
            self._packs[pack] = self._unpack(pack) if pack.exists() else {}
        return self._packs[pack]

    def _unpack(self, pack: Path) -> dict[Path, dict[str, Any]]:
        try:
            lines = gunzip(regular(pack).read_bytes()).decode().splitlines()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{pack} is damaged ({error}); restore it") from error
        records = [parsed(line, f"{pack}, line {number}") for number, line in enumerate(lines, 1)]
        try:
            return {self.path(Cell.from_dict(record["cell"])): record for record in records}
        except InputError as error:
            raise CheckpointError(f"{pack} is damaged ({error}); restore it") from error


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
