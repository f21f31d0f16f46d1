"""The term `margin`: a top-k that is certified at a radius."""

from __future__ import annotations

from torch import Tensor

from fgai.topk import swap_margin
from fgai.training.terms.base import StepContext, sum_scalars, term


@term(on="clean", needs_explanation=True)
def margin(context: StepContext) -> Tensor:
    """How far the top-k of the explanation is from being certified at radius R; 0 when every node is.

        Σ over layers of mean over nodes with more than k neighbours and over m of relu(R − c(m) / m) / R

    with `c(m)` the l1 cost of swapping m members. Unlike the literal worst case in attention space, which has
    no gradient in the attention (docs/method.md), it pulls members and outsiders of the top-k apart.
    """
    k, radius, rowptrs = context.settings.k, context.settings.radius, context.vanilla_outputs.rowptrs
    layers = zip(context.explanations, rowptrs, strict=True)
    return sum_scalars([swap_margin(w, rowptr, k, radius) for w, rowptr in layers])
