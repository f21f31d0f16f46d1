"""The results folder: one JSON record per cell, whole or not there, or packed in a file of many."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from time import time
from typing import Any, TypeVar

from experiments.cells import PROTOCOL, Cell
from fgai.attacks import Ledger
from fgai.errors import CheckpointError, InputError
from fgai.evaluation import damage_by_endpoints
from fgai.files import Schema, check, check_items, parse_json, regular, write_atomic
from fgai.records import look_up, to_text

T = TypeVar("T")
SCHEMA = 2
"""2: records say what they were made by (`fingerprint`)."""
READABLE = (1, SCHEMA)
RENAMED = {"fgai-paper": "fgai-injection"}
"""Methods of schema 1 by the names they have now."""
FIELDS: Schema = {"protocol": int, "key": str, "cell": dict[str, Any], "status": str, "seconds": float}
"""What every record holds; the rest depends on its kind."""
STALE_SECONDS = 600.0
PACK = ".jsonl"
"""Ending of a file that holds many records, one to a line, ordered by path; the last line is a checksum."""
CLAIMS = f"claims{PACK}"
"""Packed records, of all kinds, of settings from before there was one for every graph. They have the key
`earlier`, settings, fingerprint and versions, and of their numbers those that tables read."""
DIGITS = 6
"""Significant digits of packed numbers."""
METRICS = (
    "f1", "accuracy", "roc_auc", "average_precision", "g_tvd", "g_jsd", "similarity.overlap",
    "similarity.rank_correlation", "sharpness.clean", "sharpness.vanilla", "overlap.chance",
    "overlap_touched.prediction", "endpoints.cover.explanation.overlap", "lost", "definition", "explanations",
    "f_slope", "truth", "truth_prediction", "truth_explanation",
    *map(".".join, product(["null"], ["uniform", "random"], ["truth", "truth_prediction"])),
    *map(".".join, product(["null"], ["uniform", "random"], ["f_slope"], ["graph", "node"],
                           ["clean", "attacked"], ["plus", "minus", "gap"])),
)  # fmt: skip
"""Metrics of packed evaluations: those that tables and figures read."""
PROVED = ("norm", "radius", "k1", "k2", "explanation")
"""What packed certificates say of themselves."""
LAYER = ("topk", "class", "sharpness", "trivial_share")
"""What packed certificates say of a layer."""


class Store:
    """Records under one folder.

    New records are files of their own. `pack` puts those of a kind, and of a search those of a method, into
    one file, from where they are read like the others; a file wins over a packed record of the same cell, and
    any record over one in `CLAIMS`.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._packs: dict[str, dict[Path, dict[str, Any]]] = {}
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

    def finished(self, cells: Iterable[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
        """Yield the cells that have a good record, each with it."""
        for cell in cells:
            record = self.read(cell)
            if record is not None and record["status"] == "done":
                yield cell, record

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
        held = self._packed(kind)
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
        """Put every good record into a file of many, as small as `slim` makes it; return how many.

        Equal records give equal bytes. A kill leaves every record in a file, in the pack, or in both.

        Raises:
            CheckpointError: a record or a pack is damaged; nothing was changed.
        """
        packs: dict[Path, dict[Path, dict[str, Any]]] = {}
        for path in sorted(self.root.rglob("*.json")):
            record = read_record(path)
            cell = Cell.from_dict(record["cell"])
            if record["status"] == "done" and self.path(cell) == path:  # no record of a folder within
                name = cell.folder.partition("-")[0] + f"-{cell.method}" * (cell.kind == "search")
                packs.setdefault(self.root / f"{name}{PACK}", {})[path] = slim(record)
        held = {pack: {**self._unpack(pack), **chosen} for pack, chosen in packs.items()}
        done = {path for chosen in packs.values() for path in chosen}
        if done & (claims := self._unpack(self.root / CLAIMS)).keys():
            held[self.root / CLAIMS] = {path: claims[path] for path in claims.keys() - done}
        for pack, records in held.items():
            lines = [
                json.dumps(records[path], sort_keys=True, allow_nan=False) + "\n" for path in sorted(records)
            ]
            write_atomic(pack, "".join([*lines, _last_line(lines)]))
        for chosen in packs.values():
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

    def _packed(self, folder: str) -> dict[Path, dict[str, Any]]:
        """The packed records of a kind, of all tasks and methods, by the paths their files would have."""
        kind = folder.partition("-")[0]
        if kind not in self._packs:
            packs = (self.root / CLAIMS, *sorted(self.root.glob(f"{kind}*{PACK}")))
            self._packs[kind] = {path: one for pack in packs for path, one in self._unpack(pack).items()}
        return self._packs[kind]

    def _unpack(self, pack: Path) -> dict[Path, dict[str, Any]]:
        if not pack.exists():
            return {}
        try:
            lines = regular(pack).read_text(encoding="utf-8").splitlines(keepends=True)
            if not lines or lines.pop() != _last_line(lines):
                raise ValueError("its last line is not the checksum of the others")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{pack} is damaged ({error}); restore it") from error
        records = [parsed(line, f"{pack}, line {number}") for number, line in enumerate(lines, 1)]
        try:
            return {self.path(Cell.from_dict(record["cell"])): record for record in records}
        except InputError as error:
            raise CheckpointError(f"{pack} is damaged ({error}); restore it") from error


def _last_line(lines: Iterable[str]) -> str:
    return json.dumps({"sha256": hashlib.sha256("".join(lines).encode()).hexdigest()}) + "\n"


def slim(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with `METRICS` of its evaluations, and what members of an ensemble reached.

    Words of certificates and warnings are left out. Numbers have `DIGITS`.
    """
    found = {name: value for name, value in record.items() if name not in ("data", "winners")}
    if "data" in record:
        found["data"] = _chosen(record["data"], ("name", "fingerprint"))
    if "warnings" in record:
        codes = (text.partition("]")[0] for text in record["warnings"] if text.startswith("["))
        found["warnings"] = sorted({f"{code}]" for code in codes})
    if "evaluations" in record:
        found["evaluations"] = {name: _evaluation(one) for name, one in record["evaluations"].items()}
    if "certificate" in record:
        layers = [_chosen(layer, LAYER) for layer in record["certificate"]["layers"]]
        found["certificate"] = {**_chosen(record["certificate"], PROVED), "layers": layers}
    as_it_is = ("cell", "training")
    return {name: value if name in as_it_is else _rounded(value) for name, value in found.items()}


def _evaluation(evaluation: dict[str, Any]) -> dict[str, Any]:
    ledgers = {what: one for what, one in evaluation.get("ledgers", {}).items() if one.get("members")}
    metrics = dict(evaluation["metrics"])
    if "explanation" in ledgers:
        metrics["lost"] = {"explanation": lost(ledgers["explanation"])}
    return {
        "metrics": _chosen(metrics, METRICS),
        "reached": {
            **evaluation.get("reached", {}),
            **{objective: reached(ledger) for objective, ledger in ledgers.items()},
        },
    }


def reached(ledger: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return the largest damage of every member of an ensemble, by the rule of its endpoints."""
    found: dict[str, dict[str, float]] = {}
    for row, damage in zip(ledger["members"], ledger["damages"][1:], strict=True):
        held = found.setdefault(row["endpoints"], {})
        held[row["member"]] = max(damage, held.get(row["member"], 0.0))
    return found


def lost(ledger: Mapping[str, Any]) -> dict[str, float]:
    """Return the share of the top 5 lost at the endpoints of every rule."""
    return damage_by_endpoints(Ledger(members=ledger["members"], damages=ledger["damages"]))


def _chosen(values: Mapping[str, Any], paths: Iterable[str]) -> dict[str, Any]:
    """The parts of a tree at some dotted paths, those that are there."""
    found: dict[str, Any] = {}
    for path in paths:
        if (value := look_up(values, path)) is not None:
            *parents, name = path.split(".")
            place = found
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = value
    return found


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value


def read_record(path: Path) -> dict[str, Any]:
    """Read one record; raise `CheckpointError` if it is truncated, foreign, or from a newer fgai."""
    try:
        text = regular(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a whole record ({error}); delete it to run the cell again"
        ) from error
    return parsed(text, str(path))


def parsed(text: str, where: str) -> dict[str, Any]:
    """Return a record from its text; `where` it stands goes into messages."""
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
