"""Plain values and packed arrays: what a JSON record can hold, and how it is written."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from fgai.errors import CheckpointError, InputError
from fgai.files import check, inflate, most_bytes
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

    Example:
        >>> print(to_text({"name": "x" * 90, "curve": [1.0, 0.5], "about": {"k": "y" * 80}}))
        {
         "name": "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
         "curve": [1.0, 0.5],
         "about": {"k": "yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy"}
        }
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
    """Inverse of `pack_array`.

    Raises:
        CheckpointError: it is damaged or not a packed array.
    """
    check(packed, PackedArray, "a packed array")
    size = _size(packed)
    try:
        raw = inflate(base64.b64decode(packed["data"], validate=True), size)
    except ValueError as error:
        raise CheckpointError(f"a packed array is damaged: {error}") from error
    return np.frombuffer(raw, dtype=np.dtype(packed["dtype"])).reshape(packed["shape"])


def check_arrays(values: Any) -> None:
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
    """Bytes that a packed array claims to have."""
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
