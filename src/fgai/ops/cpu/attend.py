"""Attention on the CPU: the three scores, alone and fused with softmax, dropout and aggregation.

Every array is flat. Edge e goes from j to i; `far` is the side of the sources and `near` that of the
destinations. `j_row` and `i_row` are the offsets of their rows, `at` that of an edge or of a head. Two
arguments tell the scores apart:

    score     near, far    weight   rate     value for each head
    additive  [N, H]       None     None     leaky_relu(far_j + near_i)
    dynamic   [N, H, C]    [H, C]   None     Σ_c weight · leaky_relu(far_j + near_i)
    dot       [N, H, C]    None     number   rate · Σ_c near_i · far_j

Whether an argument is None is part of a kernel's signature: numba compiles each score separately and removes
branches of `is not None` for arguments that are None. It does not remove the other branch for those that are
not, so every test has the order `rate is not None`, `weight is not None`, else.

Fused, forward is one pass over the incoming edges: the scores of a row are written into its place in
`attention`, normalised in the cache, and used at once. Backward is one pass over the outgoing edges, which
loads the row d_i once for both products: with o the output, d its gradient, a the attention and keep the
factors of dropout,

    g_e  = keep_e · ⟨d_i, v_j⟩ + ∂a_e
    ∂s_e = a_e (g_e - δ_i),       δ_i = ⟨d_i, o_i⟩ + Σ_e a_e ∂a_e
    ∂v_j = Σ_e keep_e · a_e · d_i

The gradient at the destinations is summed over the incoming edges afterwards, from ∂s.

`attention` and `d_scores` are [E, H]; `values`, `out` and their gradients [N, H, C]; `deltas` [N, H]. `drop`
is (seed, limit, scale) of dropout, `space[b]` working space of block b (`parallel._workspace`). The backward
kernels read `back`: (attention, d_out, deltas, d_attention, stride). `d_attention` is empty if the attention
has no gradient; else it has `stride` numbers per edge: H, or 1 for all heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, from_numpy, zeros_like
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.cpu.lanes import (
    LANES,
    TILE,
    _expand_lanes,
    _hash_factors,
    _load,
    _load_some,
    _load_tile,
    _prefetch,
    _splat,
    _splat_tile,
    _store,
    _store_some,
    _tile_totals,
    _total,
    _where_positive,
)
from fgai.ops.cpu.parallel import (
    SUMS,
    Reals,
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
from fgai.ops.reference import ADDITIVE, DOT, Options, Score, _limit_and_scale
from fgai.sparse import Adjacency

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

# Keep the sums of 8 heads × 8 channels, GAT's usual layer, in registers; see `benchmarks/alternatives.py`.
TILES = True


@_inline
def _additive_row(low, high, i, source, heads, near, far, slope, out):
    i_row = np.int64(i) * heads
    if heads == LANES:
        near_i, lanes_slope = _load(near, i_row), _splat(slope)
        for e in range(low, high):
            z = _load(far, np.int64(source[e]) * LANES) + near_i
            _store(out, np.int64(e) * LANES, _where_positive(z, z, lanes_slope * z))
    else:
        for e in range(low, high):
            j_row, at = np.int64(source[e]) * heads, np.int64(e) * heads
            for h in range(heads):
                z = far[j_row + h] + near[i_row + h]
                out[at + h] = _where_positive(z, z, slope * z)


@_inline
def _dynamic_score(channels, far, j_row, near, i_row, weight, at, slope):
    rest = channels & (LANES - 1)
    full = channels - rest
    lanes, lanes_slope = _splat(far.dtype.type(0)), _splat(slope)
    for c in range(0, full, LANES):
        z = _load(far, j_row + c) + _load(near, i_row + c)
        lanes = lanes + _load(weight, at + c) * _where_positive(z, z, lanes_slope * z)
    if rest > 0:
        z = _load_some(far, j_row + full, rest) + _load_some(near, i_row + full, rest)
        lanes = lanes + _load_some(weight, at + full, rest) * _where_positive(z, z, lanes_slope * z)
    return _total(lanes)


@_inline
def _wide_row(low, high, i, source, heads, channels, near, far, weight, slope, rate, out):
    width, end = heads * channels, len(source) - 1
    i_row = np.int64(i) * width
    for e in range(low, high):
        j_row = np.int64(source[e]) * width
        _prefetch_row(far, np.int64(source[min(e + AHEAD, end)]) * width, width)
        for h in range(heads):
            at, c = np.int64(e) * heads + h, h * channels
            if rate is not None:
                out[at] = rate * _dot(channels, near, i_row + c, far, j_row + c)
            elif weight is not None:
                out[at] = _dynamic_score(channels, far, j_row + c, near, i_row + c, weight, c, slope)


@_inline
def _score_row(low, high, i, source, heads, channels, near, far, weight, slope, rate, out):
    """out[e, h] = the scores of the incoming edges e = low..high-1 of node i."""
    if rate is not None or weight is not None:
        _wide_row(low, high, i, source, heads, channels, near, far, weight, slope, rate, out)
    else:
        _additive_row(low, high, i, source, heads, near, far, slope, out)


@_by_block
def _edge_scores(b, blocks, rowptr, source, heads, channels, near, far, weight, slope, rate, out):
    for i in range(blocks[b], blocks[b + 1]):
        low, high = rowptr[i], rowptr[i + 1]
        _score_row(low, high, i, source, heads, channels, near, far, weight, slope, rate, out)


@_inline
def _dynamic_gradient(channels, far, j_row, near, i_row, weight, at, slope, g, out):
    """out[j_row + c] += g · weight[c] · leaky_relu'(far + near)."""
    rest = channels & (LANES - 1)
    full = channels - rest
    lanes_slope, lanes_g = _splat(slope), _splat(g)
    for c in range(0, full, LANES):
        z = _load(far, j_row + c) + _load(near, i_row + c)
        t = lanes_g * _load(weight, at + c)
        _store(out, j_row + c, _load(out, j_row + c) + _where_positive(z, t, lanes_slope * t))
    if rest > 0:
        z = _load_some(far, j_row + full, rest) + _load_some(near, i_row + full, rest)
        t = lanes_g * _load_some(weight, at + full, rest)
        t = _where_positive(z, t, lanes_slope * t)
        _store_some(out, j_row + full, rest, _load_some(out, j_row + full, rest) + t)


@_inline
def _dynamic_weight_gradient(channels, far, j_row, near, i_row, weight, at, slope, g, out, d_weight):
    """`_dynamic_gradient` for the destination; also d_weight[at + c] += g · leaky_relu(far + near)."""
    rest = channels & (LANES - 1)
    full = channels - rest
    lanes_slope, lanes_g = _splat(slope), _splat(g)
    for c in range(0, full, LANES):
        z = _load(far, j_row + c) + _load(near, i_row + c)
        t = _where_positive(z, lanes_g, lanes_slope * lanes_g)
        _store(out, i_row + c, _load(out, i_row + c) + t * _load(weight, at + c))
        _store(d_weight, at + c, _load(d_weight, at + c) + t * z)
    if rest > 0:
        j_row, i_row, at = j_row + full, i_row + full, at + full
        z = _load_some(far, j_row, rest) + _load_some(near, i_row, rest)
        t = _where_positive(z, lanes_g, lanes_slope * lanes_g)
        _store_some(out, i_row, rest, _load_some(out, i_row, rest) + t * _load_some(weight, at, rest))
        _store_some(d_weight, at, rest, _load_some(d_weight, at, rest) + t * z)


@_inline
def _add_to_far(h, j_row, i_row, channels, near, far, weight, slope, rate, g, d_far):
    """Add one edge's gradient by one head to `d_far`; return g, before the leaky relu if additive."""
    c = h * channels
    if rate is not None:
        _axpy(channels, rate * g, near, i_row + c, d_far, j_row + c)
    elif weight is not None:
        _dynamic_gradient(channels, far, j_row + c, near, i_row + c, weight, c, slope, g, d_far)
    else:
        g = _where_positive(far[j_row + h] + near[i_row + h], g, slope * g)
        d_far[j_row + h] += g
    return g


@_inline
def _score_width(heads, channels, weight, rate):
    return heads if weight is None and rate is None else heads * channels


@_by_block
def _far_gradient(
    b, blocks, colptr, edge, target, heads, channels, near, far, weight, slope, rate, gradient, d_far
):
    width, end = _score_width(heads, channels, weight, rate), len(edge) - 1
    for j in range(blocks[b], blocks[b + 1]):
        j_row = np.int64(j) * width
        d_far[j_row : j_row + width] = 0
        for p in range(colptr[j], colptr[j + 1]):
            at, i_row = np.int64(edge[p]) * heads, np.int64(target[p]) * width
            _prefetch_row(near, np.int64(target[min(p + AHEAD, end)]) * width, width)
            for h in range(heads):
                g = gradient[at + h]
                _add_to_far(h, j_row, i_row, channels, near, far, weight, slope, rate, g, d_far)


@_by_block
def _near_gradient(
    b, blocks, rowptr, source, heads, channels, near, far, weight, slope, rate, gradient, d_near, partial
):
    """Gradient at the destinations; for the dynamic score partial[b] is this block's part of ∂weight."""
    width, end, d_weight = _score_width(heads, channels, weight, rate), len(source) - 1, partial[b]
    for i in range(blocks[b], blocks[b + 1]):
        i_row = np.int64(i) * width
        d_near[i_row : i_row + width] = 0
        for e in range(rowptr[i], rowptr[i + 1]):
            j_row = np.int64(source[e]) * width
            _prefetch_row(far, np.int64(source[min(e + AHEAD, end)]) * width, width)
            for h in range(heads):
                g, c = gradient[np.int64(e) * heads + h], h * channels
                if rate is not None:
                    _axpy(channels, rate * g, far, j_row + c, d_near, i_row + c)
                elif weight is not None:
                    _dynamic_weight_gradient(
                        channels, far, j_row + c, near, i_row + c, weight, c, slope, g, d_near, d_weight
                    )
                else:
                    z = far[j_row + h] + near[i_row + h]
                    d_near[i_row + h] += _where_positive(z, g, slope * g)


def _score_arguments(
    kind: int, near: Tensor, far: Tensor, weight: Tensor | None, slope: float
) -> tuple[Any, ...]:
    number = _array(near).dtype.type
    rate = number(near.shape[2] ** -0.5) if kind == DOT else None
    return _flat(near), _flat(far), None if weight is None else _flat(weight), number(slope), rate


def _near_gradients(
    adjacency: Adjacency, sizes: tuple[int, int], arguments: tuple[Any, ...], gradient: Reals, d_near: Reals
) -> Reals | None:
    """Write the gradient at the destinations; return that of the weight, if any. `gradient` is flat."""
    rows, weight = _incoming(adjacency), arguments[2]
    # One partial sum per block, added in block order, whatever the number of threads.
    partial = np.zeros((len(rows.blocks) - 1, 0 if weight is None else weight.size), d_near.dtype)
    _over(_near_gradient, rows, *sizes, *arguments, gradient, _flat(d_near), partial)
    return None if weight is None else partial.sum(0).reshape(sizes)


class _Score(Function):
    @staticmethod
    def forward(ctx: Any, near: Tensor, far: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
        ctx.save_for_backward(near, far, weight)
        adjacency, kind, slope = ctx.options = options
        ctx.sizes = (near.shape[1], 1) if kind == ADDITIVE else tuple(near.shape[1:])
        out = np.empty((adjacency.num_edges, near.shape[1]), _array(near).dtype)
        arguments = _score_arguments(kind, near, far, weight, slope)
        _over(_edge_scores, _incoming(adjacency), *ctx.sizes, *arguments, _flat(out))
        return from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (near, far, weight), (adjacency, kind, slope) = ctx.saved_tensors, ctx.options
        arguments, gradient = _score_arguments(kind, near, far, weight, slope), _flat(gradients[0])
        d_near = d_far = d_weight = None
        if ctx.needs_input_grad[1]:
            d_far = np.empty_like(_array(far))
            _over(_far_gradient, _outgoing(adjacency), *ctx.sizes, *arguments, gradient, _flat(d_far))
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            d_near = np.empty_like(_array(near))
            d_weight = _near_gradients(adjacency, ctx.sizes, arguments, gradient, d_near)
        return (*_tensors(d_near, d_far, d_weight), None, None, None)


def score(terms: Score, adjacency: Adjacency) -> Tensor:
    """See `fgai.ops.reference.score`."""
    kind, near, far, weight, slope = terms
    return _Score.apply(near, far, weight, adjacency, kind, slope)  # type: ignore[no-any-return]


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
    """Gradients at the sources; `d_scores` gets ∂s, for the additive score before the leaky relu."""
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
        result, weights = from_numpy(out), from_numpy(attention)
        ctx.save_for_backward(near, far, weight, values, weights, result)
        return result, from_numpy(mean) if ctx.averaged else weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        near, far, weight, values, attention, out = ctx.saved_tensors
        heads, channels = out.shape[1:]
        d_out = _flat(zeros_like(out) if gradients[0] is None else gradients[0])
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


def attend(score: Score, values: Tensor, adjacency: Adjacency, options: Options) -> tuple[Tensor, Tensor]:
    """See `fgai.ops.reference.attend`; the attention is always returned."""
    (kind, near, far, weight, slope), (p, seed, _, averaged, bias) = score, options
    out, attention = _Attend.apply(near, far, weight, values, adjacency, kind, slope, p, int(seed), averaged)
    return out if bias is None else out + bias, attention
