"""Clipping rows to a range per channel and a radius, on the GPU: a tile a program, nothing waits for it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

TILE = 2048
"""Numbers in a tile of rows × channels."""


@triton.jit
def _ball(low, high):
    """The middle of a range and one over half of it; 0 over what has no width, or no end."""
    half = (high - low) / 2
    finite = half < float("inf")
    counts = finite & (half > 0)
    return tl.where(finite, (low + high) / 2, 0.0), tl.where(counts, 1 / tl.where(counts, half, 1.0), 0.0)


@triton.jit
def _clip(x, low, high, radius, out, inside, scale, N, D, NOTED: tl.constexpr, BN: tl.constexpr,
          BD: tl.constexpr):  # fmt: skip
    n, k = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64), tl.arange(0, BD)
    fits, live = k < D, n < N
    at, good = n[:, None] * D + k[None, :], live[:, None] & fits[None, :]
    least, most = tl.load(low + k, mask=fits, other=0.0), tl.load(high + k, mask=fits, other=0.0)
    centre, unit = _ball(least, most)
    given = tl.load(x + at, mask=good, other=0.0)
    said = tl.where(given >= least[None, :], given, least[None, :])  # NaN is not, so it becomes the lower end
    said = tl.where(said > most[None, :], most[None, :], said)
    if NOTED:
        tl.store(inside + at, said == given, mask=good)
    limit = tl.load(radius)
    if limit < float("inf"):
        away = tl.where(good, said - centre[None, :], 0.0)
        size = away * unit[None, :]
        loud = tl.sqrt(tl.sum(size * size, axis=1))
        shrunk = loud > limit
        factor = tl.where(shrunk, limit / tl.where(shrunk, loud, 1.0), 1.0)
        tl.store(scale + n, factor, mask=live)
        said = tl.where(shrunk[:, None], centre[None, :] + factor[:, None] * away, said)
    tl.store(out + at, said, mask=good)


@triton.jit
def _back(gradient, inside, scale, said, low, high, radius, out, N, D, NOTED: tl.constexpr,
          BN: tl.constexpr, BD: tl.constexpr):  # fmt: skip
    n, k = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64), tl.arange(0, BD)
    fits, live = k < D, n < N
    at, good = n[:, None] * D + k[None, :], live[:, None] & fits[None, :]
    flow = tl.load(gradient + at, mask=good, other=0.0)
    limit = tl.load(radius)
    if limit < float("inf"):
        least, most = tl.load(low + k, mask=fits, other=0.0), tl.load(high + k, mask=fits, other=0.0)
        centre, unit = _ball(least, most)
        away = tl.where(good, tl.load(said + at, mask=good, other=0.0) - centre[None, :], 0.0)
        factor = tl.load(scale + n, mask=live, other=1.0)[:, None]
        along = tl.sum(flow * away, axis=1)[:, None]
        turned = along * away * ((unit / limit) * (unit / limit))[None, :]
        flow = tl.where(factor < 1, factor * (flow - turned), flow)
    if NOTED:
        flow = tl.where(tl.load(inside + at, mask=good, other=0) != 0, flow, 0.0)
    tl.store(out + at, flow, mask=good)


def clip_rows(
    x: Tensor,
    low: Tensor,
    high: Tensor,
    radius: Tensor,
    out: Tensor,
    *,
    noted: bool = False,
) -> tuple[Tensor | None, Tensor]:
    """As `fgai.ops.cpu.clip.clip_rows`; what it notes is returned whether rows were moved or not."""
    rows, width = x.shape[0], low.numel()
    inside = torch.empty(x.shape if noted else (1,), dtype=torch.bool, device=x.device)
    scale = x.new_empty(rows)
    if rows:
        sizes = _sizes(width)
        _clip[(-(-rows // sizes["BN"]),)](
            x, low, high, radius, out, inside.view(torch.uint8), scale, rows, width, NOTED=noted, **sizes
        )
    return inside if noted else None, scale


def clip_rows_back(
    gradient: Tensor,
    inside: Tensor | None,
    scale: Tensor | None,
    said: Tensor,
    low: Tensor,
    high: Tensor,
    radius: Tensor,
) -> Tensor:
    """As `fgai.ops.cpu.clip.clip_rows_back`."""
    assert scale is not None
    rows, out = said.shape[0], torch.empty_like(said)
    marks = scale if inside is None else inside.view(torch.uint8)
    if rows:
        sizes = _sizes(low.numel())
        _back[(-(-rows // sizes["BN"]),)](
            gradient.contiguous(), marks, scale, said, low, high, radius, out, rows, low.numel(),
            NOTED=inside is not None, **sizes,
        )  # fmt: skip
    return out


def _sizes(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"BN": max(1, TILE // block), "BD": block}
