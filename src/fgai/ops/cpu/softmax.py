"""Softmax over the incoming edges of each node, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, from_numpy
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.cpu.parallel import run_blocks, threads_for
from fgai.ops.cpu.plan import array, incoming, workspace
from fgai.ops.cpu.rows import kernel, normalise, weighted_sum
from fgai.sparse import Adjacency

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@kernel
def _forward_block(b, blocks, rowptr, heads, scores, out, room):
    scratch = room[b]
    for i in range(blocks[b], blocks[b + 1]):
        first, last = np.int64(rowptr[i]) * heads, np.int64(rowptr[i + 1]) * heads
        for k in range(first, last):
            out[k] = scores[k]
        if first < last:
            normalise(out, first, last, heads, scratch)


@kernel
def _forward(threads, blocks, rowptr, heads, scores, out, room):
    run_blocks(_forward_block, threads, len(blocks) - 1, (blocks, rowptr, heads, scores, out, room))


@kernel
def _backward_block(b, blocks, rowptr, heads, weight, gradient, out, room):
    scratch, mean = room[b], room[b, 16:]
    for i in range(blocks[b], blocks[b + 1]):
        first, last = np.int64(rowptr[i]) * heads, np.int64(rowptr[i + 1]) * heads
        weighted_sum(weight, gradient, first, last, heads, mean, scratch)
        for e in range(first, last, heads):
            for h in range(heads):
                out[e + h] = weight[e + h] * (gradient[e + h] - mean[h])


@kernel
def _backward(threads, blocks, rowptr, heads, weight, gradient, out, room):
    arguments = (blocks, rowptr, heads, weight, gradient, out, room)
    run_blocks(_backward_block, threads, len(blocks) - 1, arguments)


class _EdgeSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, adjacency: Adjacency) -> Tensor:
        given, (blocks, rowptr, _) = array(scores), incoming(adjacency)
        out = np.empty_like(given)
        flat = (given.reshape(-1), out.reshape(-1), workspace(blocks, given))
        _forward(threads_for(len(blocks) - 1), blocks, rowptr, given.shape[1], *flat)
        attention = from_numpy(out)
        ctx.save_for_backward(attention)
        ctx.adjacency = adjacency
        return attention

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, (blocks, rowptr, _) = array(ctx.saved_tensors[0]), incoming(ctx.adjacency)
        out = np.empty_like(weight)
        flat = (
            weight.reshape(-1),
            array(gradients[0]).reshape(-1),
            out.reshape(-1),
            workspace(blocks, weight),
        )
        _backward(threads_for(len(blocks) - 1), blocks, rowptr, weight.shape[1], *flat)
        return from_numpy(out), None


def edge_softmax(scores: Tensor, adjacency: Adjacency) -> Tensor:
    """Softmax of `scores` [E, H] over the incoming edges of each node → [E, H]."""
    result: Tensor = _EdgeSoftmax.apply(scores, adjacency)
    return result
