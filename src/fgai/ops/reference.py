"""The operations in plain PyTorch: slow, simple, differentiable any number of times.

Kernels are tested against these, and devices without a kernel use them. Every backend (`fgai.ops.cpu`,
`fgai.ops.gpu`) has the functions `edge_softmax`, `aggregate`, `score`, `attend`, `node_scores`, `dropout`,
`project_sparse`, `clip_rows` and `clip_rows_back` with these arguments.

Dropout is random by position: whether a number becomes 0 is a 32-bit hash of its position, mixed twice with
one seed. No mask is stored, and the result is the same for any device and number of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import leaky_relu

from fgai.sparse import Adjacency, SparseRows

ADDITIVE, DYNAMIC, DOT = range(3)
Bounds = tuple[Tensor, Tensor, Tensor]  # low, high and radius of a clip
Clipped = tuple[Tensor, Tensor | None, Tensor | None]  # see `clip_rows`
_LOW = 0xFFFFFFFF


class Score(NamedTuple):
    """The score of every edge j → i and head.

        ADDITIVE  leaky_relu(far[j] + near[i])
        DYNAMIC   Σ_c weight · leaky_relu(far[j] + near[i])
        DOT       ⟨near[i], far[j]⟩ / √C

    The first two have a leaky relu with `slope`.
    """

    kind: int
    near: Tensor  # of the destinations i, [N, H] if additive, else [N, H, C]
    far: Tensor  # of the sources j, likewise
    weight: Tensor | None  # [H, C] if dynamic, else None
    slope: float  # of the leaky relu


class Options(NamedTuple):
    """Options of `attend`; see `fgai.ops.attend_additive`."""

    dropout: float
    seed: int | Tensor
    written: bool
    averaged: bool
    bias: Tensor | None


def _limit_and_scale(p: float) -> tuple[int, float]:
    """Of dropout at rate `p` in [0, 1): numbers with a hash below the limit become 0, the rest are scaled."""
    return min(round(p * 2**32), _LOW), 1.0 / (1.0 - p)


class _Dropout(Function):
    """Dropout by a kernel `(values, p, seed)`; the gradient is the same kernel, applied to the gradient."""

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Tensor], values: Tensor, *options: Any) -> Tensor:
        ctx.kernel, ctx.options = kernel, options
        return kernel(values, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.kernel(gradients[0], *ctx.options), None, None


def _mix(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def _factors(shape: torch.Size, p: float, seed: int | Tensor, like: Tensor) -> Tensor:
    """The factor of each number of a tensor of this `shape`: 0 or 1 / (1 - p)."""
    limit, scale = _limit_and_scale(p)
    position = torch.arange(shape.numel(), device=like.device)
    low, high = seed & _LOW, seed >> 32
    x = _mix((position + low) & _LOW)
    # The low half enters twice: otherwise seed + 1 would give the same numbers, shifted.
    x = _mix(x ^ high ^ (((low + (position >> 32)) * 0x9E3779B9) & _LOW))
    return ((x >= limit).to(like.dtype) * scale).view(shape)


def _segment_sum(values: Tensor, index: Tensor, num_segments: int) -> Tensor:
    return values.new_zeros((num_segments, *values.shape[1:])).index_add(0, index, values)


def edge_softmax(scores: Tensor, adjacency: Adjacency) -> Tensor:
    """Softmax of `scores` [E, H] over the incoming edges of each node."""
    index = adjacency.destination[:, None].expand_as(scores)
    top = scores.new_full((adjacency.num_nodes, scores.shape[1]), float("-inf"))
    top = top.scatter_reduce(0, index, scores.detach(), "amax", include_self=True)
    exp = torch.exp(scores - top[adjacency.destination])
    return exp / _segment_sum(exp, adjacency.destination, adjacency.num_nodes)[adjacency.destination]


def aggregate(attention: Tensor, values: Tensor, adjacency: Adjacency) -> Tensor:
    """Σ over incoming edges of `attention` [E, H] times the source's `values` [N, H, C] → [N, H, C]."""
    messages = attention[:, :, None] * values[adjacency.source]
    return _segment_sum(messages, adjacency.destination, adjacency.num_nodes)


def score(terms: Score, adjacency: Adjacency) -> Tensor:
    """One score per edge and head, [E, H]."""
    kind, near, far, weight, slope = terms
    at_source, at_destination = far[adjacency.source], near[adjacency.destination]
    if kind == DOT:
        scale: float = near.shape[-1] ** -0.5
        return (at_destination * at_source).sum(-1) * scale
    score = leaky_relu(at_source + at_destination, slope)
    return score if weight is None else (weight * score).sum(-1)


def project_sparse(rows: SparseRows, weight: Tensor) -> Tensor:
    """Sparse `rows` times `weight` [F, D] → [N, D]."""
    entries = rows.values.to(weight.dtype)[:, None] * weight[rows.indices]
    return _segment_sum(entries, rows.rows, rows.num_rows)


def node_scores(values: Tensor, source_weight: Tensor, destination_weight: Tensor) -> tuple[Tensor, Tensor]:
    """`⟨source_weight, values⟩`, `⟨destination_weight, values⟩`: [N, H, C] and [H, C] → [N, H] twice."""
    return (values * source_weight).sum(-1), (values * destination_weight).sum(-1)


def dropout(values: Tensor, p: float, seed: int | Tensor) -> Tensor:
    """Set each number to 0 with probability `p` and scale the rest by 1 / (1 - p)."""
    return values * _factors(values.shape, p, seed, values)


def attend(terms: Score, values: Tensor, adjacency: Adjacency, options: Options) -> tuple[Tensor, Tensor]:
    """`score`, `edge_softmax`, `dropout`, `aggregate` and `bias`: values [N, H, C], undropped attention.

    The attention is [E, H], or its mean over heads [E, 1] if `averaged`; a backend may return it empty unless
    `written`.
    """
    p, seed, _, averaged, bias = options
    attention = edge_softmax(score(terms, adjacency), adjacency)
    used = dropout(attention, p, seed) if p else attention
    out = aggregate(used, values, adjacency)
    out = out if bias is None else out + bias
    return out, attention.mean(1, keepdim=True) if averaged and attention.shape[1] > 1 else attention


def _ball(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The middle of a range and one over half its width; 0 where the width is 0 or infinite."""
    half = (high - low) / 2
    finite = half.isfinite()
    return torch.where(finite, (low + high) / 2, 0.0), torch.where(finite & (half > 0), 1 / half, 0.0)


def ball_norm(x: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Distance of each row [N, ...] from the middle of a range, in units of half the range: [N]."""
    middle, inverse = _ball(low, high)
    return ((x - middle) * inverse).flatten(1).square().sum(1).sqrt()


def clip_rows(x: Tensor, bounds: Bounds, out: Tensor, masked: bool) -> Clipped:
    """Clip numbers to the range and rows to the radius; see `fgai.ops.clip`.

    Returns the result, which a kernel writes to `out`; if `masked`, which numbers were inside the range, bool
    [N, ...] (None: all); and by which factor each row was shrunk [N] (None: all by 1).
    """
    low, high, radius = bounds
    raised = torch.where(x >= low, x, low)  # also of NaN; ONNX has no `fmax`
    clipped = torch.where(raised > high, high, raised)
    inside = clipped == x if masked else None
    if x.dim() < 2 or x.shape[1:] != low.shape:
        return clipped, inside, None
    middle, _ = _ball(low, high)
    scale = (radius / ball_norm(clipped, low, high)).nan_to_num(nan=1.0, posinf=1.0).clamp(max=1.0)
    factor = scale.view(-1, *[1] * (x.dim() - 1))
    return torch.where(factor < 1, middle + factor * (clipped - middle), clipped), inside, scale


def clip_rows_back(
    gradient: Tensor, inside: Tensor | None, scale: Tensor | None, result: Tensor, bounds: Bounds
) -> Tensor:
    """The gradient of `clip_rows`, from that of its result y.

    Where a row was shrunk towards the middle m by a factor f it is, in units of half the range,

        f · (g − (Σ_j g_j (y_j − m_j)) (y − m) / r²),

    and zero for numbers that were not inside.
    """
    if scale is not None:
        low, high, radius = bounds
        middle, inverse = _ball(low, high)
        rows = (-1, *[1] * (result.dim() - 1))
        away, factor = result - middle, scale.view(rows)
        along = (gradient * away).flatten(1).sum(1).view(rows)
        turned = along * away * (inverse / radius).square()
        gradient = torch.where(factor < 1, factor * (gradient - turned), gradient)
    return gradient if inside is None else torch.where(inside, gradient, 0.0)
