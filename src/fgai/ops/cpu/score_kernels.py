"""Loops behind the three attention scores: forward over incoming edges, backward in both directions."""

from __future__ import annotations

import numpy as np

from fgai.ops.cpu.lanes import where_positive
from fgai.ops.cpu.parallel import run_blocks
from fgai.ops.cpu.rows import AHEAD, axpy, fetch, kernel
from fgai.ops.cpu.score_rows import (
    additive_row,
    dot_row,
    dynamic_gradient,
    dynamic_row,
    dynamic_weight_gradient,
)

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@kernel
def _additive(b, blocks, rowptr, source, heads, left, right, slope, out):
    for i in range(blocks[b], blocks[b + 1]):
        additive_row(rowptr[i], rowptr[i + 1], i, source, heads, left, right, slope, out)


@kernel
def additive(threads, blocks, rowptr, source, heads, left, right, slope, out):
    """out[e, h] = leaky_relu(left[j, h] + right[i, h])."""
    run_blocks(_additive, threads, len(blocks) - 1, (blocks, rowptr, source, heads, left, right, slope, out))


@kernel
def _additive_left(b, blocks, colptr, edge, target, heads, left, right, slope, gradient, out):
    for j in range(blocks[b], blocks[b + 1]):
        there = np.int64(j) * heads
        out[there : there + heads] = 0
        for p in range(colptr[j], colptr[j + 1]):
            at, here = np.int64(edge[p]) * heads, np.int64(target[p]) * heads
            for h in range(heads):
                g = gradient[at + h]
                out[there + h] += where_positive(left[there + h] + right[here + h], g, slope * g)


@kernel
def additive_left(threads, blocks, colptr, edge, target, heads, left, right, slope, gradient, out):
    """Gradient at the sources."""
    arguments = (blocks, colptr, edge, target, heads, left, right, slope, gradient, out)
    run_blocks(_additive_left, threads, len(blocks) - 1, arguments)


@kernel
def _additive_right(b, blocks, rowptr, source, heads, left, right, slope, gradient, out):
    for i in range(blocks[b], blocks[b + 1]):
        here = np.int64(i) * heads
        out[here : here + heads] = 0
        for e in range(rowptr[i], rowptr[i + 1]):
            at, there = np.int64(e) * heads, np.int64(source[e]) * heads
            for h in range(heads):
                g = gradient[at + h]
                out[here + h] += where_positive(left[there + h] + right[here + h], g, slope * g)


@kernel
def additive_right(threads, blocks, rowptr, source, heads, left, right, slope, gradient, out):
    """Gradient at the destinations."""
    arguments = (blocks, rowptr, source, heads, left, right, slope, gradient, out)
    run_blocks(_additive_right, threads, len(blocks) - 1, arguments)


@kernel
def _dynamic(b, blocks, rowptr, source, heads, channels, left, right, weight, slope, out):
    for i in range(blocks[b], blocks[b + 1]):
        dynamic_row(rowptr[i], rowptr[i + 1], i, source, heads, channels, left, right, weight, slope, out)


@kernel
def dynamic(threads, blocks, rowptr, source, heads, channels, left, right, weight, slope, out):
    """out[e, h] = Σ_c weight[h, c] · leaky_relu(left[j, h, c] + right[i, h, c])."""
    arguments = (blocks, rowptr, source, heads, channels, left, right, weight, slope, out)
    run_blocks(_dynamic, threads, len(blocks) - 1, arguments)


@kernel
def _dynamic_left(
    b, blocks, colptr, edge, target, heads, channels, left, right, weight, slope, gradient, out
):
    width, end = heads * channels, len(edge) - 1
    for j in range(blocks[b], blocks[b + 1]):
        there = np.int64(j) * width
        out[there : there + width] = 0
        for p in range(colptr[j], colptr[j + 1]):
            here = np.int64(target[p]) * width
            fetch(right, np.int64(target[min(p + AHEAD, end)]) * width, width)
            for h in range(heads):
                g, c = gradient[np.int64(edge[p]) * heads + h], h * channels
                dynamic_gradient(
                    channels, left, there + c, right, here + c, weight, c, slope, g, out, there + c
                )


@kernel
def dynamic_left(
    threads, blocks, colptr, edge, target, heads, channels, left, right, weight, slope, gradient, out
):
    """Gradient at the sources."""
    arguments = (blocks, colptr, edge, target, heads, channels, left, right, weight, slope, gradient, out)
    run_blocks(_dynamic_left, threads, len(blocks) - 1, arguments)


@kernel
def _dynamic_right(
    b, blocks, rowptr, source, heads, channels, left, right, weight, slope, gradient, out, partial
):
    width, end = heads * channels, len(source) - 1
    d_weight = partial[b]
    for i in range(blocks[b], blocks[b + 1]):
        here = np.int64(i) * width
        out[here : here + width] = 0
        for e in range(rowptr[i], rowptr[i + 1]):
            there = np.int64(source[e]) * width
            fetch(left, np.int64(source[min(e + AHEAD, end)]) * width, width)
            for h in range(heads):
                g, c = gradient[np.int64(e) * heads + h], h * channels
                dynamic_weight_gradient(
                    channels, left, there + c, right, here + c, weight, c, slope, g, out, d_weight
                )


@kernel
def dynamic_right(
    threads, blocks, rowptr, source, heads, channels, left, right, weight, slope, gradient, out, partial
):
    """Gradient at the destinations, and of the weight block by block (`partial` starts at zero)."""
    arguments = (blocks, rowptr, source, heads, channels, left, right, weight, slope, gradient, out, partial)
    run_blocks(_dynamic_right, threads, len(blocks) - 1, arguments)


@kernel
def _dot_product(b, blocks, rowptr, source, heads, channels, query, key, scale, out):
    for i in range(blocks[b], blocks[b + 1]):
        dot_row(rowptr[i], rowptr[i + 1], i, source, heads, channels, query, key, scale, out)


@kernel
def dot_product(threads, blocks, rowptr, source, heads, channels, query, key, scale, out):
    """out[e, h] = ⟨query[i, h], key[j, h]⟩ · scale."""
    arguments = (blocks, rowptr, source, heads, channels, query, key, scale, out)
    run_blocks(_dot_product, threads, len(blocks) - 1, arguments)


@kernel
def _dot_product_query(b, blocks, rowptr, source, heads, channels, key, scale, gradient, out):
    width, end = heads * channels, len(source) - 1
    for i in range(blocks[b], blocks[b + 1]):
        here = np.int64(i) * width
        out[here : here + width] = 0
        for e in range(rowptr[i], rowptr[i + 1]):
            there = np.int64(source[e]) * width
            fetch(key, np.int64(source[min(e + AHEAD, end)]) * width, width)
            for h in range(heads):
                g, c = scale * gradient[np.int64(e) * heads + h], h * channels
                axpy(channels, g, key, there + c, out, here + c)


@kernel
def dot_product_query(threads, blocks, rowptr, source, heads, channels, key, scale, gradient, out):
    """Gradient of the queries (at the destinations)."""
    arguments = (blocks, rowptr, source, heads, channels, key, scale, gradient, out)
    run_blocks(_dot_product_query, threads, len(blocks) - 1, arguments)


@kernel
def _dot_product_key(b, blocks, colptr, edge, target, heads, channels, query, scale, gradient, out):
    width, end = heads * channels, len(edge) - 1
    for j in range(blocks[b], blocks[b + 1]):
        there = np.int64(j) * width
        out[there : there + width] = 0
        for p in range(colptr[j], colptr[j + 1]):
            here = np.int64(target[p]) * width
            fetch(query, np.int64(target[min(p + AHEAD, end)]) * width, width)
            for h in range(heads):
                g, c = scale * gradient[np.int64(edge[p]) * heads + h], h * channels
                axpy(channels, g, query, here + c, out, there + c)


@kernel
def dot_product_key(threads, blocks, colptr, edge, target, heads, channels, query, scale, gradient, out):
    """Gradient of the keys (at the sources)."""
    arguments = (blocks, colptr, edge, target, heads, channels, query, scale, gradient, out)
    run_blocks(_dot_product_key, threads, len(blocks) - 1, arguments)
