"""Files that are either whole or not there."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from fgai.errors import FgaiError


def write_atomic(path: Path | str, content: bytes | str) -> None:
    """Write `content` to `path` in one step: a crash or a full disk leaves the old file as it was.

    A link is followed: the file it names is replaced, the link stays. What is no plain file (`/dev/stdout`,
    `/dev/null`, a pipe) cannot be replaced in one step and is written to as it is.

    Raises:
        FgaiError: if the folder cannot be written to.
    """
    path, raw = Path(path), content.encode() if isinstance(content, str) else content
    try:
        if is_stream(path):
            _write_through(path, raw)
        else:
            _replace(Path(os.path.realpath(path)), raw)
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise FgaiError(f"cannot write {path}: {reason}; nothing was changed") from error


def is_stream(path: Path | str) -> bool:
    """Whether `path` leads to a device, a pipe, a socket or the file that this process prints to."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return False
    if stat.S_ISREG(found.st_mode):
        return _printed_to(found) is not None
    return not stat.S_ISDIR(found.st_mode)


def _printed_to(file: os.stat_result) -> int | None:
    """The number, 1 or 2, under which this process prints to a file; None if it does not."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(file, os.fstat(descriptor)):
                return descriptor
    return None


def _write_through(path: Path, raw: bytes) -> None:
    """Write to what is open already where there is such: a second opening would write over it."""
    descriptor = _printed_to(path.stat())
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") if descriptor is None else os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(raw)


def _replace(path: Path, raw: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        Path(temporary).chmod(0o644)
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
