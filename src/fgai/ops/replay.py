"""A computation captured in a CUDA graph once and replayed as often as wanted."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Replay(Generic[T]):
    """A captured computation: replays read their inputs where the capture did and leave the result there.

    Run the computation once or twice before: what it compiles, caches and keeps must not be made meanwhile.

    Args:
        work: launches kernels of fixed shapes, never waits for the device.
        device: where.
        pool: memory shared with other captures whose results are not needed at the same time.

    Attributes:
        result: what `work` returned; the tensors in it change with every replay.

    Raises:
        RuntimeError: it cannot be captured. Nothing was computed; random numbers can be drawn as before.
    """

    def __init__(self, work: Callable[[], T], device: torch.device, pool: Any = None) -> None:
        self._graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # an old graph or event freed in the middle would spoil the capture
        try:
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self.result = work()
        except RuntimeError:
            torch.cuda.synchronize(device)
            # The capture that broke off still holds the generator; a copy of its state is free.
            generator = torch.cuda.default_generators[device.index or 0]
            generator.graphsafe_set_state(generator.clone_state())
            raise
        finally:
            if collecting:
                gc.enable()

    def __call__(self) -> T:
        """Compute once more; nothing waits for the device."""
        self._graph.replay()
        return self.result
