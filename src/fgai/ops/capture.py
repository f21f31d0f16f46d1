"""Replay of steps captured in a CUDA graph, and gradients of few kernels.

PyTorch's own gradients of slices, chosen rows and single columns copy blocks of memory, one more kernel each
in a captured step; those of `first_rows`, `chosen_rows` and `add_columns` do not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

T = TypeVar("T")


class Replay(Generic[T]):
    """A captured computation: replays read their inputs where the capture did and leave the result there.

    Run the computation once or twice before, so that it compiles and caches nothing during the capture.

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


class _First(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, count: int) -> Tensor:
        ctx.shape = (len(values) - count, *values.shape[1:])
        return values.narrow(0, 0, count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return torch.cat([gradients[0], gradients[0].new_zeros(ctx.shape)]), None


class _Chosen(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dim = values.shape, dim
        return values.index_select(dim, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return gradients[0].new_zeros(ctx.shape).index_add_(ctx.dim, index, gradients[0]), None, None


class _Columns(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, total: Tensor | None) -> Tensor:
        ctx.shape, ctx.goes_on = values.shape, total is not None
        first, *others = values.unbind(1)
        total = first.clone() if total is None else total + first
        for column in others:
            total += column
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        return gradients[0][:, None].expand(ctx.shape), gradients[0] if ctx.goes_on else None


def first_rows(values: Tensor, count: int) -> Tensor:
    """Return `values[:count]`.

    Example:
        >>> first_rows(torch.tensor([1.0, 2.0, 3.0]), 2)
        tensor([1., 2.])
    """
    if count >= len(values):
        return values
    return _First.apply(values, count)  # type: ignore[no-any-return, no-untyped-call]


def chosen_rows(values: Tensor, index: Tensor, dim: int = 0) -> Tensor:
    """Return `values.index_select(dim, index)`.

    Example:
        >>> chosen_rows(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 0]))
        tensor([3., 1.])
    """
    return _Chosen.apply(values, index, dim)  # type: ignore[no-any-return, no-untyped-call]


def add_columns(values: Tensor, total: Tensor | None = None) -> Tensor:
    """Return the sum of the columns, added from left to right onto `total`; bit-equal for any number of rows.

    Example:
        >>> add_columns(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([10.0, 20.0]))
        tensor([13., 27.])
    """
    return _Columns.apply(values, total)  # type: ignore[no-any-return, no-untyped-call]
