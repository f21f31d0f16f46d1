"""Fused attention on the CPU: score → softmax → dropout → aggregate, with the attention as second result.

Forward is one pass over the incoming edges: the scores of a row are written into its place in `attention`,
normalised while they are in the cache, and used at once. Backward is one pass over the outgoing edges: with o
the output, d its gradient, a the attention and keep the factors of dropout,

    g_e  = keep_e · ⟨d_i, v_j⟩ + ∂a_e
    ∂s_e = a_e (g_e - δ_i),       δ_i = ⟨d_i, o_i⟩ + Σ_e a_e ∂a_e
    ∂v_j = Σ_e keep_e · a_e · d_i

The row d_i is loaded once for both products. The gradient at the destinations is summed over the incoming
edges afterwards, from ∂s.

Every array is flat: [E, H] for `attention` and `d_scores`, [N, H, C] for `values`, `out` and their
gradients, [N, H] for `deltas`; see `fgai.ops.cpu.scores` for those of the score. `drop` is (seed, limit,
scale) of dropout. `space[b]` is working space of block b, see `parallel._workspace`. `back` holds what the
backward kernels read: (attention, d_out, deltas, d_attention, stride). `d_attention` is empty if the
attention has no gradient; else it has `stride` numbers per edge: H, or 1 for all heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.cpu.lanes import (
    LANES,
    TILE,
    _expand_lanes,
    _hash_factors,
    _load,
    _load_tile,
    _prefetch,
    _splat,
    _splat_tile,
    _store,
    _tile_totals,
    _total,
    _where_positive,
)
from fgai.ops.cpu.parallel import (
    SUMS,
    _array,
    _by_block,
    _flat,
    _incoming,
    _outgoing,
    _over,
    _tensors,
    _workspace,
)
from fgai.ops.cpu.rows import (
    AHEAD,
    _add_scaled,
    _average,
    _axpy,
    _clear_sums,
    _copy_sums,
    _dot,
    _dot_axpy,
    _factor,
    _inline,
    _normalise,
    _padded,
    _prefetch_row,
    _weighted_sum,
)
from fgai.ops.cpu.scores import _add_to_far, _near_gradients, _score_arguments, _score_row, _score_width
from fgai.ops.reference import ADDITIVE, Drop, Score, _limit_and_scale
from fgai.sparse import Adjacency

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# Keep the sums of 8 heads × 8 channels, GAT's usual layer, in registers; the general loops write them to
# memory for each head of each edge. `benchmarks/alternatives.py` switches it off to compare.
TILES = True


@_inline
def _aggregate_tile(low, high, i, source, values, attention, drop, out):
    """out[i] = Σ_e keep_e · attention_e · values_j over the edges low..high-1 of node i."""
    seed, limit, scale = drop
    sums = _splat_tile(values.dtype.type(0))
    for e in range(low, high):
        at = np.int64(e) * LANES
        used = _load(attention, at)
        if limit > 0:
            used = used * _hash_factors(at, seed, limit, scale)
        sums = sums + _expand_lanes(used) * _load_tile(values, np.int64(source[e]) * TILE)
    _store(out, np.int64(i) * TILE, sums)


@_by_block
def _forward(
    b, blocks, rowptr, source, heads, channels, near, far, weight, slope, rate, values, drop, tiles,
    attention, out, mean, space,
):  # fmt: skip
    """`mean`, unless it is empty, gets the mean of the attention over the heads."""
    (seed, limit, scale), scratch = drop, space[b]
    width, sums = heads * channels, SUMS + 3 * heads
    for i in range(blocks[b], blocks[b + 1]):
        low, high = rowptr[i], rowptr[i + 1]
        _score_row(low, high, i, source, heads, channels, near, far, weight, slope, rate, attention)
        for e in range(low, high):
            _prefetch_row(values, np.int64(source[e]) * width, width)
        if low < high:
            _normalise(attention, np.int64(low) * heads, np.int64(high) * heads, heads, scratch)
            if len(mean) > 0:
                _average(low, high, heads, attention, mean)
        if tiles and heads == LANES and channels == LANES:
            _aggregate_tile(low, high, i, source, values, attention, drop, out)
            continue
        _clear_sums(heads, channels, scratch, sums)
        for e in range(low, high):
            j_row, at = np.int64(source[e]) * width, np.int64(e) * heads
            for h in range(heads):
                a = attention[at + h]
                if limit > 0:
                    a *= _factor(at + h, seed, limit, scale)
                _add_scaled(channels, a, values, j_row + h * channels, scratch, sums + h * _padded(channels))
        _copy_sums(heads, channels, scratch, sums, out, np.int64(i) * width)


@_by_block
def _deltas(b, blocks, rowptr, source, heads, channels, out, back, space):
    """δ_i of every row, into the array `deltas` of `back`."""
    attention, d_out, deltas, d_attention, stride = back
    for i in range(blocks[b], blocks[b + 1]):
        delta = deltas[np.int64(i) * heads : np.int64(i + 1) * heads]
        delta[:] = 0
        if len(d_attention) > 0 and stride == heads:
            first, last = np.int64(rowptr[i]) * heads, np.int64(rowptr[i + 1]) * heads
            _weighted_sum(attention, d_attention, first, last, heads, delta, space[b])
        elif len(d_attention) > 0:
            for e in range(rowptr[i], rowptr[i + 1]):
                _axpy(heads, d_attention[e], attention, np.int64(e) * heads, delta, 0)
        for h in range(heads):
            c = (np.int64(i) * heads + h) * channels
            delta[h] += _dot(channels, out, c, d_out, c)


@_inline
def _prefetch_edge(later, edge, target, heads, width, back, d_scores):
    """Prefetch what the edge at position `later` will read."""
    attention, d_out, deltas, d_attention, stride = back
    at, node = np.int64(edge[later]) * heads, np.int64(target[later])
    _prefetch_row(d_out, node * width, width)
    _prefetch(attention, at)
    _prefetch(d_scores, at)
    _prefetch(deltas, node * heads)
    if len(d_attention) > 0:
        _prefetch(d_attention, np.int64(edge[later]) * stride)


@_inline
def _edge_gradient(h, at, i, j, heads, channels, values, drop, back, scratch):
    """Return ∂s of one head of one edge, and add its part of ∂v_j to the sums in `scratch`."""
    attention, d_out, deltas, d_attention, stride = back
    seed, limit, scale = drop
    i_row, j_row = (np.int64(i) * heads + h) * channels, (np.int64(j) * heads + h) * channels
    a = attention[at + h]
    kept = _factor(at + h, seed, limit, scale) if limit > 0 else attention.dtype.type(1)
    sums = SUMS + 3 * heads + h * _padded(channels)
    g = kept * _total(_dot_axpy(channels, d_out, i_row, values, j_row, a * kept, scratch, sums))
    if len(d_attention) > 0:
        g += d_attention[at + h] if stride == heads else d_attention[at // heads]
    return a * (g - deltas[np.int64(i) * heads + h])


@_inline
def _sources_tile(
    low, high, j, edge, target, near, far, slope, values, drop, back, d_values, d_scores, d_far
):
    """∂values, ∂far and ∂(far + near) of the outgoing edges low..high-1 of node j, additive score."""
    attention, d_out, deltas, d_attention, stride = back
    seed, limit, scale = drop
    zero, last = values.dtype.type(0), len(edge) - 1
    sums, d_far_j = _splat_tile(zero), _splat(zero)
    far_j, slopes, v = _load(far, np.int64(j) * LANES), _splat(slope), np.int64(j) * TILE
    for p in range(low, high):
        at, i, later = np.int64(edge[p]) * LANES, np.int64(target[p]), min(p + 2 * AHEAD, last)
        _prefetch_edge(later, edge, target, LANES, TILE, back, d_scores)
        _prefetch(near, np.int64(target[later]) * LANES)
        d = _load_tile(d_out, i * TILE)
        g, a = _tile_totals(d * _load_tile(values, v)), _load(attention, at)
        used = a
        if limit > 0:
            kept = _hash_factors(at, seed, limit, scale)
            g, used = g * kept, a * kept
        if len(d_attention) > 0:
            g = g + (_load(d_attention, at) if stride == LANES else _splat(d_attention[edge[p]]))
        sums = sums + _expand_lanes(used) * d
        ds = a * (g - _load(deltas, i * LANES))
        ds = _where_positive(far_j + _load(near, i * LANES), ds, slopes * ds)
        _store(d_scores, at, ds)
        d_far_j = d_far_j + ds
    _store(d_values, v, sums)
    _store(d_far, np.int64(j) * LANES, d_far_j)


@_by_block
def _sources(
    b, blocks, colptr, edge, target, heads, channels, near, far, weight, slope, rate, values, drop, tiles,
    back, d_values, d_scores, d_far, space,
):  # fmt: skip
    """Gradients at the sources; `d_scores` gets ∂s, for the additive score before the leaky relu.

    `tiles` is None unless the score is additive.
    """
    scratch, score_width = space[b], _score_width(heads, channels, weight, rate)
    width, sums = heads * channels, SUMS + 3 * heads
    for j in range(blocks[b], blocks[b + 1]):
        low, high = colptr[j], colptr[j + 1]
        if tiles is not None and tiles and heads == LANES and channels == LANES:
            _sources_tile(
                low, high, j, edge, target, near, far, slope, values, drop, back, d_values, d_scores, d_far
            )
            continue
        j_row = np.int64(j) * score_width
        _clear_sums(heads, channels, scratch, sums)
        d_far[j_row : j_row + score_width] = 0
        for p in range(low, high):
            at, i, later = np.int64(edge[p]) * heads, target[p], min(p + AHEAD, len(edge) - 1)
            i_row = np.int64(i) * score_width
            _prefetch_edge(later, edge, target, heads, width, back, d_scores)
            _prefetch_row(near, np.int64(target[later]) * score_width, score_width)
            for h in range(heads):
                g = _edge_gradient(h, at, i, j, heads, channels, values, drop, back, scratch)
                d_scores[at + h] = _add_to_far(
                    h, j_row, i_row, channels, near, far, weight, slope, rate, g, d_far
                )
        _copy_sums(heads, channels, scratch, sums, d_values, np.int64(j) * width)


@_by_block
def _sum_rows(b, blocks, rowptr, source, heads, values, out, space):
    """out[i] = Σ of `values` [E, H] over the incoming edges of i."""
    for i in range(blocks[b], blocks[b + 1]):
        first, last = np.int64(rowptr[i]) * heads, np.int64(rowptr[i + 1]) * heads
        _weighted_sum(None, values, first, last, heads, out[np.int64(i) * heads :], space[b])


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any, near: Tensor, far: Tensor, weight: Tensor | None, values: Tensor, *options: Any
    ) -> tuple[Tensor, ...]:
        adjacency, kind, slope, p, seed, averaged = options
        ctx.set_materialize_grads(False)
        index, messages, (limit, scale) = _incoming(adjacency), _array(values), _limit_and_scale(p)
        (heads, channels), dtype, edges = messages.shape[1:], messages.dtype, adjacency.num_edges
        ctx.adjacency, ctx.kind, ctx.slope = adjacency, kind, slope
        ctx.drop, ctx.averaged = (seed, np.uint32(limit), dtype.type(scale)), averaged and heads > 1
        attention, mean = np.empty((edges, heads), dtype), np.empty((edges * ctx.averaged, 1), dtype)
        out = np.empty((adjacency.num_nodes, heads, channels), dtype)
        scores = _score_arguments(kind, near, far, weight, slope)
        space = _workspace(index.blocks, attention, channels)
        arrays = _flat(attention), _flat(out), _flat(mean), space
        _over(_forward, index, heads, channels, *scores, _flat(messages), ctx.drop, TILES, *arrays)
        result, weights = torch.from_numpy(out), torch.from_numpy(attention)
        ctx.save_for_backward(near, far, weight, values, weights, result)
        return result, torch.from_numpy(mean) if ctx.averaged else weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        near, far, weight, values, attention, out = ctx.saved_tensors
        heads, channels = out.shape[1:]
        d_out = _flat(torch.zeros_like(out) if gradients[0] is None else gradients[0])
        # The gradient of a mean over heads is the same for every head.
        stride, share = (1, 1.0 / heads) if ctx.averaged else (heads, 1.0)
        d_attention = np.empty(0, d_out.dtype)
        if gradients[1] is not None:
            d_attention = _flat(gradients[1] * share if ctx.averaged else gradients[1])
        rows, columns = _incoming(ctx.adjacency), _outgoing(ctx.adjacency)
        deltas = np.empty(len(out) * heads, d_out.dtype)
        back = _flat(attention), d_out, deltas, d_attention, stride
        d_values, d_scores, d_far, d_near = (np.empty_like(_array(t)) for t in (values, attention, far, near))
        space = _workspace(rows.blocks, d_scores)
        _over(_deltas, rows, heads, channels, _flat(out), back, space)
        scores = _score_arguments(ctx.kind, near, far, weight, ctx.slope)
        _over(
            _sources, columns, heads, channels, *scores, _flat(values), ctx.drop,
            TILES if ctx.kind == ADDITIVE else None, back, _flat(d_values), _flat(d_scores), _flat(d_far),
            _workspace(columns.blocks, d_scores, channels),
        )  # fmt: skip
        d_weight = None
        if ctx.kind == ADDITIVE:
            _over(_sum_rows, rows, heads, _flat(d_scores), _flat(d_near), space)
        else:
            d_weight = _near_gradients(ctx.adjacency, (heads, channels), scores, _flat(d_scores), d_near)
        outputs = zip((d_near, d_far, d_weight, d_values), ctx.needs_input_grad, strict=False)
        return (*_tensors(*(a if needed else None for a, needed in outputs)), *(None for _ in range(6)))


def attend(
    score: Score,
    values: Tensor,
    adjacency: Adjacency,
    drop: Drop,
    written: bool,
    averaged: bool,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fgai.ops.reference.attend`; the attention is always returned."""
    kind, near, far, weight, slope = score
    options = adjacency, kind, slope, drop[0], int(drop[1]), averaged
    out, attention = _Attend.apply(near, far, weight, values, *options)
    return out if bias is None else out + bias, attention
