"""`EvaluationRecord`: one evaluation as a small JSON document that says everything about itself."""

from __future__ import annotations

import base64
import csv
import dataclasses
import io
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from fgai.errors import CheckpointError, InputError
from fgai.evaluate.table import Table
from fgai.files import write_atomic


def plain(value: Any) -> Any:
    """Return nested values as JSON holds them: tuples as lists, numbers that are not finite as None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | bool | int):
        return value
    raise InputError(f"records hold plain values, got {type(value).__name__}")


def pack_array(array: NDArray[Any]) -> dict[str, Any]:
    """Return an array as JSON: type, shape and compressed little-endian bytes."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    data = base64.b64encode(zlib.compress(little.tobytes(), 9)).decode()
    return {"dtype": little.dtype.str, "shape": list(array.shape), "data": data}


def unpack_array(packed: Mapping[str, Any]) -> NDArray[Any]:
    """Inverse of `pack_array`."""
    raw = zlib.decompress(base64.b64decode(packed["data"]))
    return np.frombuffer(raw, dtype=np.dtype(packed["dtype"])).reshape(packed["shape"])


@dataclass(frozen=True, kw_only=True)
class Document:
    """What all records share: a schema, and files that are whole or not there."""

    SCHEMA: ClassVar[int] = 1
    KIND: ClassVar[str] = "document"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, the schema version first."""
        fields = {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {"kind": self.KIND, "schema": self.SCHEMA, **fields}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`.

        Raises:
            CheckpointError: another kind of record, a newer schema, or fields missing.
        """
        if not isinstance(values, Mapping) or values.get("kind") != cls.KIND:
            found = values.get("kind") if isinstance(values, Mapping) else type(values).__name__
            raise CheckpointError(f"expected a record of kind {cls.KIND!r}, got {found!r}")
        schema = values.get("schema")
        if not isinstance(schema, int) or schema < 1:
            raise CheckpointError(f"the record's schema version is damaged: {schema!r}")
        if schema > cls.SCHEMA:
            raise CheckpointError(
                f"the record was written by a newer fgai (schema {schema}; this one reads up to"
                f" {cls.SCHEMA}); update fgai"
            )
        names = {f.name for f in dataclasses.fields(cls)}
        try:
            return cls._build({key: value for key, value in values.items() if key in names})
        except (TypeError, KeyError) as error:
            raise CheckpointError(f"the record is incomplete: {error}") from error

    @classmethod
    def _build(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields)

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def save(self, path: Path | str) -> Path:
        """Write the record as JSON in one step; a crash leaves the old file as it was."""
        path = Path(path)
        write_atomic(path, self.to_json())
        return path

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a record.

        Raises:
            CheckpointError: the file is missing, damaged, of another kind or from a newer fgai.
        """
        path = Path(path)
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"there is no record at {path}") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is damaged or not a record ({error})") from error
        try:
            return cls.from_dict(values)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord(Document):
    """One model on one dataset under one threat.

    Numbers that are not defined (an overlap where no node has enough neighbours) are None.

    Attributes:
        name: of the row.
        model: class and settings of the model.
        data: name, fingerprint and sizes of the dataset.
        threat: name and budget.
        config: the other arguments of `evaluate`.
        seed: of the attacks and the random ranking.
        version: of fgai and torch.
        device: where it ran.
        seconds: wall-clock time, by part and in all.
        peak_memory: bytes, and how they were counted.
        metrics: nested, see docs/metrics.md.
        ledgers: what each attack spent and reached.
        warnings: code and message of everything raised on the way.
        per_node: packed arrays, or nothing; see `node_values`.
    """

    KIND: ClassVar[str] = "evaluation"

    name: str
    model: dict[str, Any]
    data: dict[str, Any]
    threat: dict[str, Any]
    config: dict[str, Any]
    seed: int
    version: dict[str, str]
    device: str
    seconds: dict[str, float]
    peak_memory: dict[str, Any]
    metrics: dict[str, Any]
    ledgers: dict[str, Any]
    warnings: list[dict[str, str]] = field(default_factory=list)
    per_node: dict[str, Any] = field(default_factory=dict)

    def value(self, path: str) -> Any:
        """Return one metric by its dotted name, e.g. `overlap.prediction.touched.all`.

        Raises:
            InputError: there is no such metric; lists what there is at that level.
        """
        found: Any = self.metrics
        for part in path.split("."):
            if isinstance(found, list) and part.lstrip("-").isdigit() and abs(int(part)) < len(found):
                found = found[int(part)]
            elif isinstance(found, Mapping) and part in found:
                found = found[part]
            else:
                options = ", ".join(found) if isinstance(found, Mapping) else "nothing further"
                raise InputError(f"the record has no metric {path!r}: no {part!r} among {options}")
        return found

    def get(self, path: str) -> Any:
        """Return one metric by its dotted name, or None where the record lacks it."""
        try:
            return self.value(path)
        except InputError:
            return None

    def node_values(self, name: str) -> NDArray[Any]:
        """Return one array of per-node values; only there when `evaluate(..., per_node=True)`.

        Raises:
            InputError: the record does not hold it.
        """
        if name not in self.per_node:
            known = ", ".join(self.per_node) or "nothing; evaluate with `per_node=True`"
            raise InputError(f"the record holds no per-node {name!r}; it holds {known}")
        return unpack_array(self.per_node[name])

    def tables(self) -> list[Table]:
        """Return every metric as one table, and the explanation metrics beside their null rows."""
        from fgai.evaluate.layout import explanation_table, long_table

        return [long_table(self), explanation_table([self], self)]

    def show(self, console: Console | None = None) -> None:
        """Print in a terminal."""
        for table in self.tables():
            table.show(console)

    def to_markdown(self) -> str:
        """Return the tables as Markdown."""
        return "\n\n".join(f"**{table.title}**\n\n{table.to_markdown()}" for table in self.tables())

    def to_latex(self) -> str:
        """Return the tables as LaTeX."""
        return "\n\n".join(table.to_latex() for table in self.tables())

    def to_csv(self) -> str:
        """Return every number as CSV: dotted metric and value, layers and curves by position."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["metric", "value"])
        writer.writerows(_flat("", self.metrics))
        return out.getvalue()


def _flat(prefix: str, values: Any) -> list[list[Any]]:
    if not isinstance(values, Mapping | list):
        return [[prefix, "" if values is None else values]]
    items = enumerate(values) if isinstance(values, list) else values.items()
    return [row for key, value in items for row in _flat(f"{prefix}.{key}" if prefix else str(key), value)]
