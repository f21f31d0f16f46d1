"""The term `certified`: classes that provably stay when every node gains a new neighbour."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai.bounds.scores import worst_margins
from fgai.training.terms.base import StepContext, first_rows, term

NEW_NEIGHBOURS = 1
"""Injected neighbours of every node that the bound allows for."""
MIN_MARGIN = 0.1
"""Worst-case margin asked of a class, in units of the vanilla logits' spread."""
MARGIN_WIDTH = 0.3
"""Width of the sigmoid, in the same units."""


@term(on="clean", weight=4.0, own_pass=True)
def certified(context: StepContext) -> Tensor:
    """Mean over nodes of `sigmoid((0.1 − worst-case margin / spread) / 0.3)`; needs limits.

    A smooth count of nodes without a certificate against injection: nodes near one have the largest
    gradient. The attention mass of new neighbours rises with the ramp; at full size from the start no class
    would have a positive one, and there would be no gradient.
    """
    settings, vanilla = context.settings, context.vanilla_outputs
    margins = worst_margins(
        context.model,
        context.graph,
        vanilla.classes,
        neighbours=NEW_NEIGHBOURS,
        clip_share=settings.clip_share,
        shrink=settings.shrink,
        mass_share=context.ramp,
    )
    return _uncertified_share(first_rows(margins, vanilla.logits), vanilla.logit_spread)


def _uncertified_share(margins: Tensor, logit_spread: float) -> Tensor:
    """The smooth count of `certified` from the worst-case margins [N, C] to every other class."""
    return torch.sigmoid((MIN_MARGIN - margins.amin(1) / logit_spread) / MARGIN_WIDTH).mean()
