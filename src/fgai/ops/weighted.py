"""Softmax with weights on the edges: how much of each edge there is, as a log-weight on its score."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai.errors import InputError
from fgai.ops.functional import edge_softmax
from fgai.ops.segments import row_max, row_sum
from fgai.sparse import Adjacency
from fgai.typed import typed

_NOWHERE = -1e30
"""Score of an edge of weight 0: finite, so that a node all of whose edges have weight 0 gives no NaN."""
_STEEPEST = 60.0
"""Largest exponent in a gradient, reached only by edges of weight 0 with a score far above the others'."""

# mypy: disable-error-code="no-untyped-call"


class _WeightedSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, weight: Tensor, adjacency: Adjacency) -> Tensor:
        there = (weight > 0)[:, None]
        raised = torch.where(there, scores + weight.log()[:, None], _NOWHERE)
        attention = edge_softmax(raised, adjacency) * there
        ctx.save_for_backward(scores, raised, attention)
        ctx.adjacency = adjacency
        return attention

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scores, raised, attention = ctx.saved_tensors
        rowptr, destination = ctx.adjacency.rowptr, ctx.adjacency.destination
        mean = row_sum(attention * gradients[0], rowptr)
        centred = gradients[0] - mean[destination]
        on_scores = attention * centred if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return on_scores, None, None
        # exp(score) over the row's normaliser: attention / weight where there is weight, its limit where not.
        normaliser = row_max(raised, rowptr) - row_max(attention, rowptr).log()
        steep = torch.exp((scores - normaliser[destination]).clamp(max=_STEEPEST))
        return on_scores, (steep * centred).sum(1), None


@typed
def weighted_softmax(scores: Tensor, weight: Tensor, adjacency: Adjacency) -> Tensor:
    """Softmax over the incoming edges of each node, every edge counted `weight` times.

        out_e = weight_e exp(score_e) / Σ_{e' into the same node} weight_e' exp(score_e')

    which is the softmax of `score + log weight`. An edge of weight 0 gets exactly 0, however high its score,
    and still tells its weight's gradient; a node whose edges all have weight 0 gets zeros, like one
    without edges. Equal weights at a node change nothing. Not differentiable twice.

    Args:
        scores: [E, H].
        weight: [E], at least 0 (negative counts as 0); gradients flow to it.
        adjacency: the edges.

    Returns:
        [E, H].

    Raises:
        InputError: if `weight` is not one number per edge.

    Example:
        >>> adjacency, _ = Adjacency.build(torch.tensor([[0, 1, 2], [3, 3, 3]]), 4)
        >>> weighted_softmax(torch.zeros(3, 1), torch.tensor([3.0, 1.0, 0.0]), adjacency).flatten().tolist()
        [0.75, 0.25, 0.0]
    """
    if not weight.is_floating_point() or weight.shape != (adjacency.num_edges,):
        raise InputError(
            f"edge weights must have shape [{adjacency.num_edges}], one per edge, got {tuple(weight.shape)}"
        )
    result: Tensor = _WeightedSoftmax.apply(scores, weight.to(scores.dtype), adjacency)
    return result
