"""Triton kernels over compressed rows: one program per node or per block of edges, no atomics.

Every sum over the edges of a node is made by one program in edge order, so results are the same run to run.
Heads and channels are padded to powers of two inside the kernels; nothing of size edges × heads × channels is
ever written.
"""

from __future__ import annotations

import triton
import triton.language as tl

# mypy: disable-error-code="no-untyped-def,untyped-decorator"


@triton.jit
def weighted_sum(
    ptr, edge, node, weight, values, out, H: tl.constexpr, C: tl.constexpr, BH: tl.constexpr,
    BC: tl.constexpr,
    BE: tl.constexpr, THROUGH: tl.constexpr,
):  # fmt: skip
    """out[i] = Σ_e weight[e, h] · values[node(e), h, c] over the edges of row i.

    THROUGH: positions go through `edge` (the outgoing view), else they are the edges themselves.
    """
    i = tl.program_id(0)
    first, last = tl.load(ptr + i), tl.load(ptr + i + 1)
    h = tl.arange(0, BH)
    c = tl.arange(0, BC)
    good = (h[:, None] < H) & (c[None, :] < C)
    total = tl.zeros([BH, BC], dtype=values.dtype.element_ty)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        live = k < last
        e = tl.load(edge + k, mask=live, other=0) if THROUGH else k
        j = tl.load(node + e, mask=live, other=0).to(tl.int64)
        a = tl.load(
            weight + e[:, None].to(tl.int64) * H + h[None, :],
            mask=live[:, None] & (h[None, :] < H),
            other=0.0,
        )
        where = j[:, None, None] * (H * C) + h[None, :, None] * C + c[None, None, :]
        v = tl.load(values + where, mask=live[:, None, None] & good[None, :, :], other=0.0)
        total += tl.sum(a[:, :, None] * v, axis=0)
    tl.store(out + i.to(tl.int64) * (H * C) + h[:, None] * C + c[None, :], total, mask=good)


@triton.jit
def edge_dot(
    source, destination, at_destination, at_source, out, E, scale: tl.constexpr, H: tl.constexpr,
    C: tl.constexpr,
    BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """out[e, h] = scale · Σ_c at_destination[dst, h, c] · at_source[src, h, c]."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    live = e < E
    h = tl.arange(0, BH)
    c = tl.arange(0, BC)
    j = tl.load(source + e, mask=live, other=0).to(tl.int64)
    i = tl.load(destination + e, mask=live, other=0).to(tl.int64)
    inner = h[None, :, None] * C + c[None, None, :]
    good = live[:, None, None] & (h[None, :, None] < H) & (c[None, None, :] < C)
    left = tl.load(at_destination + i[:, None, None] * (H * C) + inner, mask=good, other=0.0)
    right = tl.load(at_source + j[:, None, None] * (H * C) + inner, mask=good, other=0.0)
    found = tl.sum(left * right, axis=2) * scale
    tl.store(out + e[:, None].to(tl.int64) * H + h[None, :], found, mask=live[:, None] & (h[None, :] < H))


@triton.jit
def row_sum(
    ptr, edge, values, out, D: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, THROUGH: tl.constexpr
):
    """out[i] = Σ_e values[e] over the edges of row i; values [E, D]."""
    i = tl.program_id(0)
    first, last = tl.load(ptr + i), tl.load(ptr + i + 1)
    d = tl.arange(0, BD)
    total = tl.zeros([BD], dtype=values.dtype.element_ty)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        live = k < last
        e = tl.load(edge + k, mask=live, other=0) if THROUGH else k
        where = e[:, None].to(tl.int64) * D + d[None, :]
        total += tl.sum(tl.load(values + where, mask=live[:, None] & (d[None, :] < D), other=0.0), axis=0)
    tl.store(out + i.to(tl.int64) * D + d, total, mask=d < D)


@triton.jit
def softmax_forward(ptr, scores, out, H: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr):
    """Softmax of scores [E, H] over each row, with the maximum and the sum found in one pass."""
    i = tl.program_id(0)
    first, last = tl.load(ptr + i), tl.load(ptr + i + 1)
    h = tl.arange(0, BH)
    top = tl.full([BH], float("-inf"), dtype=scores.dtype.element_ty)
    total = tl.zeros([BH], dtype=scores.dtype.element_ty)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        good = (k < last)[:, None] & (h[None, :] < H)
        s = tl.load(scores + k[:, None].to(tl.int64) * H + h[None, :], mask=good, other=float("-inf"))
        higher = tl.maximum(top, tl.max(s, axis=0))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - level) + tl.sum(tl.exp(s - level[None, :]), axis=0)
        top = higher
    level = tl.where(top == float("-inf"), 0.0, top)
    safe = tl.where(total > 0, total, 1.0)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        good = (k < last)[:, None] & (h[None, :] < H)
        where = k[:, None].to(tl.int64) * H + h[None, :]
        s = tl.load(scores + where, mask=good, other=0.0)
        tl.store(out + where, tl.exp(s - level[None, :]) / safe[None, :], mask=good)


@triton.jit
def softmax_backward(ptr, attention, gradient, out, H: tl.constexpr, BH: tl.constexpr, BE: tl.constexpr):
    """∂s = a · (g − Σ_row a g)."""
    i = tl.program_id(0)
    first, last = tl.load(ptr + i), tl.load(ptr + i + 1)
    h = tl.arange(0, BH)
    mean = tl.zeros([BH], dtype=attention.dtype.element_ty)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        good = (k < last)[:, None] & (h[None, :] < H)
        where = k[:, None].to(tl.int64) * H + h[None, :]
        a = tl.load(attention + where, mask=good, other=0.0)
        g = tl.load(gradient + where, mask=good, other=0.0)
        mean += tl.sum(a * g, axis=0)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        good = (k < last)[:, None] & (h[None, :] < H)
        where = k[:, None].to(tl.int64) * H + h[None, :]
        a = tl.load(attention + where, mask=good, other=0.0)
        g = tl.load(gradient + where, mask=good, other=0.0)
        tl.store(out + where, a * (g - mean[None, :]), mask=good)


@triton.jit
def additive_forward(
    source, destination, left, right, out, T, slope: tl.constexpr, H: tl.constexpr, B: tl.constexpr
):
    """out[e, h] = leaky_relu(left[src, h] + right[dst, h]); T = E · H entries."""
    t = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    live = t < T
    e, h = t // H, t % H
    j = tl.load(source + e, mask=live, other=0).to(tl.int64)
    i = tl.load(destination + e, mask=live, other=0).to(tl.int64)
    s = tl.load(left + j * H + h, mask=live, other=0.0) + tl.load(right + i * H + h, mask=live, other=0.0)
    tl.store(out + t, tl.where(s > 0, s, s * slope), mask=live)


@triton.jit
def additive_backward(
    ptr, edge, node, own, other, gradient, out, slope: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
    BE: tl.constexpr,
    THROUGH: tl.constexpr,
):  # fmt: skip
    """out[i, h] = Σ_e gradient[e, h] · leaky_relu'(own[i, h] + other[node(e), h]) over the edges of row i."""
    i = tl.program_id(0).to(tl.int64)
    first, last = tl.load(ptr + i), tl.load(ptr + i + 1)
    h = tl.arange(0, BH)
    mine = tl.load(own + i * H + h, mask=h < H, other=0.0)
    total = tl.zeros([BH], dtype=own.dtype.element_ty)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        live = k < last
        good = live[:, None] & (h[None, :] < H)
        e = tl.load(edge + k, mask=live, other=0) if THROUGH else k
        j = tl.load(node + e, mask=live, other=0).to(tl.int64)
        s = mine[None, :] + tl.load(other + j[:, None] * H + h[None, :], mask=good, other=0.0)
        g = tl.load(gradient + e[:, None].to(tl.int64) * H + h[None, :], mask=good, other=0.0)
        total += tl.sum(tl.where(s > 0, g, g * slope), axis=0)
    tl.store(out + i * H + h, total, mask=h < H)


@triton.jit
def dynamic_forward(
    source, destination, left, right, weight, out, E, slope: tl.constexpr, H: tl.constexpr, C: tl.constexpr,
    BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """out[e, h] = Σ_c weight[h, c] · leaky_relu(left[src, h, c] + right[dst, h, c])."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    live = e < E
    h = tl.arange(0, BH)
    c = tl.arange(0, BC)
    j = tl.load(source + e, mask=live, other=0).to(tl.int64)
    i = tl.load(destination + e, mask=live, other=0).to(tl.int64)
    inner = h[:, None] * C + c[None, :]
    fits = (h[:, None] < H) & (c[None, :] < C)
    w = tl.load(weight + inner, mask=fits, other=0.0)
    good = live[:, None, None] & fits[None, :, :]
    s = tl.load(left + j[:, None, None] * (H * C) + inner[None, :, :], mask=good, other=0.0)
    s += tl.load(right + i[:, None, None] * (H * C) + inner[None, :, :], mask=good, other=0.0)
    found = tl.sum(w[None, :, :] * tl.where(s > 0, s, s * slope), axis=2)
    tl.store(out + e[:, None].to(tl.int64) * H + h[None, :], found, mask=live[:, None] & (h[None, :] < H))


@triton.jit
def dynamic_backward(
    ptr, edge, node, own, other, weight, gradient, out, weight_part, slope: tl.constexpr, H: tl.constexpr,
    C: tl.constexpr,
    BH: tl.constexpr, BC: tl.constexpr, BE: tl.constexpr, THROUGH: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Gradient of the dynamic score in one end's projection, and this row's part of the weight's."""
    i = tl.program_id(0).to(tl.int64)
    first, last = tl.load(ptr + i), tl.load(ptr + i + 1)
    h = tl.arange(0, BH)
    c = tl.arange(0, BC)
    inner = h[:, None] * C + c[None, :]
    fits = (h[:, None] < H) & (c[None, :] < C)
    w = tl.load(weight + inner, mask=fits, other=0.0)
    mine = tl.load(own + i * (H * C) + inner, mask=fits, other=0.0)
    total = tl.zeros([BH, BC], dtype=own.dtype.element_ty)
    part = tl.zeros([BH, BC], dtype=own.dtype.element_ty)
    for start in range(first, last, BE):
        k = start + tl.arange(0, BE)
        live = k < last
        e = tl.load(edge + k, mask=live, other=0) if THROUGH else k
        j = tl.load(node + e, mask=live, other=0).to(tl.int64)
        good = live[:, None, None] & fits[None, :, :]
        s = mine[None, :, :] + tl.load(
            other + j[:, None, None] * (H * C) + inner[None, :, :], mask=good, other=0.0
        )
        g = tl.load(
            gradient + e[:, None].to(tl.int64) * H + h[None, :],
            mask=live[:, None] & (h[None, :] < H),
            other=0.0,
        )
        flow = g[:, :, None] * w[None, :, :]
        total += tl.sum(tl.where(s > 0, flow, flow * slope), axis=0)
        if WEIGHT:
            part += tl.sum(g[:, :, None] * tl.where(s > 0, s, s * slope), axis=0)
    tl.store(out + i * (H * C) + inner, total, mask=fits)
    if WEIGHT:
        tl.store(weight_part + i * (H * C) + inner, part, mask=fits)
