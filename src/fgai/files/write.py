"""Write files in one step, and tensors in the safetensors format with a checksum."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fgai.errors import CheckpointError, FgaiError
from fgai.files.read import check, parse_json, regular


def write_atomic(path: Path | str, content: bytes | str) -> None:
    """Write `content` to `path` in one step: a crash or a full disk leaves the old file as it was.

    The target of a link is replaced, the link stays. Devices and pipes (`/dev/stdout`) are written to.
    `FgaiError` if the folder cannot be written to.
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
        status = Path(path).stat()
    except (OSError, ValueError):
        return False
    if stat.S_ISREG(status.st_mode):
        return _printed_to(status) is not None
    return not stat.S_ISDIR(status.st_mode)


def _printed_to(file: os.stat_result) -> int | None:
    """Return the descriptor, 1 or 2, by which this process prints to a file; None if it does not."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(file, os.fstat(descriptor)):
                return descriptor
    return None


def _write_through(path: Path, raw: bytes) -> None:
    """Append, or use the open descriptor: a file opened again would be overwritten."""
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


_CHECKSUM = "sha256"


def pack(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Return tensors in the safetensors format, moved to the CPU and made contiguous, with a checksum."""
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    return save(plain, {**metadata, _CHECKSUM: _checksum(plain, metadata)})


def read_metadata(path: Path | str) -> dict[str, str]:
    """Return the metadata of a safetensors file, without the tensors; `CheckpointError` if damaged."""
    try:
        path = regular(path)
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("no safetensors header")
            head = parse_json(file.read(size))
        check(head, dict[str, dict[str, Any]], "its header")
        metadata = head.get("__metadata__", {})
        check(metadata, dict[str, str], "its metadata")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, CheckpointError) as error:
        raise CheckpointError(f"{path} is damaged or not a safetensors file ({error})") from error
    return dict(metadata)


def unpack(path: Path | str) -> dict[str, Tensor]:
    """Return the tensors of a file; `CheckpointError` if it is damaged or does not fit its checksum.

    Files of other programs have no checksum and are read without one.
    """
    metadata = read_metadata(path)
    try:
        tensors = load(Path(path).read_bytes())
    except Exception as error:  # safetensors has errors of its own
        raise CheckpointError(f"{path} is truncated or not a safetensors file ({error})") from error
    checksum = metadata.pop(_CHECKSUM, None)
    if checksum is not None and checksum != _checksum(tensors, metadata):
        raise CheckpointError(f"{path} is damaged: its contents do not fit its checksum; restore it")
    return tensors


def tensors_digest(tensors: Mapping[str, Tensor], heading: str = "") -> str:
    """Return the SHA-256 of names, types, shapes and values, in the order of the names; on any device."""
    digest = hashlib.sha256(heading.encode())
    for name, value in sorted(tensors.items()):
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        if value.numel():
            dense = value.detach().to_dense().cpu().resolve_conj().resolve_neg().contiguous()
            digest.update(dense.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _checksum(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    return tensors_digest(tensors, json.dumps(metadata, sort_keys=True))
