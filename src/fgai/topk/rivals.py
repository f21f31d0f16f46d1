"""Outsiders against members of a top-k: the strongest of the ones, the weakest of the others, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai.topk.sets import FEW, leaders, on_gpu


def rivals(
    now: Tensor, there: Tensor, members: Tensor, rowptr: Tensor, rows: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """How far the s-th strongest outsider is above the s-th weakest member, s = 1..k.

    Args:
        now: [E] scores; gradients reach them.
        there: bool [E], the edges that count.
        members: bool [E], the top-k.
        rowptr: [N + 1].
        rows: [R] the rows to compare in, each once.
        k: how many pairs to compare in each.

    Returns:
        The differences [R, k], 0 where there is no such pair, and bool [R, k] where there is one.
    """
    if on_gpu(now) and k <= FEW and now.dtype in (torch.float32, torch.float64):
        from fgai.topk.gpu_rivals import compare

        return compare(now, there, members, rowptr, rows, k)
    fixed = now.detach()
    outside = leaders(fixed.masked_fill(members | ~there, float("-inf")), rowptr, k)[rows]
    inside = leaders((-fixed).masked_fill(~(members & there), float("-inf")), rowptr, k)[rows]
    real = (outside >= 0) & (inside >= 0)
    strong, weak = outside.clamp(min=0), inside.clamp(min=0)
    real &= ~members[strong] & there[strong] & members[weak] & there[weak]
    return torch.where(real, at(now, strong) - at(now, weak), 0.0), real


def at(values: Tensor, places: Tensor) -> Tensor:
    """`values[places]`; on a GPU its gradient needs no sort, and no luck where no place counts twice."""
    return values.index_select(0, places.flatten()).view(places.shape)
