"""Read files that may be damaged or hostile: checksums, JSON, compressed bytes and arrays, all bounded."""

from __future__ import annotations

import hashlib
import io
import json
import math
import stat
import struct
import types
import zipfile
import zlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import (
    Any,
    Literal,
    NoReturn,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

import numpy as np
from numpy.typing import NDArray

from fgai.errors import CheckpointError

CHECKSUM = "checksum"


def regular(path: Path | str) -> Path:
    """Return the path of a regular file, or of a link to one; `OSError` for a folder, a pipe or a device."""
    file = Path(path)
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(f"{file} is not a regular file")
    return file


def digest_of(path: Path | str) -> str:
    """Return the SHA-256 of a regular file, in hexadecimal."""
    with regular(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def add_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return plain values with their SHA-256 under `checksum`.

    Example:
        >>> take_checksum(add_checksum({"k": 5}))
        {'k': 5}
    """
    return {**values, CHECKSUM: _sha256(values)}


def take_checksum(values: Any) -> Any:
    """Return plain values without their `checksum`, if any; `ValueError` if it is that of other values."""
    if not isinstance(values, Mapping) or CHECKSUM not in values:
        return values
    rest = {name: value for name, value in values.items() if name != CHECKSUM}
    if values[CHECKSUM] != _sha256(rest):
        raise ValueError("its contents do not fit its checksum")
    return rest


def _sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


MOST_DEPTH = 64  # levels of nesting in a file; fgai's own have fewer than ten
LARGEST = 1 << 64  # whole numbers are smaller: floats, seeds and lengths of tensors


def parse_json(text: str | bytes, *, finite: bool = True) -> Any:
    """Return the value of JSON text; with `finite`, NaN and infinities are refused.

    `ValueError` if it is no JSON, has a duplicate key, nests too deeply, or a number is too large.

    Example:
        >>> parse_json('{"k": [1, 2.5]}')
        {'k': [1, 2.5]}
        >>> parse_json('{"k": 1, "k": 2}')
        Traceback (most recent call last):
        ValueError: duplicate key 'k'
    """
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse if finite else None)
    except RecursionError:
        raise ValueError(f"it nests deeper than {MOST_DEPTH} levels") from None
    _check_numbers(value, finite)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for name, value in pairs:
        if name in mapping:
            raise ValueError(f"duplicate key {name!r}")
        mapping[name] = value
    return mapping


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _check_numbers(value: Any, finite: bool) -> None:
    """Check every value, level by level: recursion would fail at deep nesting."""
    level = [value]
    for _ in range(MOST_DEPTH):
        below: list[Any] = []
        for item in level:
            kind = type(item)
            if kind is dict:
                below += item.values()
            elif kind is list:
                below += item
            elif kind is int and abs(item) >= LARGEST:
                raise ValueError(f"a number of {len(str(abs(item)))} digits is too large")
            elif kind is float and finite and not math.isfinite(item):
                raise ValueError("a number is too large for a float")
        if not below:
            return
        level = below
    raise ValueError(f"it nests deeper than {MOST_DEPTH} levels")


ALLOWANCE = 1 << 26
RATIO = 64
_ZLIB_OR_GZIP = 47  # zlib's code for either header


def most_bytes(size: int) -> int:
    """Return the largest accepted content of `size` compressed bytes: 64 MiB, and 64 bytes for each.

    Example:
        >>> most_bytes(0), most_bytes(1000) - most_bytes(0)
        (67108864, 64000)
    """
    return ALLOWANCE + RATIO * size


def inflate(raw: bytes, size: int | None = None) -> bytes:
    """Return the content of zlib or gzip data; `ValueError` if it is damaged or too large.

    It must have exactly `size` bytes, without one at most `most_bytes`; no more are unpacked.
    """
    most = most_bytes(len(raw)) if size is None else size
    stream = zlib.decompressobj(_ZLIB_OR_GZIP)
    try:
        content = stream.decompress(raw, most + 1)
    except zlib.error as error:
        raise ValueError(f"compressed data is damaged: {error}") from error
    if len(content) > most or size not in (None, len(content)):
        limit = f"at most {most}" if size is None else size
        raise ValueError(f"{len(raw)} compressed bytes do not hold {limit}")
    if not stream.eof or stream.unused_data:
        raise ValueError("compressed data is truncated or followed by something else")
    return content


_HEADER = struct.Struct("<26xHH")
"""Header of a member of a zip archive: the lengths of its name and of its extra field are last."""
_DESCRIPTOR = 24  # bytes that may follow a member: its size and checksum again


def read_arrays(path: Path | str, names: Collection[str]) -> dict[str, NDArray[Any]]:
    """Return some arrays of an archive, as `numpy.savez` writes them; others are not read.

    `ValueError` if it is no archive, or an array is damaged, pickled, or too large; `KeyError` if it is
    missing.
    """
    path = regular(path)
    with path.open("rb") as file:
        begin = file.read(6)
    if not begin.startswith(b"PK"):  # zipfile would look for an archive further on
        what = "one array" if begin == b"\x93NUMPY" else "something else"
        raise ValueError(f"it holds {what}, not an archive of arrays")
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: member for member in archive.infolist()}
        if len(members) != len(archive.infolist()):
            raise ValueError("the archive has duplicate names")
        if missing := [name for name in names if f"{name}.npy" not in members]:
            raise KeyError(missing[0])
        selected = {name: members[f"{name}.npy"] for name in names}
        check_sizes(path, selected.values())
        return {name: _array(archive.read(member), name) for name, member in selected.items()}


def _array(raw: bytes, name: str) -> NDArray[Any]:
    """Return one array from its bytes; its header must declare exactly as many values as follow it."""
    stream = io.BytesIO(raw)
    version = np.lib.format.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"`{name}` has the format {version}, which nothing here writes")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, by_columns, kind = read(stream)
    if kind.hasobject:
        raise ValueError(f"`{name}` is pickled")
    if math.prod(shape) * kind.itemsize != len(raw) - stream.tell() or min(shape, default=0) < 0:
        raise ValueError(f"`{name}` of shape {shape} has {len(raw) - stream.tell()} bytes")
    values = np.frombuffer(raw, dtype=kind, offset=stream.tell())
    return values.reshape(shape, order="F" if by_columns else "C").copy(order="C")


def check_sizes(path: Path, members: Iterable[zipfile.ZipInfo]) -> None:
    """Raise `ValueError` if members of a zip archive are larger than `most_bytes` of its size."""
    size = sum(member.file_size for member in members)
    if size > most_bytes(path.stat().st_size):
        raise ValueError(f"it claims to hold {size} bytes, more than its own size explains")


def require_whole(archive: zipfile.ZipFile) -> None:
    """Raise `BadZipFile` unless the listed members fill a zip archive: a damaged list can lack some."""
    assert archive.fp is not None
    end = 0
    for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
        archive.fp.seek(member.header_offset)
        head = archive.fp.read(_HEADER.size)
        if len(head) < _HEADER.size or not 0 <= member.header_offset - end <= _DESCRIPTOR:
            raise zipfile.BadZipFile(f"bytes before {member.filename!r} are not in its list")
        name, extra = _HEADER.unpack(head)
        end = member.header_offset + _HEADER.size + name + extra + member.compress_size
    if not 0 <= archive.start_dir - end <= _DESCRIPTOR:
        raise zipfile.BadZipFile("it holds more than its list says")


def load_torch(path: Path, kinds: Iterable[type] = ()) -> Any:
    """Return what `torch.save` wrote, if it has tensors, plain values and `kinds` alone; runs no code in it.

    `ValueError` if it is damaged, holds anything else, or claims more than its size explains.
    """
    import torch

    if zipfile.is_zipfile(regular(path)):
        with zipfile.ZipFile(path) as archive:
            check_sizes(path, archive.infolist())
            require_whole(archive)
            if (member := archive.testzip()) is not None:  # PyTorch does not compare checksums
                raise ValueError(f"it is damaged: {member} does not fit its checksum; write it anew")
    try:
        with torch.serialization.safe_globals(list(kinds)):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError("it is damaged, or holds something else than tensors") from error


Schema = Mapping[str, Any]
"""Names and the annotations of their values: `str`, `float`, `list[int]`, a `TypedDict`, …"""


def check(value: Any, kind: Any, where: str) -> None:
    """Raise `CheckpointError`, which names the innermost wrong value, unless `value` is of an annotated type.

    A `kind` is `Any`, `None`, `bool`, `int`, `float`, `str`, `Literal`, `list`, `tuple`, `dict`, a
    `TypedDict`, or a union of these. A `float` may be a whole number, a `tuple` is a list in a file; a bool
    is no number. A `TypedDict` must have every key that is not `NotRequired`, and no others.

    Example:
        >>> check({"epoch": 3}, dict[str, int], "the state")
        >>> check({"epoch": "3"}, dict[str, int], "the state")
        Traceback (most recent call last):
        fgai.errors.CheckpointError: epoch of the state must be a whole number, got '3'
    """
    origin, inner = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        _expect(isinstance(value, Mapping), value, "an object", where)
        # With `from __future__ import annotations` Python counts all keys as required.
        hints = get_type_hints(kind, include_extras=True)
        required = [name for name in kind.__required_keys__ if get_origin(hints[name]) is not NotRequired]
        check_items(value, get_type_hints(kind), where, required=required)
    elif origin in (Union, types.UnionType):
        _check_union(value, inner, where)
    elif origin is Literal:
        _expect(value in inner, value, f"one of {', '.join(map(str, inner))}", where)
    elif origin is dict:
        _expect(isinstance(value, Mapping), value, "an object", where)
        for name, item in value.items():
            check(item, inner[1], f"{name} of {where}")
    elif origin in (list, tuple):
        _expect(isinstance(value, list | tuple), value, "a list", where)
        kinds = inner
        if origin is list or inner[1:] == (Ellipsis,):
            kinds = (inner[0],) * len(value)
        _expect(len(value) == len(kinds), value, f"a list of {len(kinds)}", where)
        for item, item_kind in zip(value, kinds, strict=True):
            check(item, item_kind, f"an entry of {where}")
    elif kind is not Any:
        kind = type(None) if kind is None else kind
        right = isinstance(value, (int, float) if kind is float else kind)
        _expect(right and (kind is bool or not isinstance(value, bool)), value, _WORDS[kind], where)


def check_items(values: Mapping[str, Any], kinds: Schema, where: str, *, required: Iterable[str]) -> None:
    """Raise `CheckpointError` unless `values` has the required names, no others, and the types of `kinds`."""
    if missing := [name for name in required if name not in values]:
        raise CheckpointError(f"{where} is incomplete: it lacks {', '.join(sorted(missing))}")
    if unknown := [str(name) for name in values if name not in kinds]:
        names = ", ".join(unknown)[:200]
        raise CheckpointError(f"{where} holds {names}, unknown to this fgai; if a newer one wrote it, update")
    for name, value in values.items():
        check(value, kinds[name], f"{name} of {where}")


def _check_union(value: Any, kinds: tuple[Any, ...], where: str) -> None:
    if value is None and type(None) in kinds:
        return
    *others, last = [kind for kind in kinds if kind is not type(None)]
    for kind in others:
        with suppress(CheckpointError):
            check(value, kind, where)
            return
    check(value, last, where)


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}


def _expect(good: bool, value: Any, expected: str, where: str) -> None:
    if not good:
        text = repr(value)
        excerpt = text if len(text) < 80 else f"{text[:77]}..."
        raise CheckpointError(f"{where} must be {expected}, got {excerpt}")
