"""Fused attention, backward: one pass over the outgoing edges.

With o the output, d its gradient, a the attention and keep the factors of dropout,

    g_e  = keep_e · ⟨d_i, v_j⟩ + ∂a_e
    ∂s_e = a_e (g_e - m_i),       m_i = ⟨d_i, o_i⟩ + Σ_e a_e ∂a_e
    ∂v_j = Σ_e keep_e · a_e · d_i

The row d_i is fetched once for both products. What the scores pass on to the destinations is summed over the
incoming edges afterwards, from ∂s.
"""

from __future__ import annotations

import numpy as np

from fgai.ops.cpu.draws import factor
from fgai.ops.cpu.eight import sources_eight
from fgai.ops.cpu.lanes import LANES, load, prefetch, splat, store, total, where_positive
from fgai.ops.cpu.parallel import run_blocks
from fgai.ops.cpu.plan import SUMS
from fgai.ops.cpu.rows import (
    AHEAD,
    axpy,
    clear_sums,
    copy_sums,
    dot,
    dot_axpy,
    fetch,
    kernel,
    padded,
    piece,
    plain_sum,
    weighted_sum,
)
from fgai.ops.cpu.score_rows import dynamic_gradient

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@kernel
def _means_block(b, blocks, rowptr, heads, channels, out, d_out, attention, d_attention, each, means, room):
    scratch = room[b]
    width = heads * channels
    for i in range(blocks[b], blocks[b + 1]):
        mine = means[np.int64(i) * heads : np.int64(i + 1) * heads]
        mine[:] = 0
        if len(d_attention) > 0 and each == heads:
            first, last = np.int64(rowptr[i]) * heads, np.int64(rowptr[i + 1]) * heads
            weighted_sum(attention, d_attention, first, last, heads, mine, scratch)
        elif len(d_attention) > 0 and heads == LANES:
            sums = splat(out.dtype.type(0))
            for e in range(rowptr[i], rowptr[i + 1]):
                sums = sums + splat(d_attention[e]) * load(attention, np.int64(e) * LANES)
            store(mine, 0, sums)
        elif len(d_attention) > 0:
            for e in range(rowptr[i], rowptr[i + 1]):
                axpy(heads, d_attention[e], attention, np.int64(e) * heads, mine, 0)
        for h in range(heads):
            c = np.int64(i) * width + h * channels
            mine[h] += dot(channels, out, c, d_out, c)


@kernel
def means(threads, blocks, rowptr, heads, channels, out, d_out, attention, d_attention, each, result, room):
    """m_i, the mean of g under the attention of each row; an empty `d_attention` counts as zero.

    It holds `each` = H numbers per edge, or one that counts for every head.
    """
    arguments = (blocks, rowptr, heads, channels, out, d_out, attention, d_attention, each, result, room)
    run_blocks(_means_block, threads, len(blocks) - 1, arguments)


@piece
def _ahead(p, edge, target, heads, width, attention, d_out, means, d_attention, each, d_scores):
    """Ask for what the edge a few steps further will need."""
    later = min(p + AHEAD, len(edge) - 1)
    at, there = np.int64(edge[later]) * heads, np.int64(target[later])
    fetch(d_out, there * width, width)
    prefetch(attention, at)
    prefetch(d_scores, at)
    prefetch(means, there * heads)
    if len(d_attention) > 0:
        prefetch(d_attention, np.int64(edge[later]) * each)


@piece
def _kept(at, drop, like):
    """The factor of dropout at one place; 1 without dropout."""
    seed, limit, scale = drop
    return factor(at, seed, limit, scale) if limit > 0 else like.dtype.type(1)


@piece
def _head(h, at, i, j, heads, channels, values, attention, drop, d_out, means, d_attention, each, scratch):
    """Return ∂s of one head of one edge, and add its part of ∂v_j to the sums in `scratch`."""
    here, there = (np.int64(i) * heads + h) * channels, (np.int64(j) * heads + h) * channels
    a, kept = attention[at + h], _kept(at + h, drop, attention)
    sums = SUMS + 3 * heads + h * padded(channels)
    g = kept * total(dot_axpy(channels, d_out, here, values, there, a * kept, scratch, sums))
    if len(d_attention) > 0:
        g += d_attention[at + h] if each == heads else d_attention[at // heads]
    return a * (g - means[np.int64(i) * heads + h])


@kernel
def _additive_block(
    b, blocks, colptr, edge, target, heads, channels, left, right, slope, values, drop,
    attention, d_out, means, d_attention, each, d_values, d_scores, d_left, room,
):  # fmt: skip
    width, sums, scratch = heads * channels, SUMS + 3 * heads, room[b]
    for j in range(blocks[b], blocks[b + 1]):
        if heads == LANES and channels == LANES:
            sources_eight(
                colptr[j], colptr[j + 1], j, edge, target, left, right, slope, values, drop, attention, d_out,
                means, d_attention, each, d_values, d_scores, d_left, scratch,
            )  # fmt: skip
            continue
        clear_sums(heads, channels, scratch, sums)
        there = np.int64(j) * heads
        d_left[there : there + heads] = 0
        for p in range(colptr[j], colptr[j + 1]):
            at, i = np.int64(edge[p]) * heads, target[p]
            here = np.int64(i) * heads
            _ahead(p, edge, target, heads, width, attention, d_out, means, d_attention, each, d_scores)
            prefetch(right, np.int64(target[min(p + AHEAD, len(edge) - 1)]) * heads)
            for h in range(heads):
                g = _head(
                    h,
                    at,
                    i,
                    j,
                    heads,
                    channels,
                    values,
                    attention,
                    drop,
                    d_out,
                    means,
                    d_attention,
                    each,
                    scratch,
                )
                g = where_positive(left[there + h] + right[here + h], g, slope * g)
                d_scores[at + h] = g
                d_left[there + h] += g
        copy_sums(heads, channels, scratch, sums, d_values, np.int64(j) * width)


@kernel
def additive(
    threads, blocks, colptr, edge, target, heads, channels, left, right, slope, values, drop,
    attention, d_out, means, d_attention, each, d_values, d_scores, d_left, room,
):  # fmt: skip
    """Gradients at the sources; `d_scores` ends as the gradient of left + right, before the leaky relu."""
    arguments = (
        blocks, colptr, edge, target, heads, channels, left, right, slope, values, drop,
        attention, d_out, means, d_attention, each, d_values, d_scores, d_left, room,
    )  # fmt: skip
    run_blocks(_additive_block, threads, len(blocks) - 1, arguments)


@kernel
def _dynamic_block(
    b, blocks, colptr, edge, target, heads, channels, left, right, weight, slope, values, drop,
    attention, d_out, means, d_attention, each, d_values, d_scores, d_left, room,
):  # fmt: skip
    width, sums, scratch = heads * channels, SUMS + 3 * heads, room[b]
    for j in range(blocks[b], blocks[b + 1]):
        there = np.int64(j) * width
        clear_sums(heads, channels, scratch, sums)
        d_left[there : there + width] = 0
        for p in range(colptr[j], colptr[j + 1]):
            at, i = np.int64(edge[p]) * heads, target[p]
            here = np.int64(i) * width
            _ahead(p, edge, target, heads, width, attention, d_out, means, d_attention, each, d_scores)
            fetch(right, np.int64(target[min(p + AHEAD, len(edge) - 1)]) * width, width)
            for h in range(heads):
                c = h * channels
                g = _head(
                    h,
                    at,
                    i,
                    j,
                    heads,
                    channels,
                    values,
                    attention,
                    drop,
                    d_out,
                    means,
                    d_attention,
                    each,
                    scratch,
                )
                d_scores[at + h] = g
                dynamic_gradient(
                    channels, left, there + c, right, here + c, weight, c, slope, g, d_left, there + c
                )
        copy_sums(heads, channels, scratch, sums, d_values, there)


@kernel
def dynamic(
    threads, blocks, colptr, edge, target, heads, channels, left, right, weight, slope, values, drop,
    attention, d_out, means, d_attention, each, d_values, d_scores, d_left, room,
):  # fmt: skip
    """Gradients at the sources; `d_scores` ends as the gradient of the scores."""
    arguments = (
        blocks, colptr, edge, target, heads, channels, left, right, weight, slope, values, drop,
        attention, d_out, means, d_attention, each, d_values, d_scores, d_left, room,
    )  # fmt: skip
    run_blocks(_dynamic_block, threads, len(blocks) - 1, arguments)


@kernel
def _dot_block(
    b, blocks, colptr, edge, target, heads, channels, query, rate, values, drop,
    attention, d_out, means, d_attention, each, d_values, d_scores, d_key, room,
):  # fmt: skip
    width, sums, scratch = heads * channels, SUMS + 3 * heads, room[b]
    for j in range(blocks[b], blocks[b + 1]):
        there = np.int64(j) * width
        clear_sums(heads, channels, scratch, sums)
        d_key[there : there + width] = 0
        for p in range(colptr[j], colptr[j + 1]):
            at, i = np.int64(edge[p]) * heads, target[p]
            here = np.int64(i) * width
            _ahead(p, edge, target, heads, width, attention, d_out, means, d_attention, each, d_scores)
            fetch(query, np.int64(target[min(p + AHEAD, len(edge) - 1)]) * width, width)
            for h in range(heads):
                c = h * channels
                g = _head(
                    h,
                    at,
                    i,
                    j,
                    heads,
                    channels,
                    values,
                    attention,
                    drop,
                    d_out,
                    means,
                    d_attention,
                    each,
                    scratch,
                )
                d_scores[at + h] = g
                axpy(channels, rate * g, query, here + c, d_key, there + c)
        copy_sums(heads, channels, scratch, sums, d_values, there)


@kernel
def dot_product(
    threads, blocks, colptr, edge, target, heads, channels, query, rate, values, drop,
    attention, d_out, means, d_attention, each, d_values, d_scores, d_key, room,
):  # fmt: skip
    """Gradients at the sources; `d_scores` ends as the gradient of the scores."""
    arguments = (
        blocks, colptr, edge, target, heads, channels, query, rate, values, drop,
        attention, d_out, means, d_attention, each, d_values, d_scores, d_key, room,
    )  # fmt: skip
    run_blocks(_dot_block, threads, len(blocks) - 1, arguments)


@kernel
def _sum_rows_block(b, blocks, rowptr, heads, given, out, room):
    for i in range(blocks[b], blocks[b + 1]):
        first, last = np.int64(rowptr[i]) * heads, np.int64(rowptr[i + 1]) * heads
        plain_sum(given, first, last, heads, out[np.int64(i) * heads :], room[b])


@kernel
def sum_rows(threads, blocks, rowptr, heads, given, out, room):
    """out[i] = Σ of given [E, H] over the incoming edges of i."""
    run_blocks(_sum_rows_block, threads, len(blocks) - 1, (blocks, rowptr, heads, given, out, room))
