"""The three attention scores on the CPU: one set of kernels for all of them.

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
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, from_numpy
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.cpu.lanes import LANES, _load, _load_some, _splat, _store, _store_some, _total, _where_positive
from fgai.ops.cpu.parallel import (
    Reals,
    _array,
    _by_block,
    _flat,
    _incoming,
    _outgoing,
    _over,
    _tensors,
)
from fgai.ops.cpu.rows import AHEAD, _axpy, _dot, _inline, _prefetch_row
from fgai.ops.reference import ADDITIVE, DOT, Score
from fgai.sparse import Adjacency

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


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
    """Add to `d_far` the gradient by one head of one edge, whose score has the gradient g.

    Returns the gradient of far + near before the leaky relu for the additive score, else g.
    """
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
    """Numbers of `near` and `far` per node."""
    return heads if weight is None and rate is None else heads * channels


@_by_block
def _far_gradient(
    b, blocks, colptr, edge, target, heads, channels, near, far, weight, slope, rate, gradient, d_far
):
    """Gradient at the sources: the sum over the outgoing edges of each."""
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
    """near, far, weight, slope and rate of a score, see above."""
    number = _array(near).dtype.type
    rate = number(near.shape[2] ** -0.5) if kind == DOT else None
    return _flat(near), _flat(far), None if weight is None else _flat(weight), number(slope), rate


def _near_gradients(
    adjacency: Adjacency, sizes: tuple[int, int], arguments: tuple[Any, ...], gradient: Reals, d_near: Reals
) -> Reals | None:
    """Write the gradient at the destinations; return that of the weight, if any. `gradient` is flat."""
    rows, weight = _incoming(adjacency), arguments[2]
    # One partial sum per block, added in block order: the same result for any number of threads.
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
