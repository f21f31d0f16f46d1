"""`rivals` on the GPU: both lists of a row, their differences and where these come from, in one pass."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.topk import gpu
from fgai.topk.gpu import NONE, _best, _ends

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

SLOTS = 256


@triton.jit
def _sides(now, there, members, e, live):
    """Scores of outsiders, and of members upside down; nothing is below what is neither."""
    v = tl.load(now + e, mask=live, other=0.0)
    counts = tl.load(there + e, mask=live, other=0) != 0
    inside = tl.load(members + e, mask=live, other=0) != 0
    below = float("-inf")
    return tl.where(counts & (inside == 0), v, below), tl.where(counts & inside, -v, below)


@triton.jit
def _note(there, members, gaps, strong, weak, slot, high, far, low, near):
    """Write down a pair, if it is one: lists too short go on with edges that do not count."""
    pair = (far != NONE) & (near != NONE)
    pair &= (tl.load(there + far, mask=pair, other=0) != 0) & (
        tl.load(members + far, mask=pair, other=1) == 0
    )
    pair &= (tl.load(there + near, mask=pair, other=0) != 0) & (
        tl.load(members + near, mask=pair, other=0) != 0
    )
    tl.store(gaps + slot, tl.where(pair, high + low, 0.0))
    tl.store(strong + slot, tl.where(pair, far, -1))
    tl.store(weak + slot, tl.where(pair, near, -1))


@triton.jit
def _compare(
    rowptr, rows, now, there, members, gaps, strong, weak, K: tl.constexpr, SHORT: tl.constexpr,
    LONG: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first, last = _ends(rowptr, tl.load(rows + row))
    kind: tl.constexpr = now.dtype.element_ty
    high, low = tl.full([], float("inf"), dtype=kind), tl.full([], float("inf"), dtype=kind)
    far, near = tl.full([], -1, dtype=tl.int32), tl.full([], -1, dtype=tl.int32)
    if last - first > SHORT:
        for place in range(K):
            best, where = tl.full([], float("-inf"), dtype=kind), tl.full([], NONE, dtype=tl.int32)
            least, whose = tl.full([], float("-inf"), dtype=kind), tl.full([], NONE, dtype=tl.int32)
            for start in range(first, last, LONG):
                e = start + tl.arange(0, LONG)
                out, own = _sides(now, there, members, e, e < last)
                top, spot = _best(out, e, e < last, high, far)
                better = (spot != NONE) & ((top > best) | (where == NONE))
                best, where = tl.where(better, top, best), tl.where(better, spot, where)
                top, spot = _best(own, e, e < last, low, near)
                better = (spot != NONE) & ((top > least) | (whose == NONE))
                least, whose = tl.where(better, top, least), tl.where(better, spot, whose)
            high, far, low, near = best, where, least, whose
            _note(there, members, gaps, strong, weak, row * K + place, high, far, low, near)
    else:
        e = first + tl.arange(0, SHORT)
        out, own = _sides(now, there, members, e, e < last)
        for place in range(K):
            high, far = _best(out, e, e < last, high, far)
            low, near = _best(own, e, e < last, low, near)
            _note(there, members, gaps, strong, weak, row * K + place, high, far, low, near)


@triton.jit
def _back(gradient, strong, weak, slope, count, B: tl.constexpr):
    slot = tl.program_id(0) * B + tl.arange(0, B)
    far = tl.load(strong + slot, mask=slot < count, other=-1)
    near = tl.load(weak + slot, mask=slot < count, other=-1)
    flow = tl.load(gradient + slot, mask=far >= 0, other=0.0)
    tl.store(slope + far, flow, mask=far >= 0)
    tl.store(slope + near, -flow, mask=far >= 0)


class _Rivals(Function):
    @staticmethod
    def forward(
        ctx: Any, now: Tensor, there: Tensor, members: Tensor, rowptr: Tensor, rows: Tensor, k: int
    ) -> tuple[Tensor, Tensor]:
        gaps = now.new_empty(len(rows), k)
        strong, weak = (torch.empty(gaps.shape, dtype=torch.int32, device=now.device) for _ in range(2))
        if gaps.numel():
            sides = (each.contiguous().view(torch.uint8) for each in (there, members))
            _compare[(len(rows),)](
                rowptr, rows, now.contiguous(), *sides, gaps, strong, weak,
                K=k, SHORT=gpu.SHORT, LONG=gpu.LONG, num_warps=1,
            )  # fmt: skip
        real = strong >= 0
        ctx.save_for_backward(strong, weak)
        ctx.edges = len(now)
        ctx.mark_non_differentiable(real)
        return gaps, real

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (strong, weak), gradient = ctx.saved_tensors, gradients[0].contiguous()
        slope, count = gradient.new_zeros(ctx.edges), gradient.numel()
        if count:
            _back[(triton.cdiv(count, SLOTS),)](gradient, strong, weak, slope, count, B=SLOTS)
        return slope, *(None for _ in range(5))


def compare(
    now: Tensor, there: Tensor, members: Tensor, rowptr: Tensor, rows: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """See `rivals`."""
    return _Rivals.apply(now, there, members, rowptr, rows, k)  # type: ignore[no-any-return]
