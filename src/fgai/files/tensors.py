"""Tensors in the safetensors format, with a checksum over everything the file says."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from fgai.errors import CheckpointError
from fgai.files.read import regular
from fgai.files.schema import check
from fgai.files.text import parse_json

CHECKSUM = "sha256"


def pack(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Return tensors in the safetensors format, moved to the CPU and made contiguous, with a checksum."""
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    return save(plain, {**metadata, CHECKSUM: _checksum(plain, metadata)})


def read_metadata(path: Path | str) -> dict[str, str]:
    """Return what a file of tensors says of itself, without reading the tensors.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is damaged, or something else.
    """
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
    return {str(name): str(value) for name, value in metadata.items()}


def unpack(path: Path | str) -> dict[str, Tensor]:
    """Return the tensors of a file.

    Files of before have no checksum and are taken as they are.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: it is damaged, truncated, something else, or not what its checksum says.
    """
    metadata = read_metadata(path)
    try:
        tensors = load(Path(path).read_bytes())
    except Exception as error:  # safetensors has errors of its own
        raise CheckpointError(f"{path} is truncated or not a safetensors file ({error})") from error
    wanted = metadata.pop(CHECKSUM, None)
    if wanted is not None and wanted != _checksum(tensors, metadata):
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
