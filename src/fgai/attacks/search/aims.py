"""What a search climbs, and what it is judged by on the way.

The loss is smooth; the damage is the number the evaluation reports: the share of attacked rows that are wrong,
or the share of the top-k that the touched nodes lost. Both come out of the same forward pass, so the search
keeps its worst point by what counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from fgai.attacks.search.site import Site, View
from fgai.attention import touched_rows
from fgai.objectives import Clean, Explanation
from fgai.recompute.reduced import ReducedExplanation

RowLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits [R, C], class to leave [R], scale of the logits) → loss per row [R]; we maximise its mean."""


class Aim(Protocol):
    """Climbed and judged at one site."""

    def __call__(self, view: View) -> tuple[Tensor, Tensor]:
        """Return the loss, with gradients, and the damage, without."""


def gap(logits: Tensor, label: Tensor) -> Tensor:
    """Best other logit minus that of `label`, [R]: positive where the row is wrong."""
    own = one_hot(label, logits.shape[1]).bool()
    other = logits.masked_fill(own, float("-inf")).amax(1)
    return other - logits.gather(1, label[:, None]).squeeze(1)


def entropy_loss(logits: Tensor, label: Tensor, scale: Tensor) -> Tensor:
    """Cross-entropy: unbounded, so it ends up with few rows that are very wrong."""
    return cross_entropy(logits, label, reduction="none")


def margin_loss(logits: Tensor, label: Tensor, scale: Tensor) -> Tensor:
    """The gap in units of the clean margins, cut off where a row is clearly wrong."""
    return (gap(logits, label) / scale).clamp(max=0.2)


def reach_loss(logits: Tensor, label: Tensor, scale: Tensor) -> Tensor:
    """A sigmoid of the gap, about the number of wrong rows: rows out of reach cost no effort either."""
    return torch.sigmoid(4 * gap(logits, label) / scale)


ROW_LOSSES: dict[str, RowLoss] = {"entropy": entropy_loss, "margin": margin_loss, "reach": reach_loss}


class PredictionAim:
    """Wrong predictions.

    Args:
        site: where.
        loss: a name from `ROW_LOSSES`.
        labels: the class each row of the logits should have: the true one, or else the clean prediction.
    """

    def __init__(self, site: Site, loss: str, labels: Tensor) -> None:
        clean = site.clean
        self.loss, self.label, self.count = ROW_LOSSES[loss], labels[site.rows], clean.nodes.numel()
        self.scale = clean_margin(clean)
        reached = torch.zeros(clean.logits.shape[0], dtype=torch.bool, device=clean.logits.device)
        reached[site.rows] = True
        rest = clean.nodes[~reached[clean.nodes]]
        self.fixed = (clean.logits[rest].argmax(1) != labels[rest]).sum()

    def __call__(self, view: View) -> tuple[Tensor, Tensor]:
        """See `Aim`."""
        loss = self.loss(view.logits, self.label, self.scale).sum() / self.count
        wrong = (view.logits.detach().argmax(1) != self.label).sum() + self.fixed
        return loss, wrong / self.count


def clean_margin(clean: Clean) -> Tensor:
    """Median distance of the two best clean logits over the attacked rows: the unit of a margin."""
    best = clean.logits[clean.nodes].topk(2, dim=1).values
    return (best[:, 0] - best[:, 1]).median().clamp(min=1e-6)


class ExplanationAim:
    """Another top-k.

    Args:
        site: where; it must read attention.
        explanation: the objective with its k.
    """

    def __init__(self, site: Site, explanation: Explanation) -> None:
        self.explanation, self.site, self.reduced = explanation, site, None
        self.touched: list[Tensor] | None = None
        if site.again is not None and site.plan is not None:
            with torch.no_grad():
                self.reduced = ReducedExplanation(explanation, site.again, site.clean, site.plan)

    def __call__(self, view: View) -> tuple[Tensor, Tensor]:
        """See `Aim`."""
        if self.reduced is not None and view.touched is not None:
            return self.reduced.shares(view.touched)
        assert view.attention is not None
        if self.touched is None:
            self.touched = touched_rows(self.site.clean.attention, view.attention)
        return self.explanation.shares(view.attention, self.site.clean, self.touched)


class JointAim:
    """Wrong predictions and another top-k at once, in equal parts; judged by one of them.

    Args:
        prediction: the first.
        explanation: the second.
        judged: `prediction` or `explanation`.
    """

    def __init__(self, prediction: PredictionAim, explanation: ExplanationAim, judged: str) -> None:
        self.prediction, self.explanation, self.judged = prediction, explanation, judged

    def __call__(self, view: View) -> tuple[Tensor, Tensor]:
        """See `Aim`."""
        first, wrong = self.prediction(view)
        second, lost = self.explanation(view)
        return first + second, wrong if self.judged == "prediction" else lost
