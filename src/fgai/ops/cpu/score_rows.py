"""The scores of the incoming edges of one node, and their gradients, on flat arrays.

Every array is flat; j is the source and i the destination of edge e, `here` the offset of i's row and `there`
that of j's.
"""

from __future__ import annotations

import numpy as np

from fgai.ops.cpu.lanes import LANES, load, load_some, splat, store, store_some, total, where_positive
from fgai.ops.cpu.rows import AHEAD, dot, fetch, piece

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@piece
def additive_row(low, high, i, source, heads, left, right, slope, out):
    """out[e, h] = leaky_relu(left[j, h] + right[i, h]) for e in low..high-1."""
    here = np.int64(i) * heads
    if heads == LANES:
        mine, lanes_slope = load(right, here), splat(slope)
        for e in range(low, high):
            z = load(left, np.int64(source[e]) * LANES) + mine
            store(out, np.int64(e) * LANES, where_positive(z, z, lanes_slope * z))
    else:
        for e in range(low, high):
            there, at = np.int64(source[e]) * heads, np.int64(e) * heads
            for h in range(heads):
                z = left[there + h] + right[here + h]
                out[at + h] = where_positive(z, z, slope * z)


@piece
def dynamic_score(channels, left, there, right, here, weight, at, slope):
    """Σ_c weight · leaky_relu(left + right) for one head."""
    rest = channels & (LANES - 1)
    whole = channels - rest
    lanes, lanes_slope = splat(left.dtype.type(0)), splat(slope)
    for c in range(0, whole, LANES):
        z = load(left, there + c) + load(right, here + c)
        lanes = lanes + load(weight, at + c) * where_positive(z, z, lanes_slope * z)
    if rest > 0:
        z = load_some(left, there + whole, rest) + load_some(right, here + whole, rest)
        lanes = lanes + load_some(weight, at + whole, rest) * where_positive(z, z, lanes_slope * z)
    return total(lanes)


@piece
def dynamic_row(low, high, i, source, heads, channels, left, right, weight, slope, out):
    """out[e, h] = Σ_c weight[h, c] · leaky_relu(left[j, h, c] + right[i, h, c])."""
    width, end = heads * channels, len(source) - 1
    here = np.int64(i) * width
    for e in range(low, high):
        there = np.int64(source[e]) * width
        fetch(left, np.int64(source[min(e + AHEAD, end)]) * width, width)
        for h in range(heads):
            c = h * channels
            out[np.int64(e) * heads + h] = dynamic_score(
                channels, left, there + c, right, here + c, weight, c, slope
            )


@piece
def dot_row(low, high, i, source, heads, channels, query, key, scale, out):
    """out[e, h] = ⟨query[i, h], key[j, h]⟩ · scale."""
    width, end = heads * channels, len(source) - 1
    here = np.int64(i) * width
    for e in range(low, high):
        there = np.int64(source[e]) * width
        fetch(key, np.int64(source[min(e + AHEAD, end)]) * width, width)
        for h in range(heads):
            c = h * channels
            out[np.int64(e) * heads + h] = scale * dot(channels, query, here + c, key, there + c)


@piece
def dynamic_gradient(channels, left, there, right, here, weight, at, slope, g, out, k):
    """out[k + c] += g · weight[c] · leaky_relu'(left + right)."""
    rest = channels & (LANES - 1)
    whole = channels - rest
    lanes_slope, lanes_g = splat(slope), splat(g)
    for c in range(0, whole, LANES):
        z = load(left, there + c) + load(right, here + c)
        t = lanes_g * load(weight, at + c)
        store(out, k + c, load(out, k + c) + where_positive(z, t, lanes_slope * t))
    if rest > 0:
        z = load_some(left, there + whole, rest) + load_some(right, here + whole, rest)
        t = lanes_g * load_some(weight, at + whole, rest)
        t = where_positive(z, t, lanes_slope * t)
        store_some(out, k + whole, rest, load_some(out, k + whole, rest) + t)


@piece
def dynamic_weight_gradient(channels, left, there, right, here, weight, at, slope, g, out, d_weight):
    """As `dynamic_gradient`, for the destination; and d_weight[at + c] += g · leaky_relu(left + right)."""
    rest = channels & (LANES - 1)
    whole = channels - rest
    lanes_slope, lanes_g = splat(slope), splat(g)
    for c in range(0, whole, LANES):
        z = load(left, there + c) + load(right, here + c)
        t = where_positive(z, lanes_g, lanes_slope * lanes_g)
        store(out, here + c, load(out, here + c) + t * load(weight, at + c))
        store(d_weight, at + c, load(d_weight, at + c) + t * z)
    if rest > 0:
        there, here, at = there + whole, here + whole, at + whole
        z = load_some(left, there, rest) + load_some(right, here, rest)
        t = where_positive(z, lanes_g, lanes_slope * lanes_g)
        store_some(out, here, rest, load_some(out, here, rest) + t * load_some(weight, at, rest))
        store_some(d_weight, at, rest, load_some(d_weight, at, rest) + t * z)
