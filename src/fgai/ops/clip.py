"""Clipping to a range channel by channel, with the true gradient or one that passes straight through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def clip(x: Tensor, low: Tensor, high: Tensor, *, straight: bool = False) -> Tensor:
    """Return `x` with every number moved into `[low, high]`, which broadcast against it.

    Numbers inside keep their bits. NaN becomes `low`: no input leaves the range. One pass over the nodes,
    not over the edges: an attention layer clips what each node says once, however many neighbours hear it.

    Args:
        x: [N, ...].
        low: lower ends.
        high: upper ends.
        straight: let the gradient pass where a number was moved, as if it had not been; otherwise it is zero
            there, which is the truth.

    Example:
        >>> clip(torch.tensor([-3.0, 0.5, torch.nan]), torch.tensor(-1.0), torch.tensor(1.0))
        tensor([-1.0000,  0.5000, -1.0000])
    """
    if torch.is_grad_enabled() and x.requires_grad:
        clipped: Tensor = _Clip.apply(x, low, high, straight)  # type: ignore[no-untyped-call]
        return clipped
    return torch.fmin(torch.fmax(x, low), high)


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, high: Tensor, straight: bool) -> Tensor:
        out = torch.fmin(torch.fmax(x, low), high)
        if not straight:
            ctx.save_for_backward(out == x)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.saved_tensors:
            gradient = gradient * ctx.saved_tensors[0]
        return gradient, None, None, None
