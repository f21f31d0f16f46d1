"""Peak memory of a piece of work: counted by the device, or sampled from the size of the process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

_STATM = Path("/proc/self/statm")
_EVERY = 0.01


class PeakMemory:
    """Memory before a block of work and at its peak, in bytes.

    On CUDA the allocator counts. On the CPU the resident size of the process is sampled a hundred times a
    second, which misses shorter peaks and counts what libraries keep for later; elsewhere than on Linux there
    is nothing to sample and both stay None.

    Args:
        device: where the work runs.

    Example:
        >>> with PeakMemory("cpu") as memory:
        ...     work = torch.ones(1000)
        >>> memory.peak is None or memory.peak > 0
        True
    """

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self._done = threading.Event()
        self.base: int | None = None
        self.peak: int | None = None

    def __enter__(self) -> Self:
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
        elif _STATM.exists():
            _give_back()
            self.base = self.peak = _resident()
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cuda:
            self.peak = torch.cuda.max_memory_allocated()
        elif self.base is not None:
            self._done.set()
            self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(_EVERY):
            self.peak = max(self.peak or 0, _resident())


def _give_back() -> None:
    """Return freed memory to the system, so that earlier work does not hide what follows."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library: nothing to trim
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _resident() -> int:
    """Resident bytes of this process."""
    pages = int(_STATM.read_text(encoding="ascii").split()[1])
    return pages * 4096
