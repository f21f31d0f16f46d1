"""Fused attention on the CPU: score → softmax → dropout → aggregate, with the attention as second result."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.ops.cpu import attend_backward, attend_forward, score_kernels
from fgai.ops.cpu.parallel import threads_for
from fgai.ops.cpu.plan import Incoming, Outgoing, Reals, array, incoming, outgoing, tensors, workspace
from fgai.ops.cpu.scores import dynamic_right
from fgai.ops.reference import odds
from fgai.sparse import Adjacency

# mypy: disable-error-code="no-untyped-call"


def _threads(index: Incoming | Outgoing) -> int:
    return threads_for(len(index.blocks) - 1)


def _drop(p: float, seed: int, dtype: Any) -> tuple[Any, ...]:
    limit, scale = odds(p)
    return seed, np.uint32(limit), dtype.type(scale)


def _outputs(ctx: Any, values: Reals) -> tuple[Reals, Reals, Reals]:
    """Return room for the attention, the output, and the mean of the attention over heads if asked for."""
    heads, channels = values.shape[1:]
    ctx.averaged = ctx.averaged and heads > 1
    edges = ctx.adjacency.num_edges
    attention = np.empty((edges, heads), values.dtype)
    mean = np.empty((edges if ctx.averaged else 0, 1), values.dtype)
    return attention, np.empty((ctx.adjacency.num_nodes, heads, channels), values.dtype), mean


def _rest(
    ctx: Any, index: Incoming, values: Reals, attention: Reals, out: Reals, mean: Reals
) -> tuple[Any, ...]:
    """Return the last arguments of every forward kernel."""
    drop = _drop(ctx.p, ctx.seed, out.dtype)
    return (
        values.reshape(-1),
        drop,
        attention.reshape(-1),
        out.reshape(-1),
        mean.reshape(-1),
        workspace(index.blocks, attention, out.shape[2]),
    )


def _made(
    ctx: Any, given: tuple[Tensor, ...], attention: Reals, out: Reals, mean: Reals
) -> tuple[Tensor, ...]:
    """Keep what the backward pass reads, and return the output and the attention, averaged if asked for."""
    result, weights = torch.from_numpy(out), torch.from_numpy(attention)
    ctx.save_for_backward(*given, weights, result)
    return result, torch.from_numpy(mean) if ctx.averaged else weights


def _back(ctx: Any, gradients: tuple[Tensor | None, ...], given: list[Reals]) -> tuple[Any, ...]:
    """Return what the three backward passes share: the common kernel arguments and the new arrays."""
    *_, values, attention, out = given
    d_out = np.zeros_like(out) if gradients[0] is None else array(gradients[0])
    heads, channels = out.shape[1:]
    # The mean passes the same share of its gradient to every head.
    each, share = (1, 1.0 / heads) if ctx.averaged else (heads, 1.0)
    d_attention = np.empty(0, out.dtype)
    if gradients[1] is not None:
        d_attention = array(gradients[1] * share if ctx.averaged else gradients[1]).reshape(-1)
    rows = incoming(ctx.adjacency)
    means = np.empty((len(out), heads), out.dtype).reshape(-1)
    flat = (
        out.reshape(-1),
        d_out.reshape(-1),
        attention.reshape(-1),
        d_attention,
        each,
        means,
        workspace(rows.blocks, attention),
    )
    attend_backward.means(_threads(rows), rows.blocks, rows.rowptr, heads, channels, *flat)
    d_values, d_scores = np.empty_like(values), np.empty_like(attention)
    drop = _drop(ctx.p, ctx.seed, out.dtype)
    shared = (values.reshape(-1), drop, attention.reshape(-1), d_out.reshape(-1), means, d_attention, each)
    return shared, d_values, d_scores, (d_values.reshape(-1), d_scores.reshape(-1))


def _chosen(ctx: Any, *arrays: Reals | None) -> tuple[Tensor | None, ...]:
    wanted = (a if need else None for a, need in zip(arrays, ctx.needs_input_grad, strict=False))
    return (*tensors(*wanted), *(None for _ in range(len(ctx.needs_input_grad) - len(arrays))))


class _Additive(Function):
    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor, values: Tensor, adjacency: Adjacency, *options: Any
    ) -> tuple[Tensor, ...]:
        ctx.slope, ctx.p, ctx.seed, ctx.averaged = options
        ctx.adjacency = adjacency
        ctx.set_materialize_grads(False)
        index, given = incoming(adjacency), array(values)
        made = _outputs(ctx, given)
        ends = (array(left).reshape(-1), array(right).reshape(-1), given.dtype.type(ctx.slope))
        rest = _rest(ctx, index, given, *made)
        attend_forward.additive(_threads(index), *index, *given.shape[1:], *ends, *rest)
        return _made(ctx, (left, right, values), *made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [array(t) for t in ctx.saved_tensors]
        left, right, values = given[:3]
        shared, d_values, d_scores, made = _back(ctx, gradients, given)
        d_left, d_right = np.empty_like(left), np.empty_like(right)
        columns, rows, heads = outgoing(ctx.adjacency), incoming(ctx.adjacency), left.shape[1]
        ends = (left.reshape(-1), right.reshape(-1), left.dtype.type(ctx.slope))
        attend_backward.additive(
            _threads(columns),
            *columns,
            *values.shape[1:],
            *ends,
            *shared,
            *made,
            d_left.reshape(-1),
            workspace(columns.blocks, d_scores, values.shape[2]),
        )
        flat = (d_scores.reshape(-1), d_right.reshape(-1), workspace(rows.blocks, d_scores))
        attend_backward.sum_rows(_threads(rows), rows.blocks, rows.rowptr, heads, *flat)
        return _chosen(ctx, d_left, d_right, d_values)


class _Dynamic(Function):
    @staticmethod
    def forward(
        ctx: Any,
        left: Tensor,
        right: Tensor,
        weight: Tensor,
        values: Tensor,
        adjacency: Adjacency,
        *options: Any,
    ) -> tuple[Tensor, ...]:
        ctx.slope, ctx.p, ctx.seed, ctx.averaged = options
        ctx.adjacency = adjacency
        ctx.set_materialize_grads(False)
        index, given = incoming(adjacency), array(values)
        made = _outputs(ctx, given)
        ends = (*(array(t).reshape(-1) for t in (left, right, weight)), given.dtype.type(ctx.slope))
        rest = _rest(ctx, index, given, *made)
        attend_forward.dynamic(_threads(index), *index, *given.shape[1:], *ends, *rest)
        return _made(ctx, (left, right, weight, values), *made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [array(t) for t in ctx.saved_tensors]
        left, right, weight, values = given[:4]
        shared, d_values, d_scores, made = _back(ctx, gradients, given)
        d_left, columns = np.empty_like(left), outgoing(ctx.adjacency)
        slope = left.dtype.type(ctx.slope)
        ends = (*values.shape[1:], left.reshape(-1), right.reshape(-1), weight.reshape(-1), slope)
        room = workspace(columns.blocks, d_scores, values.shape[2])
        attend_backward.dynamic(_threads(columns), *columns, *ends, *shared, *made, d_left.reshape(-1), room)
        d_right, d_weight = dynamic_right(ctx.adjacency, (*ends, d_scores.reshape(-1)), right, weight)
        return _chosen(ctx, d_left, d_right, d_weight, d_values)


class _Dot(Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, values: Tensor, adjacency: Adjacency, *options: Any
    ) -> tuple[Tensor, ...]:
        ctx.p, ctx.seed, ctx.averaged = options
        ctx.adjacency = adjacency
        ctx.set_materialize_grads(False)
        index, given = incoming(adjacency), array(values)
        made = _outputs(ctx, given)
        factor = given.dtype.type(given.shape[2] ** -0.5)
        rest = _rest(ctx, index, given, *made)
        ends = (array(query).reshape(-1), array(key).reshape(-1), factor)
        attend_forward.dot_product(_threads(index), *index, *given.shape[1:], *ends, *rest)
        return _made(ctx, (query, key, values), *made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [array(t) for t in ctx.saved_tensors]
        query, key = given[:2]
        shared, d_values, d_scores, made = _back(ctx, gradients, given)
        d_query, d_key = np.empty_like(query), np.empty_like(key)
        columns, rows = outgoing(ctx.adjacency), incoming(ctx.adjacency)
        factor, sizes = query.dtype.type(query.shape[2] ** -0.5), query.shape[1:]
        ends = (*sizes, query.reshape(-1), factor)
        room = workspace(columns.blocks, d_scores, sizes[1])
        attend_backward.dot_product(
            _threads(columns), *columns, *ends, *shared, *made, d_key.reshape(-1), room
        )
        flat = (*sizes, key.reshape(-1), factor, d_scores.reshape(-1), d_query.reshape(-1))
        score_kernels.dot_product_query(_threads(rows), *rows, *flat)
        return _chosen(ctx, d_query, d_key, d_values)


def attend_additive(
    left: Tensor,
    right: Tensor,
    values: Tensor,
    adjacency: Adjacency,
    slope: float,
    p: float,
    seed: int | Tensor,
    written: bool = True,
    averaged: bool = False,
) -> tuple[Tensor, Tensor]:
    """Fused attention with the additive score; see `fgai.ops.attend_additive`."""
    result: tuple[Tensor, Tensor] = _Additive.apply(
        left, right, values, adjacency, slope, p, int(seed), averaged
    )
    return result


def attend_dynamic(
    left: Tensor,
    right: Tensor,
    weight: Tensor,
    values: Tensor,
    adjacency: Adjacency,
    slope: float,
    p: float,
    seed: int | Tensor,
    written: bool = True,
    averaged: bool = False,
) -> tuple[Tensor, Tensor]:
    """Fused attention with the dynamic score; see `fgai.ops.attend_dynamic`."""
    result: tuple[Tensor, Tensor] = _Dynamic.apply(
        left, right, weight, values, adjacency, slope, p, int(seed), averaged
    )
    return result


def attend_dot(
    query: Tensor,
    key: Tensor,
    values: Tensor,
    adjacency: Adjacency,
    p: float,
    seed: int | Tensor,
    written: bool = True,
    averaged: bool = False,
) -> tuple[Tensor, Tensor]:
    """Fused attention with the dot-product score; see `fgai.ops.attend_dot`."""
    result: tuple[Tensor, Tensor] = _Dot.apply(query, key, values, adjacency, p, int(seed), averaged)
    return result
