"""Rows of a tensor, with gradients that kernels put together.

PyTorch's own gradients of slices and of chosen rows copy blocks of memory, one more node each in a captured
step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


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
