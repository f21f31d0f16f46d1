"""Fused attention, forward: score → softmax → dropout → aggregate in one pass over the incoming edges.

The scores of a row are written where its attention will be, normalised there while they are in cache, and
used at once.
"""

from __future__ import annotations

import numpy as np

from fgai.ops.cpu.draws import factor
from fgai.ops.cpu.eight import aggregate_eight
from fgai.ops.cpu.lanes import LANES
from fgai.ops.cpu.parallel import run_blocks
from fgai.ops.cpu.plan import SUMS
from fgai.ops.cpu.rows import (
    add_scaled,
    average,
    clear_sums,
    copy_sums,
    fetch,
    kernel,
    normalise,
    padded,
    piece,
)
from fgai.ops.cpu.score_rows import additive_row, dot_row, dynamic_row

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@piece
def _finish_row(low, high, i, source, heads, channels, values, attention, drop, out, mean, scratch):
    """Normalise the scores of row i in `attention` and aggregate `values`; `drop` = (seed, limit, scale).

    `mean`, unless it is empty, gets the mean of the attention over the heads.
    """
    seed, limit, scale = drop
    width = heads * channels
    here = np.int64(i) * width
    for e in range(low, high):
        fetch(values, np.int64(source[e]) * width, width)
    if low < high:
        normalise(attention, np.int64(low) * heads, np.int64(high) * heads, heads, scratch)
        if len(mean) > 0:
            average(low, high, heads, attention, mean)
    if heads == LANES and channels == LANES:
        aggregate_eight(low, high, i, source, values, attention, drop, out, scratch)
        return
    sums = SUMS + 3 * heads
    clear_sums(heads, channels, scratch, sums)
    for e in range(low, high):
        there, at = np.int64(source[e]) * width, np.int64(e) * heads
        for h in range(heads):
            a = attention[at + h]
            if limit > 0:
                a *= factor(at + h, seed, limit, scale)
            add_scaled(channels, a, values, there + h * channels, scratch, sums + h * padded(channels))
    copy_sums(heads, channels, scratch, sums, out, here)


@kernel
def _additive_block(
    b, blocks, rowptr, source, heads, channels, left, right, slope, values, drop, attention, out, mean, room
):
    scratch = room[b]
    for i in range(blocks[b], blocks[b + 1]):
        low, high = rowptr[i], rowptr[i + 1]
        additive_row(low, high, i, source, heads, left, right, slope, attention)
        _finish_row(low, high, i, source, heads, channels, values, attention, drop, out, mean, scratch)


@kernel
def additive(
    threads,
    blocks,
    rowptr,
    source,
    heads,
    channels,
    left,
    right,
    slope,
    values,
    drop,
    attention,
    out,
    mean,
    room,
):
    """Fused forward with the additive score."""
    arguments = (
        blocks, rowptr, source, heads, channels, left, right, slope, values, drop, attention, out, mean, room
    )  # fmt: skip
    run_blocks(_additive_block, threads, len(blocks) - 1, arguments)


@kernel
def _dynamic_block(
    b,
    blocks,
    rowptr,
    source,
    heads,
    channels,
    left,
    right,
    weight,
    slope,
    values,
    drop,
    attention,
    out,
    mean,
    room,
):
    scratch = room[b]
    for i in range(blocks[b], blocks[b + 1]):
        low, high = rowptr[i], rowptr[i + 1]
        dynamic_row(low, high, i, source, heads, channels, left, right, weight, slope, attention)
        _finish_row(low, high, i, source, heads, channels, values, attention, drop, out, mean, scratch)


@kernel
def dynamic(
    threads,
    blocks,
    rowptr,
    source,
    heads,
    channels,
    left,
    right,
    weight,
    slope,
    values,
    drop,
    attention,
    out,
    mean,
    room,
):
    """Fused forward with the dynamic score."""
    arguments = (
        blocks, rowptr, source, heads, channels, left, right, weight, slope, values, drop,
        attention, out, mean, room,
    )  # fmt: skip
    run_blocks(_dynamic_block, threads, len(blocks) - 1, arguments)


@kernel
def _dot_block(
    b, blocks, rowptr, source, heads, channels, query, key, rate, values, drop, attention, out, mean, room
):
    scratch = room[b]
    for i in range(blocks[b], blocks[b + 1]):
        low, high = rowptr[i], rowptr[i + 1]
        dot_row(low, high, i, source, heads, channels, query, key, rate, attention)
        _finish_row(low, high, i, source, heads, channels, values, attention, drop, out, mean, scratch)


@kernel
def dot_product(
    threads,
    blocks,
    rowptr,
    source,
    heads,
    channels,
    query,
    key,
    rate,
    values,
    drop,
    attention,
    out,
    mean,
    room,
):
    """Fused forward with the dot-product score."""
    arguments = (
        blocks, rowptr, source, heads, channels, query, key, rate, values, drop, attention, out, mean, room
    )  # fmt: skip
    run_blocks(_dot_block, threads, len(blocks) - 1, arguments)
