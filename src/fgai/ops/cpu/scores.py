"""The three attention scores on the CPU: kernels generic in the score.

Every array is flat. Of edge e, j is the source and i the destination; `far` belongs to the sources and `near`
to the destinations, `there` is the offset of j's row and `here` that of i's. Two arguments tell the scores
apart:

    score     near, far    weight   rate     value for each head
    additive  [N, H]       None     None     leaky_relu(far_j + near_i)
    dynamic   [N, H, C]    [H, C]   None     Σ_c weight · leaky_relu(far_j + near_i)
    dot       [N, H, C]    None     number   rate · Σ_c near_i · far_j

That an argument is None is part of a kernel's signature: numba compiles each score by itself and leaves out
branches that ask for `is not None`. It does so for arguments that are None only, so every test has the order
`rate is not None`, `weight is not None`, else.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, from_numpy
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.cpu.lanes import LANES, _load, _load_some, _splat, _store, _store_some, _total, _where_positive
from fgai.ops.cpu.parallel import Reals, _array, _by_block, _flat, _incoming, _outgoing, _over, _tensors
from fgai.ops.cpu.rows import AHEAD, _axpy, _dot, _fetch, _piece
from fgai.ops.reference import ADDITIVE, DOT, Score
from fgai.sparse import Adjacency

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@_piece
def _additive_row(low, high, i, source, heads, near, far, slope, out):
    here = np.int64(i) * heads
    if heads == LANES:
        mine, lanes_slope = _load(near, here), _splat(slope)
        for e in range(low, high):
            z = _load(far, np.int64(source[e]) * LANES) + mine
            _store(out, np.int64(e) * LANES, _where_positive(z, z, lanes_slope * z))
    else:
        for e in range(low, high):
            there, at = np.int64(source[e]) * heads, np.int64(e) * heads
            for h in range(heads):
                z = far[there + h] + near[here + h]
                out[at + h] = _where_positive(z, z, slope * z)


@_piece
def _dynamic_score(channels, far, there, near, here, weight, at, slope):
    rest = channels & (LANES - 1)
    full = channels - rest
    lanes, lanes_slope = _splat(far.dtype.type(0)), _splat(slope)
    for c in range(0, full, LANES):
        z = _load(far, there + c) + _load(near, here + c)
        lanes = lanes + _load(weight, at + c) * _where_positive(z, z, lanes_slope * z)
    if rest > 0:
        z = _load_some(far, there + full, rest) + _load_some(near, here + full, rest)
        lanes = lanes + _load_some(weight, at + full, rest) * _where_positive(z, z, lanes_slope * z)
    return _total(lanes)


@_piece
def _wide_row(low, high, i, source, heads, channels, near, far, weight, slope, rate, out):
    width, end = heads * channels, len(source) - 1
    here = np.int64(i) * width
    for e in range(low, high):
        there = np.int64(source[e]) * width
        _fetch(far, np.int64(source[min(e + AHEAD, end)]) * width, width)
        for h in range(heads):
            at, c = np.int64(e) * heads + h, h * channels
            if rate is not None:
                out[at] = rate * _dot(channels, near, here + c, far, there + c)
            elif weight is not None:
                out[at] = _dynamic_score(channels, far, there + c, near, here + c, weight, c, slope)


@_piece
def _score_row(low, high, i, source, heads, channels, near, far, weight, slope, rate, out):
    """out[e, h] = the scores of the incoming edges e = low..high-1 of node i."""
    if rate is not None or weight is not None:
        _wide_row(low, high, i, source, heads, channels, near, far, weight, slope, rate, out)
    else:
        _additive_row(low, high, i, source, heads, near, far, slope, out)


@_by_block
def _forward(b, blocks, rowptr, source, heads, channels, near, far, weight, slope, rate, out):
    for i in range(blocks[b], blocks[b + 1]):
        low, high = rowptr[i], rowptr[i + 1]
        _score_row(low, high, i, source, heads, channels, near, far, weight, slope, rate, out)


@_piece
def _dynamic_gradient(channels, far, there, near, here, weight, at, slope, g, out):
    """out[there + c] += g · weight[c] · leaky_relu'(far + near)."""
    rest = channels & (LANES - 1)
    full = channels - rest
    lanes_slope, lanes_g = _splat(slope), _splat(g)
    for c in range(0, full, LANES):
        z = _load(far, there + c) + _load(near, here + c)
        t = lanes_g * _load(weight, at + c)
        _store(out, there + c, _load(out, there + c) + _where_positive(z, t, lanes_slope * t))
    if rest > 0:
        z = _load_some(far, there + full, rest) + _load_some(near, here + full, rest)
        t = lanes_g * _load_some(weight, at + full, rest)
        t = _where_positive(z, t, lanes_slope * t)
        _store_some(out, there + full, rest, _load_some(out, there + full, rest) + t)


@_piece
def _dynamic_weight_gradient(channels, far, there, near, here, weight, at, slope, g, out, d_weight):
    """As `_dynamic_gradient`, for the destination; and d_weight[at + c] += g · leaky_relu(far + near)."""
    rest = channels & (LANES - 1)
    full = channels - rest
    lanes_slope, lanes_g = _splat(slope), _splat(g)
    for c in range(0, full, LANES):
        z = _load(far, there + c) + _load(near, here + c)
        t = _where_positive(z, lanes_g, lanes_slope * lanes_g)
        _store(out, here + c, _load(out, here + c) + t * _load(weight, at + c))
        _store(d_weight, at + c, _load(d_weight, at + c) + t * z)
    if rest > 0:
        there, here, at = there + full, here + full, at + full
        z = _load_some(far, there, rest) + _load_some(near, here, rest)
        t = _where_positive(z, lanes_g, lanes_slope * lanes_g)
        _store_some(out, here, rest, _load_some(out, here, rest) + t * _load_some(weight, at, rest))
        _store_some(d_weight, at, rest, _load_some(d_weight, at, rest) + t * z)


@_piece
def _pass_to_far(h, there, here, channels, near, far, weight, slope, rate, g, d_far):
    """Add to `d_far` the part of one head of one edge whose score has the gradient g.

    Returns the gradient of far + near before the leaky relu for the additive score, else g.
    """
    c = h * channels
    if rate is not None:
        _axpy(channels, rate * g, near, here + c, d_far, there + c)
    elif weight is not None:
        _dynamic_gradient(channels, far, there + c, near, here + c, weight, c, slope, g, d_far)
    else:
        g = _where_positive(far[there + h] + near[here + h], g, slope * g)
        d_far[there + h] += g
    return g


@_piece
def _row_width(heads, channels, weight, rate):
    """Numbers of `near` and `far` for each node."""
    return heads if weight is None and rate is None else heads * channels


@_by_block
def _far(b, blocks, colptr, edge, target, heads, channels, near, far, weight, slope, rate, gradient, d_far):
    width, end = _row_width(heads, channels, weight, rate), len(edge) - 1
    for j in range(blocks[b], blocks[b + 1]):
        there = np.int64(j) * width
        d_far[there : there + width] = 0
        for p in range(colptr[j], colptr[j + 1]):
            at, here = np.int64(edge[p]) * heads, np.int64(target[p]) * width
            _fetch(near, np.int64(target[min(p + AHEAD, end)]) * width, width)
            for h in range(heads):
                g = gradient[at + h]
                _pass_to_far(h, there, here, channels, near, far, weight, slope, rate, g, d_far)


@_by_block
def _near(
    b, blocks, rowptr, source, heads, channels, near, far, weight, slope, rate, gradient, d_near, partial
):
    """Gradient at the destinations; for the dynamic score this block's share of ∂weight in partial[b]."""
    width, end, d_weight = _row_width(heads, channels, weight, rate), len(source) - 1, partial[b]
    for i in range(blocks[b], blocks[b + 1]):
        here = np.int64(i) * width
        d_near[here : here + width] = 0
        for e in range(rowptr[i], rowptr[i + 1]):
            there = np.int64(source[e]) * width
            _fetch(far, np.int64(source[min(e + AHEAD, end)]) * width, width)
            for h in range(heads):
                g, c = gradient[np.int64(e) * heads + h], h * channels
                if rate is not None:
                    _axpy(channels, rate * g, far, there + c, d_near, here + c)
                elif weight is not None:
                    _dynamic_weight_gradient(
                        channels, far, there + c, near, here + c, weight, c, slope, g, d_near, d_weight
                    )
                else:
                    z = far[there + h] + near[here + h]
                    d_near[here + h] += _where_positive(z, g, slope * g)


def _score_arguments(
    kind: int, near: Tensor, far: Tensor, weight: Tensor | None, slope: float
) -> tuple[Any, ...]:
    """near, far, weight, slope and rate of a score, see above."""
    number = _array(near).dtype.type
    rate = number(near.shape[2] ** -0.5) if kind == DOT else None
    return _flat(near), _flat(far), None if weight is None else _flat(weight), number(slope), rate


def _near_gradients(
    adjacency: Adjacency, sizes: tuple[int, int], arguments: tuple[Any, ...], gradient: Reals, like: Reals
) -> tuple[Reals, Reals | None]:
    """Gradients at the destinations [as `like`] and of the weight, if there is one; `gradient` is flat."""
    rows, d_near, weight = _incoming(adjacency), np.empty_like(like), arguments[2]
    # One partial sum per block, added in block order: the same result for any number of threads.
    partial = np.zeros((len(rows.blocks) - 1, 0 if weight is None else weight.size), like.dtype)
    _over(_near, rows, *sizes, *arguments, gradient, _flat(d_near), partial)
    return d_near, None if weight is None else partial.sum(0).reshape(sizes)


class _Score(Function):
    @staticmethod
    def forward(ctx: Any, near: Tensor, far: Tensor, weight: Tensor | None, *options: Any) -> Tensor:
        ctx.save_for_backward(near, far, weight)
        adjacency, kind, slope = ctx.options = options
        ctx.sizes = (near.shape[1], 1) if kind == ADDITIVE else tuple(near.shape[1:])
        out = np.empty((adjacency.num_edges, near.shape[1]), _array(near).dtype)
        arguments = _score_arguments(kind, near, far, weight, slope)
        _over(_forward, _incoming(adjacency), *ctx.sizes, *arguments, _flat(out))
        return from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (near, far, weight), (adjacency, kind, slope) = ctx.saved_tensors, ctx.options
        arguments, gradient = _score_arguments(kind, near, far, weight, slope), _flat(gradients[0])
        d_near = d_far = d_weight = None
        if ctx.needs_input_grad[1]:
            d_far = np.empty_like(_array(far))
            _over(_far, _outgoing(adjacency), *ctx.sizes, *arguments, gradient, _flat(d_far))
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            d_near, d_weight = _near_gradients(adjacency, ctx.sizes, arguments, gradient, _array(near))
        return (*_tensors(d_near, d_far, d_weight), None, None, None)


def score(terms: Score, adjacency: Adjacency) -> Tensor:
    """See `fgai.ops.reference.score`."""
    kind, near, far, weight, slope = terms
    return _Score.apply(near, far, weight, adjacency, kind, slope)  # type: ignore[no-any-return]
