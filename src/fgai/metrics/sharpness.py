"""Whether attention says anything at all: its distance from uniform."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai.errors import InputError
from fgai.metrics.given import check_attention
from fgai.metrics.nodes import mean_over
from fgai.metrics.spec import metric
from fgai.ops.segments import row_index, row_sum
from fgai.typed import typed


@typed
def sharpness_per_node(w: Tensor, rowptr: Tensor) -> Tensor:
    """`KL(w_i ‖ uniform) / log(degree)` of every node with at least two neighbours, float64 [N]; else NaN.

    Each row is divided by its sum first, which changes nothing for attention. Rows of zeros count as uniform.
    """
    check_attention(w, rowptr)
    if bool((w < 0).any()):
        raise InputError(f"`w` must not be negative, as attention is not, got {float(w.min())}")
    w = w.detach().double()
    degree = rowptr.diff().double()
    total = row_sum(w, rowptr)
    share = w / torch.where(total > 0, total, 1.0)[row_index(rowptr, w.shape[0])]
    entropy = -row_sum(torch.xlogy(share, share), rowptr)
    sharp = torch.where(total > 0, 1 - entropy / degree.clamp(min=2).log(), 0.0).clamp(0, 1)
    return torch.where(degree >= 2, sharp, float("nan"))


@metric(
    direction="higher", low=0, high=1, paths=("sharpness.*",), headings={"sharpness.clean.all": "sharpness"}
)
@typed
def sharpness(w: Tensor, rowptr: Tensor, *, nodes: Tensor | None = None) -> float:
    """Mean distance of attention from uniform over nodes with at least two neighbours.

        KL(w_i ‖ uniform) / log(degree_i) = 1 - entropy(w_i) / log(degree_i)

    0: the attention says nothing (1/degree everywhere). 1: every node looks at one neighbour only. Stability
    bought by flattening shows here.

    Args:
        w: [E], non-negative, heads averaged.
        rowptr: [N+1].
        nodes: bool [N] or indices; only these nodes count.

    Returns:
        In [0, 1]; NaN if no node has two neighbours.

    Example:
        >>> sharpness(torch.tensor([0.5, 0.5, 1.0, 0.0]), torch.tensor([0, 2, 4]))
        0.5
    """
    return mean_over(sharpness_per_node(w, rowptr), nodes)
