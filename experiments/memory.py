"""Peak memory of a piece of work: counted by the device, or sampled from the size of the process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch

_STATM = Path("/proc/self/statm")


def resident() -> int:
    """Return the resident bytes of this process."""
    return int(_STATM.read_text(encoding="ascii").split()[1]) * 4096


class PeakMemory:
    """Memory before a block of work and at its peak, in bytes.

    On CUDA the allocator counts. On the CPU the `size` of the process is sampled `every` so many seconds,
    which misses shorter peaks and counts what libraries keep for later; elsewhere than on Linux there is
    nothing to sample and both stay None.

    Example:
        >>> with PeakMemory("cpu") as memory:
        ...     work = torch.ones(1000)
        >>> memory.peak is None or memory.peak > 0
        True
    """

    def __init__(self, device: str, every: float = 0.01, size: Callable[[], int] = resident) -> None:
        self._cuda, self._every, self._size = device.startswith("cuda"), every, size
        self._done = threading.Event()
        self.base: int | None = None
        self.peak: int | None = None

    @property
    def above(self) -> int:
        """Bytes at the peak above those before."""
        return (self.peak or 0) - (self.base or 0)

    def __enter__(self) -> Self:
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.base = torch.cuda.memory_allocated()
        elif _STATM.exists():
            # Freed memory goes back to the system, so that earlier work does not hide what follows.
            gc.collect()
            with contextlib.suppress(OSError, AttributeError):  # another C library: nothing to trim
                ctypes.CDLL("libc.so.6").malloc_trim(0)
            self.base = self.peak = self._size()
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self.peak = torch.cuda.max_memory_allocated()
        elif self.base is not None:
            self._done.set()
            self._thread.join()

    def _watch(self) -> None:
        running = True
        while running:
            running = not self._done.wait(self._every)
            self.peak = max(self.peak or 0, self._size())
