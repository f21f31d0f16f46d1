"""The operations in plain PyTorch: slow, obvious, differentiable any number of times.

The kernels are tested against these, and devices without a kernel use them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import leaky_relu

from fgai.ops.adjacency import Adjacency


def segment_sum(values: Tensor, index: Tensor, num_segments: int) -> Tensor:
    """Sum the rows of `values` [E, ...] that share an entry of `index` [E]."""
    out = values.new_zeros((num_segments, *values.shape[1:]))
    return out.index_add(0, index, values)


def edge_softmax(scores: Tensor, adjacency: Adjacency) -> Tensor:
    """Softmax of `scores` [E, H] over the incoming edges of each node."""
    index = adjacency.destination[:, None].expand_as(scores)
    top = scores.new_full((adjacency.num_nodes, scores.shape[1]), float("-inf"))
    top = top.scatter_reduce(0, index, scores.detach(), "amax", include_self=True)
    exp = torch.exp(scores - top[adjacency.destination])
    total = segment_sum(exp, adjacency.destination, adjacency.num_nodes)
    return exp / total[adjacency.destination]


def aggregate(attention: Tensor, values: Tensor, adjacency: Adjacency) -> Tensor:
    """Σ over incoming edges of `attention` [E, H] times the source's `values` [N, H, C] → [N, H, C]."""
    messages = attention[:, :, None] * values[adjacency.source]
    return segment_sum(messages, adjacency.destination, adjacency.num_nodes)


def score_additive(left: Tensor, right: Tensor, adjacency: Adjacency, slope: float) -> Tensor:
    """`leaky_relu(left[source] + right[destination])` for `left`, `right` [N, H] → [E, H]."""
    return leaky_relu(left[adjacency.source] + right[adjacency.destination], slope)


def score_dynamic(left: Tensor, right: Tensor, weight: Tensor, adjacency: Adjacency, slope: float) -> Tensor:
    """`Σ_c weight · leaky_relu(left[source] + right[destination])`, [N, H, C] and [H, C] → [E, H]."""
    return (weight * leaky_relu(left[adjacency.source] + right[adjacency.destination], slope)).sum(-1)


def score_dot(query: Tensor, key: Tensor, adjacency: Adjacency) -> Tensor:
    """`⟨query[destination], key[source]⟩ / √C` for [N, H, C] → [E, H]."""
    scale: float = query.shape[-1] ** -0.5
    return (query[adjacency.destination] * key[adjacency.source]).sum(-1) * scale


def project_sparse(indptr: Tensor, indices: Tensor, values: Tensor, weight: Tensor) -> Tensor:
    """Rows in compressed form times `weight` [F, D] → [N, D]."""
    rows = torch.repeat_interleave(
        torch.arange(indptr.shape[0] - 1, device=indptr.device), indptr[1:] - indptr[:-1]
    )
    return segment_sum(values[:, None] * weight[indices], rows, indptr.shape[0] - 1)
