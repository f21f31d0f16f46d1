"""Loops behind the three attention scores: forward over incoming edges, backward in both directions."""

from __future__ import annotations

import numpy as np
from numba import njit, prange

from fgai.ops.cpu.vector import FAST, axpy, dot

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@njit(parallel=True, fastmath=FAST, cache=True)
def additive(rowptr, source, blocks, left, right, slope, out):
    """out[e, h] = leaky_relu(left[j, h] + right[i, h])."""
    heads = left.shape[1]
    for b in prange(len(blocks) - 1):
        for i in range(blocks[b], blocks[b + 1]):
            for e in range(rowptr[i], rowptr[i + 1]):
                for h in range(heads):
                    z = left[source[e], h] + right[i, h]
                    out[e, h] = z if z > 0 else slope * z


@njit(parallel=True, fastmath=FAST, cache=True)
def additive_left(colptr, csc, destination, blocks, left, right, slope, gradient, out):
    """Gradient at the sources."""
    heads = left.shape[1]
    for b in prange(len(blocks) - 1):
        for j in range(blocks[b], blocks[b + 1]):
            out[j] = 0
            for p in range(colptr[j], colptr[j + 1]):
                e = csc[p]
                for h in range(heads):
                    g = gradient[e, h]
                    out[j, h] += g if left[j, h] + right[destination[e], h] > 0 else slope * g


@njit(parallel=True, fastmath=FAST, cache=True)
def additive_right(rowptr, source, blocks, left, right, slope, gradient, out):
    """Gradient at the destinations."""
    heads = left.shape[1]
    for b in prange(len(blocks) - 1):
        for i in range(blocks[b], blocks[b + 1]):
            out[i] = 0
            for e in range(rowptr[i], rowptr[i + 1]):
                for h in range(heads):
                    g = gradient[e, h]
                    out[i, h] += g if left[source[e], h] + right[i, h] > 0 else slope * g


@njit(parallel=True, fastmath=FAST, cache=True)
def dynamic(rowptr, source, blocks, left, right, weight, slope, out):
    """out[e, h] = Σ_c weight[h, c] · leaky_relu(left[j, h, c] + right[i, h, c])."""
    heads, channels = weight.shape
    for b in prange(len(blocks) - 1):
        for i in range(blocks[b], blocks[b + 1]):
            for e in range(rowptr[i], rowptr[i + 1]):
                j = source[e]
                for h in range(heads):
                    total = left.dtype.type(0)
                    for c in range(channels):
                        z = left[j, h, c] + right[i, h, c]
                        total += weight[h, c] * (z if z > 0 else slope * z)
                    out[e, h] = total


@njit(parallel=True, fastmath=FAST, cache=True)
def dynamic_left(colptr, csc, destination, blocks, left, right, weight, slope, gradient, out):
    """Gradient at the sources."""
    heads, channels = weight.shape
    for b in prange(len(blocks) - 1):
        for j in range(blocks[b], blocks[b + 1]):
            out[j] = 0
            for p in range(colptr[j], colptr[j + 1]):
                e = csc[p]
                i = destination[e]
                for h in range(heads):
                    g = gradient[e, h]
                    for c in range(channels):
                        t = g * weight[h, c]
                        out[j, h, c] += t if left[j, h, c] + right[i, h, c] > 0 else slope * t


@njit(parallel=True, fastmath=FAST, cache=True)
def dynamic_right(rowptr, source, blocks, left, right, weight, slope, gradient, out, partial):
    """Gradient at the destinations, and of the weight per block."""
    heads, channels = weight.shape
    for b in prange(len(blocks) - 1):
        for i in range(blocks[b], blocks[b + 1]):
            out[i] = 0
            for e in range(rowptr[i], rowptr[i + 1]):
                j = source[e]
                for h in range(heads):
                    g = gradient[e, h]
                    for c in range(channels):
                        z = left[j, h, c] + right[i, h, c]
                        t = g if z > 0 else slope * g
                        out[i, h, c] += t * weight[h, c]
                        partial[b, h, c] += t * z


@njit(parallel=True, fastmath=FAST, cache=True)
def dot_product(rowptr, source, blocks, query, key, out):
    """out[e, h] = ⟨query[i, h], key[j, h]⟩ / √C."""
    heads, channels = query.shape[1], query.shape[2]
    scale = query.dtype.type(1 / np.sqrt(channels))
    queries, keys = query.reshape(-1), key.reshape(-1)
    width = heads * channels
    for b in prange(len(blocks) - 1):
        for i in range(blocks[b], blocks[b + 1]):
            here = np.int64(i) * width
            for e in range(rowptr[i], rowptr[i + 1]):
                there = np.int64(source[e]) * width
                for h in range(heads):
                    c = h * channels
                    out[e, h] = scale * dot(channels, queries, here + c, keys, there + c)


@njit(parallel=True, fastmath=FAST, cache=True)
def dot_product_query(rowptr, source, blocks, key, gradient, out):
    """Gradient of the queries (at the destinations)."""
    heads, channels = key.shape[1], key.shape[2]
    scale = key.dtype.type(1 / np.sqrt(channels))
    keys, result = key.reshape(-1), out.reshape(-1)
    width = heads * channels
    for b in prange(len(blocks) - 1):
        for i in range(blocks[b], blocks[b + 1]):
            here = np.int64(i) * width
            result[here : here + width] = 0
            for e in range(rowptr[i], rowptr[i + 1]):
                there = np.int64(source[e]) * width
                for h in range(heads):
                    c = h * channels
                    axpy(channels, scale * gradient[e, h], keys, there + c, result, here + c)


@njit(parallel=True, fastmath=FAST, cache=True)
def dot_product_key(colptr, csc, destination, blocks, query, gradient, out):
    """Gradient of the keys (at the sources)."""
    heads, channels = query.shape[1], query.shape[2]
    scale = query.dtype.type(1 / np.sqrt(channels))
    queries, result = query.reshape(-1), out.reshape(-1)
    width = heads * channels
    for b in prange(len(blocks) - 1):
        for j in range(blocks[b], blocks[b + 1]):
            here = np.int64(j) * width
            result[here : here + width] = 0
            for p in range(colptr[j], colptr[j + 1]):
                e = csc[p]
                there = np.int64(destination[e]) * width
                for h in range(heads):
                    c = h * channels
                    axpy(channels, scale * gradient[e, h], queries, there + c, result, here + c)
