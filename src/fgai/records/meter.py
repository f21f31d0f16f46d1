"""Seconds and peak memory of a piece of work."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any

import torch

from fgai.typed import typed

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]


@typed
class Meter:
    """Counts wall-clock seconds by part, and peak memory.

    On CUDA, memory is the peak of allocated bytes since the meter was made (the device's peak statistics are
    reset); on the CPU it is the largest size the process ever had, which earlier work may have set.

    Args:
        device: where the work runs.

    Example:
        >>> meter = Meter(torch.device("cpu"))
        >>> meter.lap("attack")
        >>> sorted(meter.seconds())
        ['attack', 'total']
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
            return {
                "bytes": torch.cuda.max_memory_allocated(self._device),
                "counted": "allocated on the device",
            }
        if resource is None:
            return {"bytes": None, "counted": "unknown on this system"}
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return {"bytes": peak, "counted": "largest size of the process so far"}

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return perf_counter()
