"""The term `closeness`: the predictions of the vanilla model."""

from __future__ import annotations

from torch import Tensor

from fgai.training.terms.base import StepContext, kl_divergence, term


@term(on="clean")
def closeness(context: StepContext) -> Tensor:
    """KL(vanilla ‖ faithful) of the predicted classes, averaged over rows."""
    return kl_divergence(context.vanilla_outputs.logits, context.logits)
