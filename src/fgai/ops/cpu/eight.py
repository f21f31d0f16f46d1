"""Eight heads of eight channels, GAT's usual layer, with every sum in registers.

The general loops go through memory for each head of each edge; here a row of 64 numbers is eight vectors, and
the eight sums of a node stay in registers from its first edge to its last.
"""

from __future__ import annotations

import numpy as np

from fgai.ops.cpu.draws import factors
from fgai.ops.cpu.lanes import LANES, load, prefetch, splat, store, totals, where_positive
from fgai.ops.cpu.rows import AHEAD, piece

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

WIDTH = 64


@piece
def aggregate_eight(low, high, i, source, values, attention, drop, out, scratch):
    """out[i] = Σ_e keep_e · attention_e · values_j over the edges low..high-1 of node i."""
    seed, limit, scale = drop
    zero = splat(values.dtype.type(0))
    s0, s1, s2, s3, s4, s5, s6, s7 = zero, zero, zero, zero, zero, zero, zero, zero
    for e in range(low, high):
        v = np.int64(source[e]) * WIDTH
        at = np.int64(e) * LANES
        a0, a1, a2, a3 = attention[at], attention[at + 1], attention[at + 2], attention[at + 3]
        a4, a5, a6, a7 = attention[at + 4], attention[at + 5], attention[at + 6], attention[at + 7]
        if limit > 0:
            store(scratch, 0, load(attention, at) * factors(at, seed, limit, scale))
            a0, a1, a2, a3 = scratch[0], scratch[1], scratch[2], scratch[3]
            a4, a5, a6, a7 = scratch[4], scratch[5], scratch[6], scratch[7]
        s0 = s0 + splat(a0) * load(values, v)
        s1 = s1 + splat(a1) * load(values, v + 8)
        s2 = s2 + splat(a2) * load(values, v + 16)
        s3 = s3 + splat(a3) * load(values, v + 24)
        s4 = s4 + splat(a4) * load(values, v + 32)
        s5 = s5 + splat(a5) * load(values, v + 40)
        s6 = s6 + splat(a6) * load(values, v + 48)
        s7 = s7 + splat(a7) * load(values, v + 56)
    here = np.int64(i) * WIDTH
    store(out, here, s0)
    store(out, here + 8, s1)
    store(out, here + 16, s2)
    store(out, here + 24, s3)
    store(out, here + 32, s4)
    store(out, here + 40, s5)
    store(out, here + 48, s6)
    store(out, here + 56, s7)


@piece
def sources_eight(
    low, high, j, edge, target, left, right, slope, values, drop, attention, d_out, means, d_attention,
    each, d_values, d_scores, d_left, scratch,
):  # fmt: skip
    """∂values, ∂left and ∂(left + right) of the outgoing edges low..high-1 of node j, additive score."""
    seed, limit, scale = drop
    zero, last = splat(values.dtype.type(0)), len(edge) - 1
    s0, s1, s2, s3, s4, s5, s6, s7 = zero, zero, zero, zero, zero, zero, zero, zero
    sum_left, mine, slopes = zero, load(left, np.int64(j) * LANES), splat(slope)
    v = np.int64(j) * WIDTH
    for p in range(low, high):
        at, i = np.int64(edge[p]) * LANES, np.int64(target[p])
        later = min(p + 2 * AHEAD, last)
        next_at, next_i = np.int64(edge[later]) * LANES, np.int64(target[later])
        for c in range(0, WIDTH, 64 // values.itemsize):
            prefetch(d_out, next_i * WIDTH + c)
        prefetch(attention, next_at)
        prefetch(d_scores, next_at)
        prefetch(means, next_i * LANES)
        prefetch(right, next_i * LANES)
        d = i * WIDTH
        d0, d1, d2, d3 = load(d_out, d), load(d_out, d + 8), load(d_out, d + 16), load(d_out, d + 24)
        d4, d5, d6, d7 = load(d_out, d + 32), load(d_out, d + 40), load(d_out, d + 48), load(d_out, d + 56)
        g = totals(
            d0 * load(values, v),
            d1 * load(values, v + 8),
            d2 * load(values, v + 16),
            d3 * load(values, v + 24),
            d4 * load(values, v + 32),
            d5 * load(values, v + 40),
            d6 * load(values, v + 48),
            d7 * load(values, v + 56),
        )
        a0, a1, a2, a3 = attention[at], attention[at + 1], attention[at + 2], attention[at + 3]
        a4, a5, a6, a7 = attention[at + 4], attention[at + 5], attention[at + 6], attention[at + 7]
        if limit > 0:
            kept = factors(at, seed, limit, scale)
            g = g * kept
            store(scratch, 0, load(attention, at) * kept)
            a0, a1, a2, a3 = scratch[0], scratch[1], scratch[2], scratch[3]
            a4, a5, a6, a7 = scratch[4], scratch[5], scratch[6], scratch[7]
        if len(d_attention) > 0:
            prefetch(d_attention, np.int64(edge[later]) * each)
            g = g + (load(d_attention, at) if each == LANES else splat(d_attention[edge[p]]))
        s0 = s0 + splat(a0) * d0
        s1 = s1 + splat(a1) * d1
        s2 = s2 + splat(a2) * d2
        s3 = s3 + splat(a3) * d3
        s4 = s4 + splat(a4) * d4
        s5 = s5 + splat(a5) * d5
        s6 = s6 + splat(a6) * d6
        s7 = s7 + splat(a7) * d7
        ds = load(attention, at) * (g - load(means, i * LANES))
        ds = where_positive(mine + load(right, i * LANES), ds, slopes * ds)
        store(d_scores, at, ds)
        sum_left = sum_left + ds
    store(d_values, v, s0)
    store(d_values, v + 8, s1)
    store(d_values, v + 16, s2)
    store(d_values, v + 24, s3)
    store(d_values, v + 32, s4)
    store(d_values, v + 40, s5)
    store(d_values, v + 48, s6)
    store(d_values, v + 56, s7)
    store(d_left, np.int64(j) * LANES, sum_left)
