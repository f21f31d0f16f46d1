"""Fused attention on the GPU, forward: score → softmax → dropout → aggregate for three scores.

A program goes once through the incoming edges of a piece of a row, with a running maximum m and sum l,

    m' = max(m, s_e),  l' = l exp(m - m') + Σ exp(s_e - m'),  o' = o exp(m - m') + Σ exp(s_e - m') keep_e v_j,

and keeps lse = m + log l per node. The attention exp(s_e - lse_i) is written only when asked for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fgai.ops.gpu.attend_parts import factor, inside, leaky, narrow, one, wide, wide_score

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

# The maximum over pieces that are all empty; a difference of two infinities would be no number.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def forward(
    row, first, last, slot, source, near, far, weight, values, out, lse, attention, tops, totals, parts, seed,
    LIMIT: tl.constexpr, SCALE: tl.constexpr, SLOPE: tl.constexpr, RATE: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
    SCORE: tl.constexpr, DROP: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """One piece of a row. `near` belongs to the destination, `far` to the sources."""
    p = tl.program_id(0)
    i = tl.load(row + p).to(tl.int64)
    low, high, place = tl.load(first + p), tl.load(last + p), tl.load(slot + p).to(tl.int64)
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    kind: tl.constexpr = values.dtype.element_ty
    mine = tl.load(near + i * H + h, mask=h < H, other=0.0) if SCORE == 0 else one(near, i, h, c, H, C)
    w = one(weight, 0, h, c, H, C) if SCORE == 1 else mine
    top = tl.full([BH], float("-inf"), dtype=kind)
    total = tl.zeros([BH], dtype=kind)
    sums = tl.zeros([BH, BC], dtype=kind)
    for start in range(low, high, BE):
        e = start + tl.arange(0, BE)
        live = e < high
        j = tl.load(source + e, mask=live, other=0).to(tl.int64)
        if SCORE == 0:
            s = leaky(narrow(far, j, h, live, H) + mine[None, :], SLOPE)
        else:
            s = wide_score(wide(far, j, h, c, live, H, C), mine, w, SLOPE, RATE, SCORE)
        s = tl.where(live[:, None], s, float("-inf"))
        at = e.to(tl.int64)[:, None] * H + h[None, :]
        if WRITE:
            tl.store(attention + at, s, mask=live[:, None] & (h[None, :] < H))
        higher = tl.maximum(top, tl.max(s, axis=0))
        shrink = tl.exp(top - higher)
        a = tl.exp(s - higher[None, :])
        total = total * shrink + tl.sum(a, axis=0)
        if DROP:
            a = a * factor(at, tl.load(seed), LIMIT, SCALE, kind)
        v = wide(values, j, h, c, live, H, C)
        sums = sums * shrink[:, None] + tl.sum(a[:, :, None] * v, axis=0)
        top = higher
    good = inside(h, c, H, C)
    if place < 0:
        some = high > low
        result = tl.where(some, sums / total[:, None], 0.0)
        tl.store(out + i * (H * C) + h[:, None] * C + c[None, :], result, mask=good)
        tl.store(lse + i * H + h, tl.where(some, top + tl.log(total), 0.0), mask=h < H)
    else:
        tl.store(parts + place * (H * C) + h[:, None] * C + c[None, :], sums, mask=good)
        tl.store(tops + place * H + h, top, mask=h < H)
        tl.store(totals + place * H + h, total, mask=h < H)


@triton.jit
def join(
    split_row, split_slot, tops, totals, parts, out, lse,
    H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Put the pieces of one row together, in order."""
    r = tl.program_id(0)
    i = tl.load(split_row + r).to(tl.int64)
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    kind: tl.constexpr = out.dtype.element_ty
    top = tl.full([BH], float("-inf"), dtype=kind)
    total = tl.zeros([BH], dtype=kind)
    sums = tl.zeros([BH, BC], dtype=kind)
    begin, end = tl.load(split_slot + r).to(tl.int64), tl.load(split_slot + r + 1).to(tl.int64)
    for place in range(begin, end):
        level = tl.load(tops + place * H + h, mask=h < H, other=0.0)
        higher = tl.maximum(tl.maximum(top, level), LOWEST)
        shrink, share = tl.exp(top - higher), tl.exp(level - higher)
        total = total * shrink + share * tl.load(totals + place * H + h, mask=h < H, other=1.0)
        sums = sums * shrink[:, None] + share[:, None] * one(parts, place, h, c, H, C)
        top = higher
    where = out + i * (H * C) + h[:, None] * C + c[None, :]
    some = total > 0
    tl.store(where, tl.where(some[:, None], sums / total[:, None], 0.0), mask=inside(h, c, H, C))
    tl.store(lse + i * H + h, tl.where(some, top + tl.log(total), 0.0), mask=h < H)


@triton.jit
def normalise(
    destination, lse, attention, mean, count, H: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr,
    KEEP: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    """Turn the scores of some edges, left in `attention`, into attention, and into its mean over heads."""
    e = (tl.program_id(0) * BE + tl.arange(0, BE)).to(tl.int64)
    h = tl.arange(0, BH)
    live = e < count
    good = live[:, None] & (h[None, :] < H)
    i = tl.load(destination + e, mask=live, other=0).to(tl.int64)
    at = attention + e[:, None] * H + h[None, :]
    found = tl.exp(tl.load(at, mask=good, other=0.0) - narrow(lse, i, h, live, H))
    found = tl.where(good, found, 0.0)
    if KEEP:
        tl.store(at, found, mask=good)
    if MEAN:
        tl.store(mean + e, tl.sum(found, axis=1) / H, mask=live)
