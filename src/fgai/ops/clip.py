"""Clipping rows of nodes to a range channel by channel, and to a radius as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fgai.errors import InputError
from fgai.ops.backend import _has_numba, _uses_reference
from fgai.ops.cpu.parallel import _by_block, _flat, _launch
from fgai.typed import typed

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

_ROWS = 256
Bounds = tuple[Tensor, Tensor, Tensor]  # low, high, radius


@_by_block
def _clip(b, nodes, width, x, low, high, middle, inverse, radius, out, inside, noted, scale, moved):
    count, shrunk = 0, 0
    for n in range(b * _ROWS, min((b + 1) * _ROWS, nodes)):
        at = n * width
        for k in range(width):
            value = x[at + k]
            said = value if value >= low[k] else low[k]  # NaN is not, so it becomes the lower end
            said = high[k] if said > high[k] else said
            out[at + k] = said
            same = said == value
            count += not same
            if noted:
                inside[at + k] = same
        if radius[0] < np.inf:
            square = radius[0] * 0
            for k in range(width):
                away = (out[at + k] - middle[k]) * inverse[k]
                square += away * away
            scale[n] = 1
            if square > radius[0] * radius[0]:
                factor = radius[0] / np.sqrt(square)
                scale[n] = factor
                shrunk += 1
                for k in range(width):
                    out[at + k] = middle[k] + factor * (out[at + k] - middle[k])
    moved[b, 0], moved[b, 1] = count, shrunk


@_by_block
def _clip_back(b, nodes, width, gradient, inside, noted, scale, scaled, said, middle, inverse, radius, out):
    for n in range(b * _ROWS, min((b + 1) * _ROWS, nodes)):
        at = n * width
        if scaled and scale[n] < 1:
            along = radius[0] * 0
            for k in range(width):
                along += gradient[at + k] * (said[at + k] - middle[k])
            along = along / (radius[0] * radius[0])
            for k in range(width):
                turned = along * (said[at + k] - middle[k]) * inverse[k] * inverse[k]
                out[at + k] = scale[n] * (gradient[at + k] - turned)
        else:
            for k in range(width):
                out[at + k] = gradient[at + k]
        if noted:
            for k in range(width):
                out[at + k] = out[at + k] if inside[at + k] else 0.0


def _clip_rows(
    x: Tensor, bounds: Bounds, out: Tensor, *, noted: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Write the rows of `x` [N, ...] moved into the range and the radius to `out`, maybe `x` itself.

    Returns:
        Which numbers were inside the range, bool [N, ...], if `noted` and some were not; and the factor of
        each row [N], if some were shrunk.
    """
    rows, blocks = x.shape[0], -(-x.shape[0] // _ROWS)
    moved = np.zeros((max(1, blocks), 2), np.int64)
    inside = torch.empty(x.shape if noted else (1,), dtype=torch.bool)
    scale = torch.empty(rows, dtype=x.dtype)
    low, high, radius = (_flat(t) for t in bounds)
    arrays = _flat(x), low, high, *_ball_arrays(low, high), radius, _flat(out), _flat(inside)
    _launch(_clip, blocks, rows, len(low), *arrays, noted, scale.numpy(), moved)
    clipped, shrunk = moved.sum(0)
    return inside if noted and clipped else None, scale if shrunk else None


def _clip_rows_back(
    gradient: Tensor, inside: Tensor | None, scale: Tensor | None, said: Tensor, bounds: Bounds
) -> Tensor:
    """The gradient of `clip`, from that of its result `said`.

    At rows that were drawn to the middle m by a factor f it is, in units of half the range,

        f · (g − (Σ_j g_j (y_j − m_j)) (y − m) / r²),

    and where numbers were not inside it is zero.
    """
    out, rows = torch.empty(said.shape, dtype=said.dtype), said.shape[0]
    marks = torch.empty(1, dtype=torch.bool) if inside is None else inside
    factors = said.new_empty(1) if scale is None else scale
    low, high, radius = (_flat(t) for t in bounds)
    kept = _flat(marks), inside is not None, _flat(factors), scale is not None, _flat(said)
    arrays = *kept, *_ball_arrays(low, high), radius, _flat(out)
    _launch(_clip_back, -(-rows // _ROWS), rows, len(low), _flat(gradient), *arrays)
    return out


def _ball_arrays(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`_ball` of arrays."""
    with np.errstate(divide="ignore", invalid="ignore"):
        half = (high - low) / 2
        finite = np.isfinite(half)
        middle, inverse = np.where(finite, (low + high) / 2, 0), np.where(finite & (half > 0), 1 / half, 0)
    return middle.astype(low.dtype), inverse.astype(low.dtype)


@typed
def clip(
    x: Tensor, low: Tensor, high: Tensor, radius: Tensor | None = None, *, straight: bool = False
) -> Tensor:
    """Move every number into `[low, high]`, and rows outside a radius towards the middle.

    Numbers inside keep their bits. NaN becomes `low`. Where gradients are on, the memory of `x` may be reused
    if it is the result of an operation, so pass nothing that is read again.

    Args:
        x: [N, ...].
        low: lower ends, [...] with a radius; without, whatever broadcasts.
        high: upper ends.
        radius: scalar; rows further from the middle of the range, in units of half the range of each channel,
            are drawn towards it. None or infinite for none.
        straight: let the gradient pass where a number was clipped; otherwise it is zero there. That of rows
            drawn to the middle is always the true one.

    Example:
        >>> low, high = -torch.ones(3), torch.ones(3)
        >>> clip(torch.tensor([[-3.0, 0.5, torch.nan]]), low, high)
        tensor([[-1.0000,  0.5000, -1.0000]])
        >>> clip(torch.tensor([[4.0, 0.0, 0.0], [0.5, 0.0, 0.0]]), low, high, torch.tensor(0.75))
        tensor([[0.7500, 0.0000, 0.0000],
                [0.5000, 0.0000, 0.0000]])
    """
    _check_range(x, low, high)
    if radius is None:
        radius = torch.full((), torch.inf, dtype=x.dtype, device=x.device)
    if torch.is_grad_enabled() and x.requires_grad and not _in_jit_trace():
        return _Clip.apply(x, low, high, radius, straight)  # type: ignore[no-any-return]
    return _moved(x, (low, high, radius), torch.empty_like(x), noted=False)[0]


@typed
def loudness(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Distance of each row [N, ...] from the middle of a range, in units of half the range: [N].

    Example:
        >>> loudness(torch.tensor([[3.0, 4.0]]), torch.tensor([-5.0, -5.0]), torch.tensor([5.0, 5.0]))
        tensor([1.])
    """
    _check_range(x, low, high)
    if x.dim() < 2:
        raise InputError(f"`x` must hold rows, [N, ...], got {tuple(x.shape)}")
    middle, inverse = _ball(low, high)
    return ((x - middle) * inverse).flatten(1).square().sum(1).sqrt()


def _ball(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The middle of a range and one over half of it; 0 where it has no width, or no end."""
    half = (high - low) / 2
    finite = half.isfinite()
    return torch.where(finite, (low + high) / 2, 0.0), torch.where(finite & (half > 0), 1 / half, 0.0)


def _check_range(x: Tensor, low: Tensor, high: Tensor) -> None:
    try:
        wide = torch.broadcast_shapes(x.shape, low.shape, high.shape)
    except RuntimeError:
        wide = None
    if wide != x.shape or not x.dtype == low.dtype == high.dtype or not x.is_floating_point():
        got = ", ".join(f"{part.dtype} {tuple(part.shape)}" for part in (x, low, high))
        raise InputError(f"`low` and `high` must broadcast against `x`, floating-point all three, got {got}")


def _is_traced() -> bool:
    """Whether PyTorch compiles, exports or traces what runs: operations of PyTorch alone can be."""
    return torch.compiler.is_compiling() or _in_jit_trace()


def _in_jit_trace() -> bool:
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined]


def _fits(x: Tensor, low: Tensor, high: Tensor) -> bool:
    """Whether a kernel can run: whole rows, a range per channel of the same type."""
    if _is_traced() or _uses_reference():
        return False
    if type(x) is not Tensor or x.dtype not in (torch.float32, torch.float64):
        return False
    ready = x.device.type != "cpu" or _has_numba()
    laid = x.dim() > 1 and x.is_contiguous() and low.is_contiguous() and high.is_contiguous()
    return ready and laid and x.dtype == low.dtype == high.dtype and x.shape[1:] == low.shape == high.shape


def _moved(
    x: Tensor, bounds: Bounds, out: Tensor, *, noted: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The result of `clip`, perhaps in `out`; which numbers were inside, if noted; the factors of the rows.

    None stands for everywhere, and for 1.
    """
    low, high, radius = bounds
    if _fits(x, low, high):
        if x.device.type == "cpu":
            return out, *_clip_rows(x, bounds, out, noted=noted)
        if x.device.type == "cuda":
            from fgai.ops.gpu.nodes import clip_rows

            return out, *clip_rows(x, bounds, out, noted=noted)
    clipped = torch.fmin(torch.fmax(x, low), high)
    inside = clipped == x if noted else None
    if x.dim() < 2 or x.shape[1:] != low.shape:
        return clipped, inside, None
    middle, _ = _ball(low, high)
    rows = (-1, *[1] * (x.dim() - 1))
    scale = (radius / loudness(clipped, low, high)).nan_to_num(nan=1.0, posinf=1.0).clamp(max=1.0)
    softer = middle + scale.view(rows) * (clipped - middle)
    return torch.where(scale.view(rows) < 1, softer, clipped), inside, scale


class _Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, low: Tensor, high: Tensor, radius: Tensor, straight: bool) -> Tensor:
        # The result of an operation that nobody else has yet is clipped in place.
        ctx.mine = _fits(x, low, high)
        own = ctx.mine and x.grad_fn is not None and x._base is None
        buffer = x if own else torch.empty_like(x)
        out, inside, scale = _moved(x, (low, high, radius), buffer, noted=not straight)
        if own:
            ctx.mark_dirty(x)
        ctx.moved = inside is not None or scale is not None
        if ctx.moved:
            ctx.save_for_backward(inside, scale, out, low, high, radius)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        if ctx.moved:
            inside, scale, out, *bounds = ctx.saved_tensors
            noted = gradient, inside, scale, out, tuple(bounds)
            if ctx.mine and out.device.type == "cpu":
                gradient = _clip_rows_back(*noted)
            elif ctx.mine and out.device.type == "cuda":
                from fgai.ops.gpu.nodes import clip_rows_back

                gradient = clip_rows_back(*noted)
            else:
                gradient = _back(*noted)
        return gradient, None, None, None, None


def _back(
    gradient: Tensor, inside: Tensor | None, scale: Tensor | None, said: Tensor, bounds: Bounds
) -> Tensor:
    """The reference of `_clip_rows_back`."""
    if scale is not None:
        low, high, radius = bounds
        middle, inverse = _ball(low, high)
        rows = (-1, *[1] * (said.dim() - 1))
        away, factor = said - middle, scale.view(rows)
        along = (gradient * away).flatten(1).sum(1).view(rows)
        turned = along * away * (inverse / radius).square()
        gradient = torch.where(factor < 1, factor * (gradient - turned), gradient)
    return gradient if inside is None else torch.where(inside, gradient, 0.0)
