"""The term `similarity`: the attention of the vanilla model and its top-k neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai.topk import topk_l1, topk_mask
from fgai.training.terms.base import StepContext, first_rows, sum_scalars, term


@term(on="clean", needs_explanation=True)
def similarity(context: StepContext) -> Tensor:
    """Distance of the attention to the vanilla model's, and of its top-k neighbours from the top-k.

    Σ over layers of mean over nodes of `½ Σ_j |w_j − w̃_j| / contrast`, plus mean over nodes with more than k
    neighbours of `(1/k) Σ_{j in T} relu(θ − ā_j) / θ`. T is the vanilla top-k, ā the explanation, θ its k-th
    largest entry, a constant. Without the division a layer that is almost uniform would not count.
    """
    vanilla, k = context.vanilla_outputs, context.settings.k
    layers = zip(vanilla.attention, context.attention, vanilla.rowptrs, vanilla.contrasts, strict=True)
    distances = [topk_l1(a, b, rowptr, None, factor=1 / contrast) for a, b, rowptr, contrast in layers]
    ranked = zip(context.explanations, vanilla.top_k(k), vanilla.rowptrs, context.layers, strict=True)
    shortfalls = [
        _below_threshold(w, top, rowptr, first_rows(layer.destination, w), k)
        for w, top, rowptr, layer in ranked
    ]
    return sum_scalars([*distances, *shortfalls])


def _below_threshold(w: Tensor, top: Tensor, rowptr: Tensor, destination: Tensor, k: int) -> Tensor:
    """Mean of `(1/k) Σ_{j in T} relu(θ − w_j) / θ` over nodes with more than k neighbours; `top` [E] is T."""
    values, degree = w.detach(), rowptr.diff()
    members = torch.where(topk_mask(values, rowptr, k), values, torch.inf)
    least = torch.full_like(degree, torch.inf, dtype=w.dtype).scatter_reduce(0, destination, members, "amin")
    counted = degree > k
    threshold = least.clamp(min=torch.finfo(w.dtype).tiny, max=1.0)[destination]
    below = (threshold - w).clamp(min=0) / threshold * (top & counted[destination])
    return below.sum() / (k * counted.sum().clamp(min=1))
