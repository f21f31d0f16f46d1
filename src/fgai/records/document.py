"""`Document`, the base of all records, and the plain values and packed arrays that a JSON file holds."""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self, TypedDict, get_type_hints

import numpy as np
from numpy.typing import NDArray

from fgai.errors import CheckpointError, InputError
from fgai.files import (
    add_checksum,
    check,
    check_items,
    inflate,
    most_bytes,
    parse_json,
    regular,
    take_checksum,
    write_atomic,
)
from fgai.records.table import Tabled
from fgai.typed import typed

WIDTH = 200  # longest text of a mapping or a list of lists on one line of a record
DTYPES = ("|b1", "|i1", "|u1", "<i2", "<i4", "<i8", "<f4", "<f8")  # of packed arrays


class PackedArray(TypedDict):
    """An array as JSON, see `pack_array`."""

    dtype: str
    shape: list[int]
    data: str


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


@typed
def to_text(values: Any, *, sort_keys: bool = False) -> str:
    """Return plain values as JSON that is small and can be compared line by line.

    Lists of scalars, and whatever fits into `WIDTH` characters, take one line; the rest one line per item.
    """
    return _text(values, 0, sort_keys)


def _text(value: Any, depth: int, sort_keys: bool) -> str:
    line = json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys)
    nested = isinstance(value, Mapping) or (
        isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value)
    )
    if not nested or len(line) <= WIDTH:
        return line
    if isinstance(value, Mapping):
        brackets, items = "{}", sorted(value.items()) if sort_keys else list(value.items())
        rows = [
            f"{json.dumps(key, ensure_ascii=False)}: {_text(v, depth + 1, sort_keys)}" for key, v in items
        ]
    else:
        brackets, rows = "[]", [_text(item, depth + 1, sort_keys) for item in value]
    body = ",\n".join(f"{' ' * (depth + 1)}{row}" for row in rows)
    return f"{brackets[0]}\n{body}\n{' ' * depth}{brackets[1]}"


@typed
def pack_array(array: NDArray[Any]) -> dict[str, Any]:
    """Return an array as JSON: type, shape and compressed little-endian bytes."""
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    data = base64.b64encode(zlib.compress(little.tobytes(), 9)).decode()
    return {"dtype": little.dtype.str, "shape": list(array.shape), "data": data}


@typed
def unpack_array(packed: Mapping[str, Any]) -> NDArray[Any]:
    """Inverse of `pack_array`; `CheckpointError` if it is damaged or not a packed array."""
    check(packed, PackedArray, "a packed array")
    size = _size(packed)
    try:
        raw = inflate(base64.b64decode(packed["data"], validate=True), size)
    except ValueError as error:
        raise CheckpointError(f"a packed array is damaged: {error}") from error
    return np.frombuffer(raw, dtype=np.dtype(packed["dtype"])).reshape(packed["shape"])


def _check_arrays(values: Any) -> None:
    """Raise `CheckpointError` if packed arrays would unpack to more bytes than their text can hold."""
    total = needed = 0
    stack = [values]
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping) and PackedArray.__required_keys__ <= value.keys():
            check(value, PackedArray, "a packed array")
            total, needed = total + len(value["data"]), needed + _size(value)
        elif isinstance(value, Mapping):
            stack += value.values()
        elif isinstance(value, list):
            stack += [item for item in value if isinstance(item, Mapping | list)]
    if needed > most_bytes(total):
        raise CheckpointError(f"packed arrays claim {needed} bytes, more than {total} characters can hold")


def _size(packed: Mapping[str, Any]) -> int:
    if packed["dtype"] not in DTYPES or any(length < 0 for length in packed["shape"]):
        raise CheckpointError(f"a packed array has type {packed['dtype']!r} and shape {packed['shape']}")
    return int(math.prod(packed["shape"]) * np.dtype(packed["dtype"]).itemsize)


@typed
def look_up(values: Mapping[str, Any], path: str) -> Any:
    """Return a nested value by its dotted path, or None."""
    value: Any = values
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


@typed
@dataclass(frozen=True, kw_only=True)
class Document:
    """Base of all records: fields with a schema that are saved as JSON."""

    SCHEMA: ClassVar[int] = 1
    KIND: ClassVar[str] = "document"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, the schema version first."""
        fields = {f.name: plain(getattr(self, f.name)) for f in dataclasses.fields(self)}
        return {"kind": self.KIND, "schema": self.SCHEMA, **fields}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; `CheckpointError` for another kind or schema, or fields that do not fit."""
        kind = values.get("kind") if isinstance(values, Mapping) else type(values).__name__
        if not isinstance(values, Mapping) or kind != cls.KIND:
            raise CheckpointError(f"expected a record of kind {cls.KIND!r}, got {kind!r}")
        schema = values.get("schema")
        if type(schema) is not int or schema < 1:
            raise CheckpointError(f"the record's schema version is damaged: {schema!r}")
        if schema > cls.SCHEMA:
            reads = f"schema {schema}; this one reads up to {cls.SCHEMA}"
            raise CheckpointError(f"the record was written by a newer fgai ({reads}); update fgai")
        body = {key: value for key, value in values.items() if key not in ("kind", "schema")}
        fields = [f.name for f in dataclasses.fields(cls)]
        # Every field is written, empty ones too; older records have no provenance.
        required = [name for name in fields if name != "provenance"]
        check_items(body, cls.layout(), "the record", required=required)
        _check_arrays(body)
        return cls._build({key: value for key, value in body.items() if key in fields})

    @classmethod
    def layout(cls) -> dict[str, Any]:
        """Return the keys of a file of this kind, and the types of their plain values."""
        hints = get_type_hints(cls)
        return {f.name: hints[f.name] for f in dataclasses.fields(cls)}

    @classmethod
    def _build(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields)

    def to_json(self) -> str:
        """Return the record as JSON text; see `fgai.records.to_text`."""
        return self._text(self.to_dict())

    def _text(self, values: dict[str, Any]) -> str:
        return to_text(values) + "\n"

    def save(self, path: Path | str) -> Path:
        """Write the record as JSON with a checksum, in one step; a crash leaves the old file as it was."""
        write_atomic(Path(path), self._text(add_checksum(self.to_dict())))
        return Path(path)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        """Read a record; `CheckpointError` if it is missing, damaged, changed, of another kind or newer."""
        values = read_json(Path(path))
        try:
            return cls.from_dict(values)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error


@typed
@dataclass(frozen=True, kw_only=True)
class TabledDocument(Document, Tabled):
    """A document that prints as tables."""

    def __str__(self) -> str:
        return self.to_markdown()


@typed
def read_json(path: Path) -> Any:
    """Return a JSON file's values without its checksum; `CheckpointError` if missing, damaged or changed."""
    try:
        return take_checksum(parse_json(regular(path).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise CheckpointError(f"there is no record at {path}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged or not a record ({error})") from error
