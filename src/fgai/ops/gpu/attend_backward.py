"""Fused attention on the GPU, backward: the attention is computed again rather than read.

Over outgoing edges, with d = ∂out and δ_i = ⟨d_i, o_i⟩ + Σ_e a_e ∂a_e,

    ∂v_j = Σ keep_e a_e d_i,     ∂s_e = a_e (keep_e ⟨d_i, v_j⟩ + ∂a_e - δ_i),

then over incoming edges what ∂s passes on to the destinations. No atomics: every sum is one program's, in
edge order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fgai.ops.gpu.attend_parts import factor, inside, leaky, narrow, one, wide, wide_score

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"


@triton.jit
def _claims(
    start, high, i, source, near, far, lse, attention, d_attention, h, SLOPE: tl.constexpr, H: tl.constexpr,
    B: tl.constexpr, AGAIN: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """Σ_e a_e ∂a_e over B edges of node i from `start` on; where ∂a_e is 0, a_e is not looked at."""
    e = (start + tl.arange(0, B)).to(tl.int64)
    live = e < high
    if GIVEN == 2:
        share = tl.load(d_attention + e, mask=live, other=0.0) / H
        live = live & (share != 0)
    if AGAIN:
        j = tl.load(source + e, mask=live, other=0).to(tl.int64)
        mine = tl.load(near + i * H + h, mask=h < H, other=0.0)
        level = tl.load(lse + i * H + h, mask=h < H, other=0.0)
        s = leaky(narrow(far, j, h, live, H) + mine[None, :], SLOPE)
        a = tl.where(live[:, None], tl.exp(s - level[None, :]), 0.0)
    else:
        a = narrow(attention, e, h, live, H)
    if GIVEN == 2:
        found = tl.sum(a * share[:, None], axis=0)
    else:
        found = tl.sum(a * narrow(d_attention, e, h, live, H), axis=0)
    return found


@triton.jit
def middles(
    pointer, source, near, far, lse, out, d_out, attention, d_attention, result, SLOPE: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, FEW: tl.constexpr,
    BW: tl.constexpr, AGAIN: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """δ_i; its second term only when GIVEN, over FEW edges at a time in short rows and BW in long ones.

    GIVEN is 1 for a gradient of every head's attention, 2 for one of their mean. AGAIN: the attention was not
    kept and is found again from the additive score.
    """
    i = tl.program_id(0).to(tl.int64)
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    delta = tl.sum(one(out, i, h, c, H, C) * one(d_out, i, h, c, H, C), axis=1)
    if GIVEN:
        low, high = tl.load(pointer + i), tl.load(pointer + i + 1)
        if high - low > FEW:
            for start in range(low, high, BW):
                delta += _claims(
                    start,
                    high,
                    i,
                    source,
                    near,
                    far,
                    lse,
                    attention,
                    d_attention,
                    h,
                    SLOPE,
                    H,
                    BW,
                    AGAIN,
                    GIVEN,
                )
        else:
            delta += _claims(
                low, high, i, source, near, far, lse, attention, d_attention, h, SLOPE, H, FEW, AGAIN, GIVEN
            )
    tl.store(result + i * H + h, delta, mask=h < H)


@triton.jit
def sources(
    row, first, last, slot, edge, target, near, far, weight, values, d_out, lse, delta, d_attention,
    d_values, d_far, value_parts, far_parts, d_scores, seed,
    LIMIT: tl.constexpr, SCALE: tl.constexpr, SLOPE: tl.constexpr, RATE: tl.constexpr,
    H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
    SCORE: tl.constexpr, DROP: tl.constexpr, GIVEN: tl.constexpr,
):  # fmt: skip
    """∂values and ∂far over a piece of a source's edges; ∂s of each (before the leaky relu if additive)."""
    q = tl.program_id(0)
    j = tl.load(row + q).to(tl.int64)
    low, high, place = tl.load(first + q), tl.load(last + q), tl.load(slot + q).to(tl.int64)
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    kind: tl.constexpr = values.dtype.element_ty
    v = one(values, j, h, c, H, C)
    sums = tl.zeros([BH, BC], dtype=kind)
    if SCORE == 0:
        mine = tl.load(far + j * H + h, mask=h < H, other=0.0)
        passed = tl.zeros([BH], dtype=kind)
    else:
        mine = one(far, j, h, c, H, C)
        passed = tl.zeros([BH, BC], dtype=kind)
    w = one(weight, 0, h, c, H, C) if SCORE == 1 else mine
    for start in range(low, high, BE):
        k = start + tl.arange(0, BE)
        live = k < high
        e = tl.load(edge + k, mask=live, other=0).to(tl.int64)
        i = tl.load(target + k, mask=live, other=0).to(tl.int64)
        if SCORE == 0:
            other = narrow(near, i, h, live, H)
            s = leaky(other + mine[None, :], SLOPE)
        else:
            other = wide(near, i, h, c, live, H, C)
            s = wide_score(other, mine, w, SLOPE, RATE, SCORE)
        good = live[:, None] & (h[None, :] < H)
        a = tl.where(good, tl.exp(s - narrow(lse, i, h, live, H)), 0.0)
        d = wide(d_out, i, h, c, live, H, C)
        g = tl.sum(d * v[None, :, :], axis=2)
        used = a
        at = e[:, None] * H + h[None, :]
        if DROP:
            kept = factor(at, tl.load(seed), LIMIT, SCALE, kind)
            g = g * kept
            used = a * kept
        if GIVEN == 1:
            g += narrow(d_attention, e, h, live, H)
        elif GIVEN == 2:
            g += (tl.load(d_attention + e, mask=live, other=0.0) / H)[:, None]
        sums += tl.sum(used[:, :, None] * d, axis=0)
        ds = a * (g - narrow(delta, i, h, live, H))
        if SCORE == 0:
            ds = tl.where(other + mine[None, :] > 0, ds, ds * SLOPE)
            passed += tl.sum(ds, axis=0)
        elif SCORE == 1:
            t = ds[:, :, None] * w[None, :, :]
            passed += tl.sum(tl.where(other + mine[None, :, :] > 0, t, t * SLOPE), axis=0)
        else:
            passed += tl.sum((ds * RATE)[:, :, None] * other, axis=0)
        tl.store(d_scores + at, ds, mask=good)
    inner = h[:, None] * C + c[None, :]
    wide_good = inside(h, c, H, C)
    if place < 0:
        tl.store(d_values + j * (H * C) + inner, sums, mask=wide_good)
        if SCORE == 0:
            tl.store(d_far + j * H + h, passed, mask=h < H)
        else:
            tl.store(d_far + j * (H * C) + inner, passed, mask=wide_good)
    else:
        tl.store(value_parts + place * (H * C) + inner, sums, mask=wide_good)
        if SCORE == 0:
            tl.store(far_parts + place * H + h, passed, mask=h < H)
        else:
            tl.store(far_parts + place * (H * C) + inner, passed, mask=wide_good)


@triton.jit
def destinations(
    row, first, last, slot, source, near, far, weight, d_scores, d_near, near_parts, shares, pieces, step,
    SLOPE: tl.constexpr, RATE: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr, SCORE: tl.constexpr,
):  # fmt: skip
    """∂near over every `step`-th piece; for the dynamic score this program's share of ∂weight in `shares`."""
    h, c = tl.arange(0, BH), tl.arange(0, BC)
    kind: tl.constexpr = d_scores.dtype.element_ty
    inner = h[:, None] * C + c[None, :]
    good = inside(h, c, H, C)
    if SCORE == 1:
        w = one(weight, 0, h, c, H, C)
        share = tl.zeros([BH, BC], dtype=kind)
    for q in range(tl.program_id(0), pieces, step):
        i = tl.load(row + q).to(tl.int64)
        low, high, place = tl.load(first + q), tl.load(last + q), tl.load(slot + q).to(tl.int64)
        sums = tl.zeros([BH], dtype=kind) if SCORE == 0 else tl.zeros([BH, BC], dtype=kind)
        if SCORE == 1:
            mine = one(near, i, h, c, H, C)
        for start in range(low, high, BE):
            e = start + tl.arange(0, BE)
            live = e < high
            ds = narrow(d_scores, e.to(tl.int64), h, live, H)
            if SCORE == 0:
                sums += tl.sum(ds, axis=0)
            else:
                j = tl.load(source + e, mask=live, other=0).to(tl.int64)
                other = wide(far, j, h, c, live, H, C)
                if SCORE == 1:
                    z = other + mine[None, :, :]
                    t = tl.where(z > 0, ds[:, :, None], (ds * SLOPE)[:, :, None])
                    sums += tl.sum(t * w[None, :, :], axis=0)
                    share += tl.sum(t * z, axis=0)
                else:
                    sums += tl.sum((ds * RATE)[:, :, None] * other, axis=0)
        if SCORE == 0:
            if place < 0:
                tl.store(d_near + i * H + h, sums, mask=h < H)
            else:
                tl.store(near_parts + place * H + h, sums, mask=h < H)
        else:
            if place < 0:
                tl.store(d_near + i * (H * C) + inner, sums, mask=good)
            else:
                tl.store(near_parts + place * (H * C) + inner, sums, mask=good)
    if SCORE == 1:
        tl.store(shares + tl.program_id(0).to(tl.int64) * (H * C) + inner, share, mask=good)
