"""The term `certified`: classes that provably stay when every node gains a new neighbour."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai.bounds.scores import worst_margins
from fgai.training.terms.base import StepContext, first_rows, term

NEIGHBOURS = 1
"""Injected neighbours of every node that the bound allows for."""
LEAD = 0.1
"""Worst-case lead that a class shall have, in units of the vanilla logits' spread."""
NEAR = 0.3
"""How far from it, in the same units, a node still counts as near."""


@term(on="clean", weight=4.0, own_pass=True)
def certified(context: StepContext) -> Tensor:
    """Mean over nodes of `sigmoid((0.1 − worst-case lead / spread) / 0.3)`; needs limits.

    A smooth count of nodes without a certificate against injection: nodes near one have the largest
    gradient. The attention mass of new neighbours rises with the ramp; at full size from the start no class
    would lead anywhere, and there would be no gradient.
    """
    settings, targets = context.settings, context.targets
    leads = worst_margins(
        context.model,
        context.graph,
        targets.classes,
        neighbours=NEIGHBOURS,
        clip_share=settings.clip_share,
        shrink=settings.shrink,
        mass_share=context.ramp,
    )
    return _shortfall(first_rows(leads, targets.logits), targets.scale)


def _shortfall(leads: Tensor, scale: float) -> Tensor:
    """Of least leads [N, C] over every other class, see `fgai.bounds.worst_margins`."""
    return torch.sigmoid((LEAD - leads.amin(1) / scale) / NEAR).mean()
