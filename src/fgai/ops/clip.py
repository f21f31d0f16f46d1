"""Clipping to a range channel by channel, with the true gradient or one that passes straight through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fgai.errors import InputError
from fgai.ops.backend import has_numba
from fgai.ops.cpu.clip import clip_rows, masked
from fgai.typed import typed


@typed
def clip(x: Tensor, low: Tensor, high: Tensor, *, straight: bool = False) -> Tensor:
    """Return `x` with every number moved into `[low, high]`, which broadcast against it.

    Numbers inside keep their bits. NaN becomes `low`: no input leaves the range. One pass over the nodes,
    not over the edges: an attention layer clips what each node says once, however many neighbours hear it.
    Where gradients are on, the memory of `x` may be used if it is the result of an operation, so hand over
    nothing that is read again.

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
    _check_range(x, low, high)
    if torch.is_grad_enabled() and x.requires_grad:
        clipped: Tensor = _Clip.apply(x, low, high, straight)  # type: ignore[no-untyped-call]
        return clipped
    if _fits(x, low, high):
        out = torch.empty_like(x)
        clip_rows(x, low, high, out)
        return out
    return torch.fmin(torch.fmax(x, low), high)


def _check_range(x: Tensor, low: Tensor, high: Tensor) -> None:
    try:
        wide = torch.broadcast_shapes(x.shape, low.shape, high.shape)  # type: ignore[no-untyped-call]
    except RuntimeError:
        wide = None
    if wide != x.shape or not x.dtype == low.dtype == high.dtype or not x.is_floating_point():
        got = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in (x, low, high))
        raise InputError(f"`low` and `high` must broadcast against `x`, floating-point all three, got {got}")


def _fits(x: Tensor, low: Tensor, high: Tensor) -> bool:
    """Whether the kernel can serve: whole rows on the CPU, a range per channel of the same type."""
    known = x.dtype in (torch.float32, torch.float64) and x.dtype == low.dtype == high.dtype
    plain = has_numba() and type(x) is Tensor and x.device.type == "cpu"
    laid = x.dim() > 1 and x.is_contiguous() and low.is_contiguous() and high.is_contiguous()
    return plain and known and laid and x.shape[1:] == low.shape == high.shape


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, high: Tensor, straight: bool) -> Tensor:
        ctx.mine = _fits(x, low, high)
        if not ctx.mine:
            out = torch.fmin(torch.fmax(x, low), high)
            if not straight:
                ctx.save_for_backward(out == x)
            return out
        # What a layer just computed is nobody else's yet: it is clipped where it stands.
        own = x.grad_fn is not None and x._base is None
        out = x if own else torch.empty_like(x)
        inside, moved = clip_rows(x, low, high, out, noted=not straight)
        if inside is not None and moved:
            ctx.save_for_backward(inside)
        if own:
            ctx.mark_dirty(x)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.saved_tensors:
            inside = ctx.saved_tensors[0]
            gradient = masked(gradient, inside) if ctx.mine else gradient * inside
        return gradient, None, None, None
