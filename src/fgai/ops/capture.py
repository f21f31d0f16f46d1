"""Capture of a step in a CUDA graph, and slices and sums whose gradients take few kernels in such a step."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

T = TypeVar("T")


class Replay(Generic[T]):
    """A computation captured in a CUDA graph; every call reads and writes the same memory.

    Run the computation once or twice before, so that it compiles and caches nothing during the capture.
    `work` launches kernels of fixed shapes and never waits for the device; the tensors in its `result` change
    with every call. `pool` is memory shared with captures whose results are not needed at the same time.

    `RuntimeError` if `work` cannot be captured; nothing was computed, and the random generator still works.
    """

    def __init__(self, work: Callable[[], T], device: torch.device, pool: Any = None) -> None:
        self._graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        gc.disable()  # freeing an old graph or event would break the capture
        try:
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self.result = work()
        except RuntimeError:
            torch.cuda.synchronize(device)
            # The broken capture still owns the generator's state; a copy of the state is free.
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


class _First(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, count: int) -> Tensor:
        ctx.shape = (len(values) - count, *values.shape[1:])
        return values.narrow(0, 0, count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.cat([gradients[0], gradients[0].new_zeros(ctx.shape)]), None


class _Columns(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, total: Tensor | None) -> Tensor:
        ctx.shape, ctx.has_total = values.shape, total is not None
        first, *others = values.unbind(1)
        total = first.clone() if total is None else total + first
        for column in others:
            total += column
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        return gradients[0][:, None].expand(ctx.shape), gradients[0] if ctx.has_total else None


def first_rows(values: Tensor, count: int) -> Tensor:
    """Return `values[:count]`; the gradient takes one kernel."""
    if count >= len(values):
        return values
    return _First.apply(values, count)  # type: ignore[no-any-return, no-untyped-call]


def add_columns(values: Tensor, total: Tensor | None = None) -> Tensor:
    """Return the columns, added from left to right onto `total`; bit-equal for any number of rows."""
    return _Columns.apply(values, total)  # type: ignore[no-any-return, no-untyped-call]
