"""Files that are either whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from fgai.errors import FgaiError

__all__ = [
    "pack",
    "write_atomic",
]


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write `content` to `path` in one step: a crash or a full disk leaves the old file as it was.

    Raises:
        FgaiError: if the folder cannot be written to.
    """
    if not path.name:
        raise FgaiError(f"cannot write {str(path)!r}: it names no file")
    raw = content.encode() if isinstance(content, str) else content
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        Path(temporary).chmod(0o644)
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise FgaiError(f"cannot write {path}: {error.strerror or error}; nothing was changed") from error


def pack(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Return tensors in the safetensors format, moved to the CPU and made contiguous."""
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    return save(plain, metadata)
