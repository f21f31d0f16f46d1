"""The two halves of the additive score at every node, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.cpu.lanes import LANES, load, load_some, splat, store, store_some
from fgai.ops.cpu.parallel import run_blocks, threads_for
from fgai.ops.cpu.plan import array, tensors
from fgai.ops.cpu.rows import dot, kernel

# mypy: disable-error-code="no-untyped-def, no-untyped-call"

_ROWS = 256


@kernel
def _forward_block(b, nodes, heads, channels, values, a, c, left, right):
    for n in range(b * _ROWS, min((b + 1) * _ROWS, nodes)):
        for h in range(heads):
            here, at = (n * heads + h) * channels, h * channels
            left[n * heads + h] = dot(channels, values, here, a, at)
            right[n * heads + h] = dot(channels, values, here, c, at)


@kernel
def _forward(threads, nodes, heads, channels, values, a, c, left, right):
    arguments = (nodes, heads, channels, values, a, c, left, right)
    run_blocks(_forward_block, threads, (nodes + _ROWS - 1) // _ROWS, arguments)


@kernel
def _backward_block(b, nodes, heads, channels, values, a, c, d_left, d_right, d_values, partial):
    """∂values = ∂left · a + ∂right · c; the gradients of a and c in rows 0 and 1 of partial[b]."""
    d_a, d_c = partial[b, 0], partial[b, 1]
    rest = channels & (LANES - 1)
    whole = channels - rest
    for n in range(b * _ROWS, min((b + 1) * _ROWS, nodes)):
        for h in range(heads):
            here, at, x, y = (
                (n * heads + h) * channels,
                h * channels,
                d_left[n * heads + h],
                d_right[n * heads + h],
            )
            xs, ys = splat(x), splat(y)
            for k in range(0, whole, LANES):
                v = load(values, here + k)
                store(d_values, here + k, xs * load(a, at + k) + ys * load(c, at + k))
                store(d_a, at + k, load(d_a, at + k) + xs * v)
                store(d_c, at + k, load(d_c, at + k) + ys * v)
            if rest > 0:
                here, at = here + whole, at + whole
                v = load_some(values, here, rest)
                mixed = xs * load_some(a, at, rest) + ys * load_some(c, at, rest)
                store_some(d_values, here, rest, mixed)
                store_some(d_a, at, rest, load_some(d_a, at, rest) + xs * v)
                store_some(d_c, at, rest, load_some(d_c, at, rest) + ys * v)


@kernel
def _backward(threads, nodes, heads, channels, values, a, c, d_left, d_right, d_values, partial):
    arguments = (nodes, heads, channels, values, a, c, d_left, d_right, d_values, partial)
    run_blocks(_backward_block, threads, (nodes + _ROWS - 1) // _ROWS, arguments)


class _NodeScores(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, left_weight: Tensor, right_weight: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(values, left_weight, right_weight)
        given = [array(t) for t in (values, left_weight, right_weight)]
        nodes, heads, channels = given[0].shape
        left, right = (np.empty((nodes, heads), given[0].dtype) for _ in range(2))
        flat = [a.reshape(-1) for a in (*given, left, right)]
        _forward(threads_for(-(-nodes // _ROWS)), nodes, heads, channels, *flat)
        return tensors(left, right)  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given = [array(t) for t in (*ctx.saved_tensors, *gradients)]
        nodes, heads, channels = given[0].shape
        blocks, d_values = -(-nodes // _ROWS), np.empty_like(given[0])
        # One partial sum per block, added in block order: the same result for any number of threads.
        partial = np.zeros((blocks, 2, heads * channels), d_values.dtype)
        flat = [a.reshape(-1) for a in (*given, d_values)]
        _backward(threads_for(blocks), nodes, heads, channels, *flat, partial)
        d_left, d_right = partial.sum(0).reshape(2, heads, channels)
        return tensors(d_values, d_left, d_right)


def node_scores(values: Tensor, left_weight: Tensor, right_weight: Tensor) -> tuple[Tensor, Tensor]:
    """`⟨left_weight, values⟩` and `⟨right_weight, values⟩` per head: [N, H, C] and [H, C] → [N, H] twice."""
    result: tuple[Tensor, Tensor] = _NodeScores.apply(values, left_weight, right_weight)
    return result
