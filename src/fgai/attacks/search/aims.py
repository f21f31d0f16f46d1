"""An objective at one site, for several sets of features at once: its loss and its damage.

Both come out of the same forward pass, so that a search keeps its worst point by what is reported.
`ObjectiveAim` serves every objective by full passes; the others compute the same from the rows in reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fgai.attacks.search.site import Site, View
from fgai.attention import touched_rows
from fgai.objectives import Clean, Explanation, Objective
from fgai.recompute.reduced import ReducedExplanation


class Rows(NamedTuple):
    """What row losses read, of several sets of features.

    Attributes:
        logits: [B, R, C].
        own: [B, R] the logit of the class to leave.
        gap: [B, R] the best other logit minus it: positive where the row is wrong.
        scale: a scalar, the unit of a gap.
    """

    logits: Tensor
    own: Tensor
    gap: Tensor
    scale: Tensor

    @classmethod
    def of(cls, logits: Tensor, mine: Tensor, scale: Tensor) -> Rows:
        """Read logits whose classes to leave are marked in `mine`, bool [R, C]."""
        own = logits.masked_fill(~mine, 0.0).sum(-1)
        return cls(logits, own, logits.masked_fill(mine, float("-inf")).amax(-1) - own, scale)


RowLoss = Callable[[Rows], Tensor]
"""A loss per row [B, R]; we maximise its mean."""


class Aim(Protocol):
    """Climbed and judged at one site, for several sets of features at once."""

    def __call__(self, view: View) -> tuple[Tensor, Tensor]:
        """Return the losses [B], with gradients, and the damages [B], without."""


def entropy_loss(rows: Rows) -> Tensor:
    """Cross-entropy: unbounded, so it ends up with few rows that are very wrong."""
    return rows.logits.logsumexp(-1) - rows.own


def margin_loss(rows: Rows) -> Tensor:
    """The gap in units of the clean margins, cut off where a row is clearly wrong."""
    return (rows.gap / rows.scale).clamp(max=0.2)


def reach_loss(rows: Rows) -> Tensor:
    """A sigmoid of the gap, about the number of wrong rows: rows out of reach cost no effort either."""
    return torch.sigmoid(4 * rows.gap / rows.scale)


ROW_LOSSES: dict[str, RowLoss] = {"entropy": entropy_loss, "margin": margin_loss, "reach": reach_loss}


class PredictionAim:
    """Wrong predictions.

    Args:
        site: where.
        losses: a name from `ROW_LOSSES` for every set of features.
        weights: [T] of the attacked rows, see `fgai.metrics.error_weights`; None for 1/T each.
    """

    def __init__(self, site: Site, losses: Sequence[str], weights: Tensor | None = None) -> None:
        clean, labels = site.clean, site.clean.labels
        self.label, self.count, self.scale = labels[site.rows], clean.nodes.numel(), clean_margin(clean)
        self.mine = one_hot(self.label, clean.logits.shape[1]).bool()
        self.losses = [
            (ROW_LOSSES[name], torch.tensor([one == name for one in losses], device=labels.device))
            for name in dict.fromkeys(losses)
        ]
        reached = torch.zeros(clean.logits.shape[0], dtype=torch.bool, device=clean.logits.device)
        reached[site.rows] = True
        rest = clean.nodes[~reached[clean.nodes]]
        wrong = clean.logits[rest].argmax(1) != labels[rest]
        self.fixed, self.weights = wrong.sum(), None
        if weights is not None:
            spread = clean.logits.new_zeros(clean.logits.shape[0]).index_put((clean.nodes,), weights)
            self.fixed, self.weights = spread[rest][wrong].sum(), spread[site.rows]

    def __call__(self, view: View) -> tuple[Tensor, Tensor]:
        """See `Aim`."""
        loss = view.logits.new_zeros(view.logits.shape[0])
        rows = Rows.of(view.logits, self.mine, self.scale)
        for function, chosen in self.losses:
            loss = torch.where(chosen, self._total(function(rows)), loss)
        return loss, self.damage(view.logits.detach())

    def damage(self, logits: Tensor) -> Tensor:
        """Return the share of wrong rows, or the sum of their weights, [B]."""
        return self._total(logits.argmax(-1) != self.label, self.fixed)

    def _total(self, values: Tensor, more: Tensor | int = 0) -> Tensor:
        """Mean over all attacked rows of values [B, R], and what the other rows add."""
        if self.weights is None:
            return (values.sum(1) + more) / self.count
        return (values * self.weights).sum(1) + more


class LinkAim(PredictionAim):
    """Links ranked below other pairs: the damage is one minus the ROC-AUC, ties broken by their order.

    There is a row for every attacked pair: links are never computed in part.
    """

    def damage(self, logits: Tensor) -> Tensor:
        """Return one minus the ROC-AUC, [B]; 0 where there are links or other pairs only."""
        ranks = (logits[..., 1] - logits[..., 0]).argsort(dim=1).argsort(dim=1) + 1
        links = self.label == 1
        positives, negatives = links.sum(), (~links).sum()
        below = (ranks * links).sum(1) - positives * (positives + 1) / 2
        return torch.where(positives * negatives > 0, 1 - below / (positives * negatives).clamp(min=1), 0.0)


def clean_margin(clean: Clean) -> Tensor:
    """Median distance of the two best clean logits over the attacked rows: the unit of a margin."""
    best = clean.logits[clean.nodes].topk(2, dim=1).values
    return (best[:, 0] - best[:, 1]).median().clamp(min=1e-6)


class ExplanationAim:
    """Another top-k.

    Args:
        site: where; it must read attention.
        explanation: the objective with its k.
        count: sets of features at once.
    """

    def __init__(self, site: Site, explanation: Explanation, count: int) -> None:
        self.explanation, self.site, self.reduced = explanation, site, None
        self.touched: list[Tensor] | None = None
        if site.recompute is not None and site.plan is not None:
            with torch.no_grad():
                single = ReducedExplanation(explanation, site.recompute, site.clean, site.plan)
                self.reduced = single.repeated(site.copies(count))

    def __call__(self, view: View) -> tuple[Tensor, Tensor]:
        """See `Aim`."""
        if self.reduced is not None and view.touched is not None:
            return self.reduced.shares(view.touched)
        assert view.outputs is not None
        maps = [attention for _, attention in view.outputs]
        if self.touched is None:
            self.touched = touched_rows(self.site.clean.attention, maps[0])
        found = [self.explanation.shares(one, self.site.clean, self.touched) for one in maps]
        return torch.stack([loss for loss, _ in found]), torch.stack([lost for _, lost in found])


class ObjectiveAim:
    """Any objective, a user's included.

    Args:
        site: where; made without partial passes.
        objective: its loss is climbed, its damage is judged.
    """

    def __init__(self, site: Site, objective: Objective) -> None:
        self.clean, self.objective = site.clean, objective

    def __call__(self, view: View) -> tuple[Tensor, Tensor]:
        """See `Aim`."""
        assert view.outputs is not None
        loss = [self.objective(logits, attention, self.clean) for logits, attention in view.outputs]
        damage = [self.objective.judged(logits, attention, self.clean) for logits, attention in view.outputs]
        return torch.stack(loss), torch.stack(damage)
