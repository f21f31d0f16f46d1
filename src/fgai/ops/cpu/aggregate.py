"""Weighted sums over incoming edges, on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor, from_numpy
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.cpu.lanes import total
from fgai.ops.cpu.parallel import run_blocks, threads_for
from fgai.ops.cpu.plan import SUMS, array, incoming, outgoing, tensors, workspace
from fgai.ops.cpu.rows import AHEAD, add_scaled, clear_sums, copy_sums, dot, dot_axpy, fetch, kernel, padded
from fgai.sparse import Adjacency

# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@kernel
def _forward_block(b, blocks, rowptr, source, heads, channels, weight, values, out, room):
    width, end, sums, scratch = heads * channels, len(source) - 1, SUMS + 3 * heads, room[b]
    for i in range(blocks[b], blocks[b + 1]):
        here = np.int64(i) * width
        clear_sums(heads, channels, scratch, sums)
        for e in range(rowptr[i], rowptr[i + 1]):
            there = np.int64(source[e]) * width
            fetch(values, np.int64(source[min(e + AHEAD, end)]) * width, width)
            for h in range(heads):
                k = sums + h * padded(channels)
                add_scaled(channels, weight[e, h], values, there + h * channels, scratch, k)
        copy_sums(heads, channels, scratch, sums, out, here)


@kernel
def _forward(threads, blocks, rowptr, source, heads, channels, weight, values, out, room):
    arguments = (blocks, rowptr, source, heads, channels, weight, values, out, room)
    run_blocks(_forward_block, threads, len(blocks) - 1, arguments)


@kernel
def _backward_block(
    b, blocks, colptr, edge, target, heads, channels, weight, values, gradient, d_weight, d_values, room
):
    """One pass over outgoing edges: each gradient row is fetched once for both results."""
    width, end, sums, scratch = heads * channels, len(edge) - 1, SUMS + 3 * heads, room[b]
    for j in range(blocks[b], blocks[b + 1]):
        here = np.int64(j) * width
        clear_sums(heads, channels, scratch, sums)
        for p in range(colptr[j], colptr[j + 1]):
            e, there, ahead = edge[p], np.int64(target[p]) * width, min(p + AHEAD, end)
            fetch(gradient, np.int64(target[ahead]) * width, width)
            for h in range(heads):
                c = h * channels
                a, k = weight[e, h], sums + h * padded(channels)
                d_weight[e, h] = total(
                    dot_axpy(channels, gradient, there + c, values, here + c, a, scratch, k)
                )
        copy_sums(heads, channels, scratch, sums, d_values, here)


@kernel
def _backward(
    threads, blocks, colptr, edge, target, heads, channels, weight, values, gradient, d_weight, d_values, room
):
    arguments = (
        blocks, colptr, edge, target, heads, channels, weight, values, gradient, d_weight, d_values, room
    )  # fmt: skip
    run_blocks(_backward_block, threads, len(blocks) - 1, arguments)


@kernel
def _weight_block(b, blocks, rowptr, source, heads, channels, values, gradient, d_weight):
    width, end = heads * channels, len(source) - 1
    for i in range(blocks[b], blocks[b + 1]):
        here = np.int64(i) * width
        for e in range(rowptr[i], rowptr[i + 1]):
            there = np.int64(source[e]) * width
            fetch(values, np.int64(source[min(e + AHEAD, end)]) * width, width)
            for h in range(heads):
                c = h * channels
                d_weight[e, h] = dot(channels, gradient, here + c, values, there + c)


@kernel
def _backward_weight(threads, blocks, rowptr, source, heads, channels, values, gradient, d_weight):
    arguments = (blocks, rowptr, source, heads, channels, values, gradient, d_weight)
    run_blocks(_weight_block, threads, len(blocks) - 1, arguments)


class _Aggregate(Function):
    @staticmethod
    def forward(ctx: Any, attention: Tensor, values: Tensor, adjacency: Adjacency) -> Tensor:
        given, index = array(values), incoming(adjacency)
        out = np.empty((adjacency.num_nodes, *given.shape[1:]), given.dtype)
        weight = array(attention)
        room = workspace(index.blocks, weight, given.shape[2])
        flat = (weight, given.reshape(-1), out.reshape(-1), room)
        _forward(threads_for(len(index.blocks) - 1), *index, *given.shape[1:], *flat)
        ctx.save_for_backward(attention, values)
        ctx.adjacency = adjacency
        return from_numpy(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, given = (array(t) for t in ctx.saved_tensors)
        gradient = array(gradients[0])
        d_weight = d_values = None
        sizes, flat = given.shape[1:], (given.reshape(-1), gradient.reshape(-1))
        if ctx.needs_input_grad[1]:
            d_weight, d_values = np.empty_like(weight), np.empty_like(given)
            index = outgoing(ctx.adjacency)
            threads = threads_for(len(index.blocks) - 1)
            room = workspace(index.blocks, weight, sizes[1])
            _backward(threads, *index, *sizes, weight, *flat, d_weight, d_values.reshape(-1), room)
        elif ctx.needs_input_grad[0]:
            d_weight = np.empty_like(weight)
            rows = incoming(ctx.adjacency)
            _backward_weight(threads_for(len(rows.blocks) - 1), *rows, *sizes, *flat, d_weight)
        return (*tensors(d_weight, d_values), None)


def aggregate(attention: Tensor, values: Tensor, adjacency: Adjacency) -> Tensor:
    """`out[i] = Σ_{j→i} attention[j→i] · values[j]`: [E, H] and [N, H, C] → [N, H, C]."""
    result: Tensor = _Aggregate.apply(attention, values, adjacency)
    return result
