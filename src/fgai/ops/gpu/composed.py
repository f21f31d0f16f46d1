"""Attention in one call on the GPU, composed of the kernels: score, softmax, dropout, aggregation."""

from __future__ import annotations

from torch import Tensor

from fgai.ops import reference
from fgai.ops.adjacency import Adjacency
from fgai.ops.gpu.functions import aggregate, edge_softmax, score_additive, score_dot, score_dynamic

node_scores = reference.node_scores
dropout = reference.dropout


def _attend(
    scores: Tensor, values: Tensor, adjacency: Adjacency, p: float, seed: int | Tensor
) -> tuple[Tensor, Tensor]:
    attention = edge_softmax(scores, adjacency)
    used = attention if p == 0 else dropout(attention, p, seed)
    return aggregate(used, values, adjacency), attention


def attend_additive(
    left: Tensor,
    right: Tensor,
    values: Tensor,
    adjacency: Adjacency,
    slope: float,
    p: float,
    seed: int | Tensor,
) -> tuple[Tensor, Tensor]:
    """See `fgai.ops.reference.attend_additive`."""
    return _attend(score_additive(left, right, adjacency, slope), values, adjacency, p, seed)


def attend_dynamic(
    left: Tensor,
    right: Tensor,
    weight: Tensor,
    values: Tensor,
    adjacency: Adjacency,
    slope: float,
    p: float,
    seed: int | Tensor,
) -> tuple[Tensor, Tensor]:
    """See `fgai.ops.reference.attend_dynamic`."""
    return _attend(score_dynamic(left, right, weight, adjacency, slope), values, adjacency, p, seed)


def attend_dot(
    query: Tensor, key: Tensor, values: Tensor, adjacency: Adjacency, p: float, seed: int | Tensor
) -> tuple[Tensor, Tensor]:
    """See `fgai.ops.reference.attend_dot`."""
    return _attend(score_dot(query, key, adjacency), values, adjacency, p, seed)
