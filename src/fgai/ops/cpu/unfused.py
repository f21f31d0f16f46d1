"""The single operations on the CPU: softmax, aggregation, node scores, dropout, clip, projection.

Every array is flat. `here` is the offset of the row computed, `there` that of an edge's other end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, from_numpy
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.compiled import compiled
from fgai.ops.cpu.attend import _edge_scores, _far_gradient
from fgai.ops.cpu.lanes import (
    LANES,
    TILE,
    _load,
    _load_some,
    _load_tile,
    _splat,
    _splat_tile,
    _store,
    _store_some,
    _total,
)
from fgai.ops.cpu.parallel import (
    SUMS,
    Reals,
    _array,
    _by_block,
    _flat,
    _incoming,
    _launch,
    _matrix_columns,
    _matrix_rows,
    _outgoing,
    _over,
    _tensors,
    _workspace,
    blocks,
)
from fgai.ops.cpu.rows import (
    AHEAD,
    _add_scaled,
    _axpy,
    _clear_sums,
    _copy_sums,
    _dot,
    _dot_axpy,
    _factor,
    _normalise,
    _padded,
    _prefetch_row,
    _weighted_sum,
)
from fgai.ops.reference import Bounds, Clipped, _Dropout, _limit_and_scale
from fgai.sparse import Adjacency, SparseRows

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

_ROWS = 256  # nodes in a block of operations without edges
_CHUNK = 1 << 14  # numbers in a block of dropout


@_by_block
def _softmax(b, blocks, rowptr, source, heads, scores, out, space):
    scratch = space[b]
    for i in range(blocks[b], blocks[b + 1]):
        first, last = np.int64(rowptr[i]) * heads, np.int64(rowptr[i + 1]) * heads
        for k in range(first, last):
            out[k] = scores[k]
        if first < last:
            _normalise(out, first, last, heads, scratch)


@_by_block
def _softmax_back(b, blocks, rowptr, source, heads, weight, gradient, out, space):
    scratch, mean = space[b], space[b, SUMS:]
    for i in range(blocks[b], blocks[b + 1]):
        first, last = np.int64(rowptr[i]) * heads, np.int64(rowptr[i + 1]) * heads
        _weighted_sum(weight, gradient, first, last, heads, mean, scratch)
        for e in range(first, last, heads):
            for h in range(heads):
                out[e + h] = weight[e + h] * (gradient[e + h] - mean[h])


class _EdgeSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, adjacency: Adjacency) -> Tensor:
        array, index = _array(scores), _incoming(adjacency)
        out = np.empty_like(array)
        _over(_softmax, index, array.shape[1], _flat(array), _flat(out), _workspace(index.blocks, array))
        attention = from_numpy(out)
        ctx.save_for_backward(attention)
        ctx.adjacency = adjacency
        return attention

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, index = _array(ctx.saved_tensors[0]), _incoming(ctx.adjacency)
        out = np.empty_like(weight)
        arrays = _flat(weight), _flat(gradients[0]), _flat(out), _workspace(index.blocks, weight)
        _over(_softmax_back, index, weight.shape[1], *arrays)
        return from_numpy(out), None


@_by_block
def _aggregate(b, blocks, rowptr, source, heads, channels, weight, values, out, space):
    width, end, sums, scratch = heads * channels, len(source) - 1, SUMS + 3 * heads, space[b]
    for i in range(blocks[b], blocks[b + 1]):
        here = np.int64(i) * width
        _clear_sums(heads, channels, scratch, sums)
        for e in range(rowptr[i], rowptr[i + 1]):
            there = np.int64(source[e]) * width
            _prefetch_row(values, np.int64(source[min(e + AHEAD, end)]) * width, width)
            for h in range(heads):
                k = sums + h * _padded(channels)
                _add_scaled(channels, weight[e, h], values, there + h * channels, scratch, k)
        _copy_sums(heads, channels, scratch, sums, out, here)


@_by_block
def _aggregate_back(
    b, blocks, colptr, edge, target, heads, channels, weight, values, gradient, d_weight, d_values, space
):
    """One pass over outgoing edges: each gradient row is fetched once for both results."""
    width, end, sums, scratch = heads * channels, len(edge) - 1, SUMS + 3 * heads, space[b]
    for j in range(blocks[b], blocks[b + 1]):
        here = np.int64(j) * width
        _clear_sums(heads, channels, scratch, sums)
        for p in range(colptr[j], colptr[j + 1]):
            e, there, ahead = edge[p], np.int64(target[p]) * width, min(p + AHEAD, end)
            _prefetch_row(gradient, np.int64(target[ahead]) * width, width)
            for h in range(heads):
                c = h * channels
                a, k = weight[e, h], sums + h * _padded(channels)
                d_weight[e, h] = _total(
                    _dot_axpy(channels, gradient, there + c, values, here + c, a, scratch, k)
                )
        _copy_sums(heads, channels, scratch, sums, d_values, here)


def _inner_products(near: Reals, far: Reals) -> tuple[Any, ...]:
    """Arguments of the score kernels for ⟨near_i, far_j⟩: the dot score with rate 1."""
    one = near.dtype.type(1)
    return near, far, None, one, one


class _Aggregate(Function):
    @staticmethod
    def forward(ctx: Any, attention: Tensor, values: Tensor, adjacency: Adjacency) -> Tensor:
        messages, weight, index = _array(values), _array(attention), _incoming(adjacency)
        out = np.empty_like(messages)
        space = _workspace(index.blocks, weight, messages.shape[2])
        _over(_aggregate, index, *messages.shape[1:], weight, _flat(messages), _flat(out), space)
        ctx.save_for_backward(attention, values)
        ctx.adjacency = adjacency
        return from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, messages = (_array(t) for t in ctx.saved_tensors)
        sizes, arrays = messages.shape[1:], (_flat(messages), _flat(gradients[0]))
        d_weight = d_values = None
        if ctx.needs_input_grad[1]:
            d_weight, d_values = np.empty_like(weight), np.empty_like(messages)
            index = _outgoing(ctx.adjacency)
            space = _workspace(index.blocks, weight, sizes[1])
            _over(_aggregate_back, index, *sizes, weight, *arrays, d_weight, _flat(d_values), space)
        elif ctx.needs_input_grad[0]:
            d_weight, products = np.empty_like(weight), _inner_products(arrays[1], arrays[0])
            _over(_edge_scores, _incoming(ctx.adjacency), *sizes, *products, _flat(d_weight))
        return (*_tensors(d_weight, d_values), None)


@_by_block
def _node_scores(b, nodes, heads, channels, values, far_weight, near_weight, far, near):
    """`far` and `near` are the node's scores as a source and as a destination."""
    for n in range(b * _ROWS, min((b + 1) * _ROWS, nodes)):
        for h in range(heads):
            here, at = (n * heads + h) * channels, h * channels
            far[n * heads + h] = _dot(channels, values, here, far_weight, at)
            near[n * heads + h] = _dot(channels, values, here, near_weight, at)


@_by_block
def _node_scores_back(
    b, nodes, heads, channels, values, far_weight, near_weight, d_far, d_near, d_values, partial
):
    """Gradients of `_node_scores`; this block's sums of those of the two weights go to partial[b]."""
    d_far_weight, d_near_weight = partial[b, 0], partial[b, 1]
    rest = channels & (LANES - 1)
    full = channels - rest
    for n in range(b * _ROWS, min((b + 1) * _ROWS, nodes)):
        for h in range(heads):
            here, at = (n * heads + h) * channels, h * channels
            xs, ys = _splat(d_far[n * heads + h]), _splat(d_near[n * heads + h])
            for k in range(0, full, LANES):
                v = _load(values, here + k)
                _store(d_values, here + k, xs * _load(far_weight, at + k) + ys * _load(near_weight, at + k))
                _store(d_far_weight, at + k, _load(d_far_weight, at + k) + xs * v)
                _store(d_near_weight, at + k, _load(d_near_weight, at + k) + ys * v)
            if rest > 0:
                here, at = here + full, at + full
                v = _load_some(values, here, rest)
                dv = xs * _load_some(far_weight, at, rest) + ys * _load_some(near_weight, at, rest)
                _store_some(d_values, here, rest, dv)
                _store_some(d_far_weight, at, rest, _load_some(d_far_weight, at, rest) + xs * v)
                _store_some(d_near_weight, at, rest, _load_some(d_near_weight, at, rest) + ys * v)


class _NodeScores(Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, source_weight: Tensor, destination_weight: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(values, source_weight, destination_weight)
        inputs = [_array(t) for t in (values, source_weight, destination_weight)]
        far, near = (np.empty(inputs[0].shape[:2], inputs[0].dtype) for _ in range(2))
        arrays = (_flat(a) for a in (*inputs, far, near))
        _launch(_node_scores, -(-len(values) // _ROWS), *inputs[0].shape, *arrays)
        return from_numpy(far), from_numpy(near)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [_array(t) for t in (*ctx.saved_tensors, *gradients)]
        nodes, heads, channels = inputs[0].shape
        blocks, d_values = -(-nodes // _ROWS), np.empty_like(inputs[0])
        # One partial sum per block, added in block order, whatever the number of threads.
        partial = np.zeros((blocks, 2, heads * channels), d_values.dtype)
        arrays = (_flat(a) for a in (*inputs, d_values))
        _launch(_node_scores_back, blocks, nodes, heads, channels, *arrays, partial)
        d_source, d_destination = partial.sum(0).reshape(2, heads, channels)
        return _tensors(d_values, d_source, d_destination)


@_by_block
def _dropout(b, values, seed, limit, scale, out):
    for k in range(b * _CHUNK, min((b + 1) * _CHUNK, len(values))):
        out[k] = values[k] * _factor(k, seed, limit, scale)


def _run_dropout(values: Tensor, p: float, seed: int) -> Tensor:
    array, (limit, scale) = _array(values), _limit_and_scale(p)
    out, numbers = np.empty_like(array), (seed, np.uint32(limit), array.dtype.type(scale))
    _launch(_dropout, -(-array.size // _CHUNK), _flat(array), *numbers, _flat(out))
    return from_numpy(out)


edge_softmax, aggregate, node_scores = _EdgeSoftmax.apply, _Aggregate.apply, _NodeScores.apply


def dropout(values: Tensor, p: float, seed: int | Tensor) -> Tensor:
    """See `fgai.ops.reference.dropout`."""
    return _Dropout.apply(_run_dropout, values, p, int(seed))  # type: ignore[no-any-return]


@_by_block
def _clip(b, x, low, high, middle, inverse, radius, out, inside, scale, counts):
    """Clip rows; `counts[b]` gets the numbers clipped and the rows shrunk, `inside` the mask."""
    width, count, shrunk, masked = len(low), 0, 0, len(inside) > 0
    for n in range(b * _ROWS, min((b + 1) * _ROWS, len(scale))):
        at = n * width
        for k in range(width):
            value = x[at + k]
            clipped = value if value >= low[k] else low[k]  # NaN becomes `low`
            clipped = high[k] if clipped > high[k] else clipped
            out[at + k] = clipped
            same = clipped == value
            count += not same
            if masked:
                inside[at + k] = same
        if radius[0] < np.inf:
            square = radius[0] * 0
            for k in range(width):
                away = (out[at + k] - middle[k]) * inverse[k]
                square += away * away
            scale[n] = 1
            if square > radius[0] * radius[0]:
                factor = radius[0] / np.sqrt(square)
                scale[n] = factor
                shrunk += 1
                for k in range(width):
                    out[at + k] = middle[k] + factor * (out[at + k] - middle[k])
    counts[b, 0], counts[b, 1] = count, shrunk


@_by_block
def _clip_back(b, nodes, gradient, inside, scale, result, middle, inverse, radius, out):
    """See `fgai.ops.reference.clip_rows_back`; `inside` and `scale` are empty for None."""
    width = len(middle)
    for n in range(b * _ROWS, min((b + 1) * _ROWS, nodes)):
        at = n * width
        if len(scale) > 0 and scale[n] < 1:
            along = radius[0] * 0
            for k in range(width):
                along += gradient[at + k] * (result[at + k] - middle[k])
            along = along / (radius[0] * radius[0])
            for k in range(width):
                turned = along * (result[at + k] - middle[k]) * inverse[k] * inverse[k]
                out[at + k] = scale[n] * (gradient[at + k] - turned)
        else:
            for k in range(width):
                out[at + k] = gradient[at + k]
        if len(inside) > 0:
            for k in range(width):
                out[at + k] = out[at + k] if inside[at + k] else 0.0


@compiled
def _ball(low, high):
    """See `fgai.ops.reference._ball`; compiled without fast maths, because ranges may be infinite."""
    middle, inverse = np.zeros_like(low), np.zeros_like(low)
    for k in range(low.size):
        half = (high[k] - low[k]) / 2
        if np.isfinite(half):
            middle[k] = (low[k] + high[k]) / 2
            inverse[k] = 1 / half if half > 0 else 0.0
    return middle, inverse


def clip_rows(x: Tensor, bounds: Bounds, out: Tensor, masked: bool) -> Clipped:
    """See `fgai.ops.reference.clip_rows`; `out` may be `x` itself."""
    blocks = -(-len(x) // _ROWS)
    counts = np.zeros((max(1, blocks), 2), np.int64)
    inside = torch.empty(x.shape if masked else (0,), dtype=torch.bool)
    scale = x.new_empty(len(x))
    low, high, radius = (_flat(t) for t in bounds)
    ends, results = (low, high, *_ball(low, high), radius), (_flat(t) for t in (out, inside, scale))
    _launch(_clip, blocks, _flat(x), *ends, *results, counts)
    clipped, shrunk = counts.sum(0)
    return out, inside if masked and clipped else None, scale if shrunk else None


def clip_rows_back(
    gradient: Tensor, inside: Tensor | None, scale: Tensor | None, result: Tensor, bounds: Bounds
) -> Tensor:
    """See `fgai.ops.reference.clip_rows_back`."""
    out, nodes = torch.empty(result.shape, dtype=result.dtype), len(result)
    inside = torch.empty(0, dtype=torch.bool) if inside is None else inside
    scale = result.new_empty(0) if scale is None else scale
    low, high, radius = (_flat(t) for t in bounds)
    arrays = (_flat(t) for t in (gradient, inside, scale, result))
    _launch(_clip_back, -(-nodes // _ROWS), nodes, *arrays, *_ball(low, high), radius, _flat(out))
    return out


_SLABS = 8  # of rows for the gradient of the weight; each has a sum of its own
_DENSE = 16  # entries per column from which the sums of all slabs are worth their memory


@_by_block
def _project(b, blocks, indptr, indices, width, values, weight, out):
    """out[n] = Σ_z values[z] · weight[indices[z]] over the entries z of row n, by 64 columns in registers."""
    end, full = len(indices) - 1, width // TILE * TILE
    for n in range(blocks[b], blocks[b + 1]):
        here = np.int64(n) * width
        for column in range(0, full, TILE):
            sums = _splat_tile(weight.dtype.type(0))
            for z in range(indptr[n], indptr[n + 1]):
                _prefetch_row(weight, np.int64(indices[min(z + AHEAD, end)]) * width + column, TILE)
                at = np.int64(indices[z]) * width + column
                sums = sums + _splat_tile(values[z]) * _load_tile(weight, at)
            _store(out, here + column, sums)
        if full < width:
            out[here + full : here + width] = 0
            for z in range(indptr[n], indptr[n + 1]):
                _prefetch_row(weight, np.int64(indices[min(z + AHEAD, end)]) * width + full, width - full)
                at = np.int64(indices[z]) * width + full
                _axpy(width - full, values[z], weight, at, out, here + full)


@_by_block
def _project_back_slabs(b, slabs, indptr, indices, width, values, gradient, partial):
    """This slab's part of the weight's gradient, partial[b][indices[z]] += values[z] · gradient[n]."""
    out, full = partial[b], width // TILE * TILE
    out[:] = 0
    for n in range(slabs[b], slabs[b + 1]):
        here = np.int64(n) * width
        for column in range(0, full, TILE):
            tile = _load_tile(gradient, here + column)
            for z in range(indptr[n], indptr[n + 1]):
                at = np.int64(indices[z]) * width + column
                _store(out, at, _load_tile(out, at) + _splat_tile(values[z]) * tile)
        if full < width:
            for z in range(indptr[n], indptr[n + 1]):
                at = np.int64(indices[z]) * width + full
                _axpy(width - full, values[z], gradient, here + full, out, at)


class _ProjectSparse(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor, rows: SparseRows) -> Tensor:
        index, matrix = _matrix_rows(rows), _array(weight)
        out = np.empty((rows.num_rows, matrix.shape[1]), matrix.dtype)
        _over(_project, index, matrix.shape[1], _array(values), _flat(matrix), _flat(out))
        ctx.save_for_backward(values, weight)
        ctx.rows = rows
        return from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        stored, matrix = (_array(t) for t in ctx.saved_tensors)
        gradient, width = _flat(gradients[0]), matrix.shape[1]
        d_values = d_weight = None
        if ctx.needs_input_grad[0]:
            d_values, products = np.empty_like(stored), _inner_products(gradient, _flat(matrix))
            _over(_edge_scores, _matrix_rows(ctx.rows), 1, width, *products, d_values)
        if ctx.needs_input_grad[1]:
            d_weight = _weight_gradient(ctx.rows, stored, gradient, matrix)
        return (*_tensors(d_values, d_weight), None)


def _weight_gradient(rows: SparseRows, stored: Reals, gradient: Reals, matrix: Reals) -> Reals:
    """The gradient [F, D], summed in an order that does not depend on the number of threads."""
    out, width = np.empty_like(matrix), matrix.shape[1]
    if len(stored) < _DENSE * rows.num_columns:
        products = _inner_products(gradient, gradient)
        _over(_far_gradient, _matrix_columns(rows), 1, width, *products, stored, _flat(out))
        return out
    index = _matrix_rows(rows)
    # Each slab reads its rows once and in order.
    slabs = index._replace(blocks=blocks(index.pointer, _SLABS))
    partial = np.empty((len(slabs.blocks) - 1, out.size), out.dtype)
    _over(_project_back_slabs, slabs, width, stored, gradient, partial)
    np.sum(partial, axis=0, out=_flat(out))
    return out


def project_sparse(rows: SparseRows, weight: Tensor) -> Tensor:
    """See `fgai.ops.reference.project_sparse`."""
    return _ProjectSparse.apply(rows.values.to(weight.dtype), weight, rows)  # type: ignore[no-any-return]
