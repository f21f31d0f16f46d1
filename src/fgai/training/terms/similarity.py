"""The term `similarity`: attention of the vanilla model."""

from __future__ import annotations

from torch import Tensor

from fgai.topk import topk_l1
from fgai.training.terms.base import StepContext, add_up, term


@term(on="clean")
def similarity(context: StepContext) -> Tensor:
    """Total variation of the attention to the vanilla model's, in units of each layer's contrast.

    Σ over layers of mean over nodes of `½ Σ_j |w_j − w̃_j| / contrast`: without the units a layer that is
    almost uniform would not count.
    """
    targets = context.targets
    layers = zip(targets.attention, context.attention, targets.rowptrs, targets.contrasts, strict=True)
    return add_up([topk_l1(a, b, rowptr, None, factor=1 / size) for a, b, rowptr, size in layers])
