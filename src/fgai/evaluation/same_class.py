"""Explanations that change while the prediction stays: the nodes nobody would look at again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fgai import metrics
from fgai.evaluation.measures import NAN, layered


def same_class(
    overlap: Tensor, touched: Sequence[Tensor], before: Tensor, after: Tensor, nodes: Tensor, sharpest: int
) -> dict[str, Any]:
    """What an attack did to the explanations of nodes that keep their predicted class.

    Over the scored nodes within reach of the attack (per layer) that have more than k neighbours:

        changed = share whose top-k lost a member although their class stayed
        overlap = mean overlap of the top-k, over those whose class stayed

    Args:
        overlap: [L, N] top-k overlap clean to attacked, NaN at nodes with at most k neighbours.
        touched: per layer bool [N].
        before: [N, C] logits on the clean graph.
        after: [N or more, C] logits on the attacked graph.
        nodes: [T] the scored nodes.
        sharpest: which layer is reported as such.

    Returns:
        `changed` and `overlap` per layer, and `kept`, the share of all scored nodes that kept their class.
    """
    stayed = before.argmax(1) == after[: before.shape[0]].argmax(1)
    scored = torch.zeros_like(stayed)
    scored[nodes] = True
    changed, kept = [], []
    for row, reached in zip(overlap, touched, strict=True):
        counted = scored & reached & ~row.isnan()
        moved = ((row < 1) & stayed)[counted].double()
        changed.append(float(moved.mean()) if moved.numel() else NAN)
        kept.append(metrics.mean_over(row, counted & stayed))
    return {
        "changed": layered(changed, sharpest),
        "overlap": layered(kept, sharpest),
        "kept": float(stayed[nodes].double().mean()),
    }
