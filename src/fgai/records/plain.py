"""Plain values and packed arrays: what a JSON record can hold."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fgai.errors import InputError


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


def look_up(values: Mapping[str, Any], path: str) -> Any:
    """Return a nested value by its dotted path, or None."""
    found: Any = values
    for part in path.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found
