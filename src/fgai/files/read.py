"""What every reader of a file does first: refuse pipes and devices, and compare checksums."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHECKSUM = "checksum"


def regular(path: Path | str) -> Path:
    """Return the path of a regular file, or of a link to one.

    Reading a pipe or a device may never end, so they are refused before they are opened.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it is a folder, a pipe, a socket or a device.
        ValueError: the name has a null byte.
    """
    file = Path(path)
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(f"{file} is not a regular file")
    return file


def digest_of(path: Path | str) -> str:
    """Return the SHA-256 of a file, in hexadecimal.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
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
    """Return plain values without their `checksum`; those that have none are returned as they are.

    Raises:
        ValueError: the checksum is that of other values.
    """
    if not isinstance(values, Mapping) or CHECKSUM not in values:
        return values
    rest = {name: value for name, value in values.items() if name != CHECKSUM}
    if values[CHECKSUM] != _sha256(rest):
        raise ValueError("its contents do not fit its checksum")
    return rest


def _sha256(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
