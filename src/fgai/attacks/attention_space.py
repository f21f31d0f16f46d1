"""The attention adversary: perturbs the output layer's attention inside a ball, values held fixed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fgai.attacks import balls
from fgai.ops import aggregate
from fgai.sparse import Adjacency


def worst_logit_shift(values: Tensor, adjacency: Adjacency, radius: float) -> tuple[Tensor, Tensor]:
    """The exact maximum over the l1 ball of the change of logits, and the edge that attains it.

    With a linear read-out `y_i = b + Σ_j w_ij z_j` the change is `½ ‖Σ_j δ_ij z_j‖₁`, convex in δ, so its
    maximum over `‖δ_i‖₁ ≤ R` sits on a vertex ±R e_j:

        max = R/2 · max_j ‖z_j‖₁   over the neighbours j of i.

    Args:
        values: [N, C] z, heads averaged.
        adjacency: the layer's edges.
        radius: R.

    Returns:
        [N] the maximum (0 for a node without neighbours), and [N] the position of the edge (-1 without).
    """
    size = values.abs().sum(1)[adjacency.source]
    top = size.new_full((adjacency.num_nodes,), float("-inf"))
    top = top.scatter_reduce(0, adjacency.destination, size, "amax")
    empty = adjacency.degree == 0
    spot = torch.arange(adjacency.num_edges, device=size.device)
    first = torch.where(size == top[adjacency.destination], spot, adjacency.num_edges)
    edge = spot.new_full((adjacency.num_nodes,), adjacency.num_edges)
    edge = edge.scatter_reduce(0, adjacency.destination, first, "amin")
    return (radius / 2 * top).masked_fill(empty, 0.0), edge.masked_fill(empty, -1)


def ascend_attention(
    objective: Callable[[Tensor], Tensor],
    attention: Tensor,
    rowptr: Tensor,
    *,
    radius: float,
    norm: str = "l1",
    steps: int = 5,
    generator: torch.Generator,
) -> Tensor:
    """Maximise `objective(attention + delta)` over per-node balls by projected gradient ascent.

    Args:
        objective: differentiable, from [E] to a scalar.
        attention: [E], held fixed.
        rowptr: [N + 1].
        radius: of every node's ball.
        norm: `l1`, `l2` or `linf`.
        steps: ascent steps.
        generator: of the random start.

    Returns:
        delta [E]: the best point seen, the start included.
    """
    delta = balls.random_point(rowptr, attention.shape[0], radius, norm, generator=generator).to(attention)
    best, best_value = delta, float("-inf")
    for step in range(steps + 1):
        moving = delta.detach().requires_grad_()
        value = objective(attention + moving)
        if float(value.detach()) > best_value:
            best, best_value = delta, float(value.detach())
        if step == steps:
            break
        (gradient,) = torch.autograd.grad(value, moving)
        stride = 2.5 * radius / max(1, steps)
        delta = balls.project(delta + balls.steepest(gradient, rowptr, stride, norm), rowptr, radius, norm)
    return best.detach()


def probability_shift(
    attention: Tensor, values: Tensor, bias: Tensor | float, adjacency: Adjacency, delta: Tensor
) -> Tensor:
    """Total variation between the class probabilities of attention and attention + delta, mean over nodes.

    Args:
        attention: [E] of a one-head output layer.
        values: [N, C].
        bias: added to the logits.
        adjacency: the layer's edges.
        delta: [E].
    """
    rows = values[:, None, :]
    before = aggregate(attention[:, None], rows, adjacency).squeeze(1) + bias
    after = aggregate((attention + delta)[:, None], rows, adjacency).squeeze(1) + bias
    return (before.softmax(1) - after.softmax(1)).abs().sum(1).mean() / 2
