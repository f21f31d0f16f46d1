"""Clipping rows to a range per channel and a radius, on the CPU: one pass, which also tells what it moved."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fgai.ops.cpu.parallel import run_blocks, threads_for
from fgai.ops.cpu.plan import array
from fgai.ops.cpu.rows import kernel

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

_ROWS = 256


@kernel
def _clip_block(b, nodes, width, x, low, high, middle, inverse, radius, out, inside, noted, scale, moved):
    count, shrunk = 0, 0
    for n in range(b * _ROWS, min((b + 1) * _ROWS, nodes)):
        at = n * width
        for k in range(width):
            given = x[at + k]
            said = given if given >= low[k] else low[k]  # NaN is not, so it becomes the lower end
            said = high[k] if said > high[k] else said
            out[at + k] = said
            same = said == given
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


@kernel
def _clip(threads, nodes, width, x, low, high, middle, inverse, radius, out, inside, noted, scale, moved):
    arguments = (nodes, width, x, low, high, middle, inverse, radius, out, inside, noted, scale, moved)
    run_blocks(_clip_block, threads, (nodes + _ROWS - 1) // _ROWS, arguments)


@kernel
def _back_block(b, nodes, width, gradient, inside, noted, scale, scaled, said, middle, inverse, radius, out):
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


@kernel
def _back(threads, nodes, width, gradient, inside, noted, scale, scaled, said, middle, inverse, radius, out):
    arguments = (nodes, width, gradient, inside, noted, scale, scaled, said, middle, inverse, radius, out)
    run_blocks(_back_block, threads, (nodes + _ROWS - 1) // _ROWS, arguments)


def clip_rows(
    x: Tensor,
    low: Tensor,
    high: Tensor,
    radius: Tensor,
    out: Tensor,
    *,
    noted: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    """Write `x` [N, ...] with every row moved into `[low, high]` and the radius to `out`, maybe `x` itself.

    Args:
        x: rows.
        low: lower ends [...].
        high: upper ends [...].
        radius: scalar, infinite for none; in units of half the range of each channel.
        out: as `x`.
        noted: tell where numbers were inside the range.

    Returns:
        Where numbers were inside, [N, ...] bool, if that is to be noted and some were not; and what each row
        was scaled by [N], if some were.
    """
    rows, blocks = x.shape[0], -(-x.shape[0] // _ROWS)
    moved = np.zeros((max(1, blocks), 2), np.int64)
    inside = torch.empty(x.shape if noted else (1,), dtype=torch.bool)
    scale = torch.empty(rows, dtype=x.dtype)
    given, least, most, limit, made, marks = _flat(x, low, high, radius, out, inside)
    ball = _ball(least, most)
    arrays = given, least, most, *ball, limit, made, marks, noted, scale.numpy(), moved
    _clip(threads_for(blocks), rows, low.numel(), *arrays)
    clipped, shrunk = moved.sum(0)
    return inside if noted and clipped else None, scale if shrunk else None


def clip_rows_back(
    gradient: Tensor,
    inside: Tensor | None,
    scale: Tensor | None,
    said: Tensor,
    low: Tensor,
    high: Tensor,
    radius: Tensor,
) -> Tensor:
    """Return the gradient of what was clipped, from that of what came out, `said`, and what was noted of it.

    At rows that were drawn to the middle m by a factor f it is, in units of half the range,

        f · (g − (Σ_j g_j (y_j − m_j)) (y − m) / r²),

    and where numbers were not inside it is zero.
    """
    out, rows = torch.empty(said.shape, dtype=said.dtype), said.shape[0]
    marks = torch.empty(1, dtype=torch.bool) if inside is None else inside
    factors = said.new_empty(1) if scale is None else scale
    least, most, limit, heard, made, noted, by = _flat(low, high, radius, said, out, marks, factors)
    kept = noted, inside is not None, by, scale is not None, heard, *_ball(least, most), limit, made
    _back(threads_for(-(-rows // _ROWS)), rows, low.numel(), array(gradient).reshape(-1), *kept)
    return out


def _flat(*tensors: Tensor) -> list[np.ndarray]:
    return [tensor.detach().numpy().reshape(-1) for tensor in tensors]


def _ball(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The middle of a range and one over half of it; 0 over what has no width, or no end."""
    with np.errstate(divide="ignore", invalid="ignore"):
        half = (high - low) / 2
        finite = np.isfinite(half)
        middle, inverse = np.where(finite, (low + high) / 2, 0), np.where(finite & (half > 0), 1 / half, 0)
    return middle.astype(low.dtype), inverse.astype(low.dtype)
