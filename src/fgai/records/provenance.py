"""Where a result comes from (weights, data, code, command) and its cost in seconds and memory."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from fgai.files import tensors_digest
from fgai.typed import typed
from fgai.version import __version__, current_facts

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]


@typed
def provenance(model: nn.Module, data: str, *, command: str, seed: int | None = None) -> dict[str, Any]:
    """Return what identifies a result: hashes of weights, data and code, date, command and seed.

    `data` is the fingerprint of the graph. Records are compared without this block.
    """
    return {
        "weights": weights_hash(model),
        "data": data,
        "code": code_hash(),
        "version": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "seed": seed,
        **current_facts(),
    }


@typed
def weights_hash(model: nn.Module) -> str:
    """Return the SHA-256 of the tensors in a model's `state_dict`: names, types, shapes and values."""
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    return tensors_digest(state)


@cache
def code_hash() -> str:
    """Return the SHA-256 of fgai's source as it is installed."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(file for file in root.rglob("*") if file.suffix in (".py", ".toml")):
        digest.update(f"{file.relative_to(root).as_posix()}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


@typed
def provenance_line(block: Mapping[str, Any]) -> str:
    """Return a provenance block as one line of text."""
    names = {"note": "", "weights": "weights ", "data": "data ", "code": "code ", "version": "fgai "}
    names |= {"date": "", "seed": "seed ", "command": "made by "}
    return "; ".join(f"{word}{block[name]}" for name, word in names.items() if block.get(name) is not None)


@typed
class Meter:
    """Measures wall-clock seconds by part, and the peak memory of a device.

    On CUDA, memory is the peak of allocated bytes since construction, which resets the device's statistics;
    on the CPU it is the largest size the process ever had.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._laps: dict[str, float] = {}
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        self._began = self._last = self._now()

    def lap(self, name: str) -> None:
        """Count the time since the last lap as `name`; repeated names add up."""
        now = self._now()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """Return seconds by part, and in `total`."""
        return {**self._laps, "total": self._now() - self._began}

    def peak_memory(self) -> dict[str, Any]:
        """Return peak bytes and how they were counted."""
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            return {"bytes": peak, "counted": "allocated on the device"}
        if resource is None:
            return {"bytes": None, "counted": "unknown on this system"}
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"bytes": peak, "counted": "largest size of the process so far"}

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()
