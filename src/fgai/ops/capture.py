"""Steps captured in a CUDA graph: their replay, random numbers, and gradients of few kernels.

Random numbers are a function of a seed on the device: alike everywhere, and new in every replay. PyTorch's
own gradients of slices, of chosen rows and of single columns copy blocks of memory, one more kernel each in a
captured step; those of `first_rows`, `chosen_rows` and `add_columns` do not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from math import pi
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function

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


STEP = -7046029254386353131
"""Between the states of neighbouring numbers: 2⁶⁴ over the golden ratio, made odd, as a signed word."""
ROUNDS = ((30, -4658895280553007687), (27, -7723592293110705685))
"""SplitMix64: xor with the word shifted right by so much, then multiply."""


class Hashed:
    """A stream of random numbers in place of a `torch.Generator`.

    A generator on the CPU draws the same numbers for every device but has to send them there; one on the
    device draws others, and its place in a captured step is shared with dropout. Here number n of the stream
    is a hash of seed and n, computed where the seed is.

    Args:
        seed: one int64 on the device where numbers are wanted; may change from replay to replay.

    Example:
        >>> Hashed(torch.tensor(1)).rand(2).shape
        torch.Size([2])
    """

    def __init__(self, seed: Tensor) -> None:
        self.seed, self.drawn = seed, 0

    def rand(self, size: int) -> Tensor:
        """Return the next numbers, uniform in [0, 1), float64."""
        first, self.drawn = self.drawn + 1, self.drawn + size
        places = torch.arange(first, first + size, device=self.seed.device)
        word = _mixed(_mixed(self.seed) + places * STEP)
        return _shifted(word, 11).double() * 2.0**-53

    def randn(self, size: int) -> Tensor:
        """Return the next numbers, normal, float64."""
        radius = (-2 * torch.log1p(-self.rand(size))).sqrt()
        return radius * torch.cos(2 * pi * self.rand(size))


def _mixed(word: Tensor) -> Tensor:
    for by, factor in ROUNDS:
        word = (word ^ _shifted(word, by)) * factor
    return word ^ _shifted(word, 31)


def _shifted(word: Tensor, by: int) -> Tensor:
    """Right by so many bits, zeros from the left."""
    return (word >> by) & ((1 << (64 - by)) - 1)


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
    """Return the sum of the columns, added from left to right onto `total`, if there is one.

    A row's sum is the same to the bit however many rows there are.

    Example:
        >>> add_columns(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([10.0, 20.0]))
        tensor([13., 27.])
    """
    return _Columns.apply(values, total)  # type: ignore[no-any-return, no-untyped-call]
