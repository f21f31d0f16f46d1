"""Arrays from an `.npz` archive, each no larger than the archive explains."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fgai.files.inflate import most_bytes
from fgai.files.read import regular

_HEADER = struct.Struct("<26xHH")
"""Header of a member of a zip archive: the lengths of its name and of its extra field are last."""
_DESCRIPTOR = 24
"""Bytes that may follow a member: its size and checksum once more."""


def read_arrays(path: Path | str, names: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Return some arrays of an archive, as `numpy.savez` writes them; others are not looked at.

    Raises:
        ValueError: the file is no archive, or an array is damaged, pickled, or larger than the archive
            explains.
        KeyError: there is no array of that name.
        OSError: the file cannot be read.
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
            raise ValueError("a name comes twice in the archive")
        wanted = {name: members[f"{name}.npy"] for name in names if _present(members, name)}
        size, most = sum(member.file_size for member in wanted.values()), most_bytes(path.stat().st_size)
        if size > most:
            raise ValueError(f"it claims to hold {size} bytes, more than its own size explains")
        return {name: _array(archive.read(member), name) for name, member in wanted.items()}


def _present(members: dict[str, zipfile.ZipInfo], name: str) -> bool:
    if f"{name}.npy" not in members:
        raise KeyError(name)
    return True


def _array(raw: bytes, name: str) -> NDArray[Any]:
    """One array from its bytes; its header must tell exactly as many values as follow it."""
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


def require_whole(archive: zipfile.ZipFile) -> None:
    """Raise unless the members that a zip archive lists take up all of it.

    A damaged list can lack members whose bytes are still there.

    Raises:
        zipfile.BadZipFile: bytes belong to no member.
    """
    assert archive.fp is not None
    end = 0
    for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
        archive.fp.seek(member.header_offset)
        head = archive.fp.read(_HEADER.size)
        if len(head) < _HEADER.size or not 0 <= member.header_offset - end <= _DESCRIPTOR:
            raise zipfile.BadZipFile(f"what stands before {member.filename!r} is not in its list")
        name, extra = _HEADER.unpack(head)
        end = member.header_offset + _HEADER.size + name + extra + member.compress_size
    if not 0 <= archive.start_dir - end <= _DESCRIPTOR:
        raise zipfile.BadZipFile("it holds more than its list says")
