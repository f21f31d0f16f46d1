"""The term `prediction_stability`: the same predictions under attack."""

from __future__ import annotations

from torch import Tensor

from fgai.training.terms.base import StepContext, kl_divergence, term


@term(on="attacked")
def prediction_stability(context: StepContext) -> Tensor:
    """KL(clean ‖ attacked) of the predicted classes, averaged over the rows that the attack can reach.

    The clean logits are detached: `closeness` already ties them to the vanilla model.
    """
    assert context.attacked_logits is not None and context.reach is not None
    return kl_divergence(context.logits, context.attacked_logits) / context.reach.predictions
