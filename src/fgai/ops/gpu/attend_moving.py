"""Fused attention on the GPU, backward, where few nodes move: ∂s of their edges is found where it is needed.

With few moving nodes most edges touch none of them. `attend_backward.sources` then goes over the edges that
leave them; this goes over those that reach them, and reads nothing that it left.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fgai.ops.gpu.attend_parts import inside, leaky, narrow, one, wide, wide_score

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"


@triton.jit
def destinations(
    row, first, last, slot, source, near, far, weight, values, d_out, lse, delta, d_near, near_parts,
    SLOPE: tl.constexpr, RATE: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    """∂near over a piece of a destination's edges."""
    q = tl.program_id(0)
    i = tl.load(row + q).to(tl.int64)
    low, high, place = tl.load(first + q), tl.load(last + q), tl.load(slot + q).to(tl.int64)
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    kind: tl.constexpr = values.dtype.element_ty
    d = one(d_out, i, h, c, H, C)
    level = tl.load(lse + i * H + h, mask=h < H, other=0.0)
    middle = tl.load(delta + i * H + h, mask=h < H, other=0.0)
    if SCORE == 0:
        mine = tl.load(near + i * H + h, mask=h < H, other=0.0)
        sums = tl.zeros([BH], dtype=kind)
    else:
        mine = one(near, i, h, c, H, C)
        sums = tl.zeros([BH, BC], dtype=kind)
    w = one(weight, 0, h, c, H, C) if SCORE == 1 else mine
    for start in range(low, high, BE):
        e = start + tl.arange(0, BE)
        live = e < high
        j = tl.load(source + e, mask=live, other=0).to(tl.int64)
        if SCORE == 0:
            other = narrow(far, j, h, live, H)
            s = leaky(other + mine[None, :], SLOPE)
        else:
            other = wide(far, j, h, c, live, H, C)
            s = wide_score(other, mine, w, SLOPE, RATE, SCORE)
        a = tl.where(live[:, None] & (h[None, :] < H), tl.exp(s - level[None, :]), 0.0)
        g = tl.sum(d[None, :, :] * wide(values, j, h, c, live, H, C), axis=2)
        ds = a * (g - middle[None, :])
        if SCORE == 0:
            sums += tl.sum(tl.where(other + mine[None, :] > 0, ds, ds * SLOPE), axis=0)
        elif SCORE == 1:
            t = tl.where(other + mine[None, :, :] > 0, ds[:, :, None], (ds * SLOPE)[:, :, None])
            sums += tl.sum(t * w[None, :, :], axis=0)
        else:
            sums += tl.sum((ds * RATE)[:, :, None] * other, axis=0)
    if SCORE == 0:
        at, good = i * H + h, h < H
        split = place * H + h
    else:
        inner = h[:, None] * C + c[None, :]
        at, good = i * (H * C) + inner, inside(h, c, H, C)
        split = place * (H * C) + inner
    if place < 0:
        tl.store(d_near + at, sums, mask=good)
    else:
        tl.store(near_parts + split, sums, mask=good)
