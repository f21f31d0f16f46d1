"""Clip each channel of a row to a range, and the whole row to a radius."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fgai.errors import InputError
from fgai.ops import reference
from fgai.ops.backend import _kernels_for
from fgai.typed import typed


@typed
def clip(
    x: Tensor, low: Tensor, high: Tensor, radius: Tensor | None = None, *, straight: bool = False
) -> Tensor:
    """Clip every number to `[low, high]`, and shrink rows outside a radius towards the middle of the range.

    `x` is [N, ...]; `low` and `high` are [...] with a radius, without one any shape that broadcasts. `radius`
    is the largest distance of a row from the middle, in units of half the range of each channel; None or
    infinite for none. `straight` passes the gradient through clipped numbers ("straight-through"), where it
    is zero otherwise; the gradient of a shrunk row is always the true one.

    Numbers inside stay bit-equal. NaN becomes `low`. With gradients on, the result may overwrite `x` if that
    is the result of an operation, so do not read it again.

    Example:
        >>> low, high = -torch.ones(3), torch.ones(3)
        >>> clip(torch.tensor([[-3.0, 0.5, torch.nan]]), low, high)
        tensor([[-1.0000,  0.5000, -1.0000]])
        >>> clip(torch.tensor([[4.0, 0.0, 0.0], [0.5, 0.0, 0.0]]), low, high, torch.tensor(0.75))
        tensor([[0.7500, 0.0000, 0.0000],
                [0.5000, 0.0000, 0.0000]])
    """
    _check_range(x, low, high)
    if radius is not None and radius.dim():
        raise InputError(f"`radius` must be a scalar, got {tuple(radius.shape)}")
    if radius is None:
        radius = torch.full((), torch.inf, dtype=x.dtype, device=x.device)
    if torch.is_grad_enabled() and x.requires_grad and not _in_jit_trace():
        return _Clip.apply(x, low, high, radius, straight)  # type: ignore[no-any-return,no-untyped-call]
    kernels = _clip_kernels(x, low, high)
    return kernels.clip_rows(x, (low, high, radius), torch.empty_like(x), False)[0]  # type: ignore[no-any-return]


@typed
def range_norm(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Distance of each row [N, ...] from the middle of a range, in units of half the range: [N].

    Example:
        >>> range_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([-5.0, -5.0]), torch.tensor([5.0, 5.0]))
        tensor([1.])
    """
    _check_range(x, low, high)
    if x.dim() < 2:
        raise InputError(f"`x` must hold rows, [N, ...], got {tuple(x.shape)}")
    return reference.ball_norm(x, low, high)


def _check_range(x: Tensor, low: Tensor, high: Tensor) -> None:
    wide: Any = x.shape
    if not low.shape == high.shape == x.shape[1:]:
        try:
            wide = torch.broadcast_shapes(x.shape, low.shape, high.shape)  # type: ignore[no-untyped-call]
        except RuntimeError:
            wide = None
    if wide != x.shape or not x.dtype == low.dtype == high.dtype or not x.is_floating_point():
        got = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in (x, low, high))
        raise InputError(f"`low` and `high` must broadcast against `x`, floating-point all three, got {got}")


def _in_jit_trace() -> bool:
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def _clip_kernels(x: Tensor, low: Tensor, high: Tensor) -> ModuleType:
    """The backend for contiguous rows with a range per channel; else, and when traced, the reference."""
    if torch.compiler.is_compiling() or _in_jit_trace() or type(x) is not Tensor:
        return reference
    contiguous = x.is_contiguous() and low.is_contiguous() and high.is_contiguous()
    fits = x.dim() > 1 and x.shape[1:] == low.shape == high.shape
    return _kernels_for(x) if contiguous and fits else reference


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, high: Tensor, radius: Tensor, straight: bool) -> Tensor:
        ctx.kernels = _clip_kernels(x, low, high)
        # The result of an operation, which is not a leaf or a view, is clipped in place.
        own = ctx.kernels is not reference and x.grad_fn is not None and x._base is None
        buffer = x if own else torch.empty_like(x)
        out, inside, scale = ctx.kernels.clip_rows(x, (low, high, radius), buffer, not straight)
        if own:
            ctx.mark_dirty(x)
        ctx.changed = inside is not None or scale is not None
        if ctx.changed:
            ctx.save_for_backward(inside, scale, out, low, high, radius)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.changed:
            inside, scale, out, *bounds = ctx.saved_tensors
            gradient = ctx.kernels.clip_rows_back(gradient, inside, scale, out, tuple(bounds))
        return gradient, None, None, None, None
