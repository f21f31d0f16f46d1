"""Certified changes of a prediction: the result type, and the bounds every read-out shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fgai.typed import typed

EXACT, BOUND, UNKNOWN = "exact", "bound", "unknown"
STATUSES = (EXACT, BOUND, UNKNOWN)
SMALLEST = 5e-324
"""The radius of a node that is certified at radius 0 and no further."""


@typed
@dataclass(frozen=True, eq=False)
class Prediction:
    """What perturbing one layer's attention can do to the prediction of each node.

    A part is `exact` (attained inside the ball), a sound `bound`, or `unknown` and then None.

    Attributes:
        class_radius: float64 [N], no perturbation of this size or below changes the predicted class;
            infinite where the attention has no say, 0 where two classes tie.
        alpha2_logits: float64 [N], most the logits can change in total variation at the given radius.
        alpha2_probabilities: float64 [N], the same for probabilities.
        class_status: of `class_radius`.
        logits_status: of `alpha2_logits`.
        probabilities_status: of `alpha2_probabilities`.
        reason: why a part is unknown, or where a bound comes from.
        rows_are: what an entry stands for: `nodes`, `links` or `graphs`.
    """

    class_radius: Tensor | None = None
    alpha2_logits: Tensor | None = None
    alpha2_probabilities: Tensor | None = None
    class_status: str = UNKNOWN
    logits_status: str = UNKNOWN
    probabilities_status: str = UNKNOWN
    reason: str = ""
    rows_are: str = "nodes"


def gaps(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The predicted class [N] and its lead over every class [N, C], infinite over itself; float64."""
    y = logits.detach().cpu().double()
    top = y.argmax(1)
    lead = y.gather(1, top[:, None]) - y
    return top, lead.scatter(1, top[:, None], float("inf"))


def radius_of(lead: Tensor, rate: Tensor) -> Tensor:
    """Smallest radius at which some class catches up: `min_c lead_c / rate_c`; [N, C] twice → [N].

    A tied class gives 0, even where the attention has no say (rate 0); a class behind that cannot gain never
    catches up.
    """
    moving = rate > 0
    steps = torch.where(moving, lead / torch.where(moving, rate, 1.0), torch.where(lead > 0, torch.inf, 0.0))
    return steps.amin(1)


def probability_change(logits: Tensor, spread: Tensor) -> Tensor:
    """Most the class probabilities can change, in total variation, when logits differences move by `spread`.

    If every difference of two logits moves by at most r, a set of classes with probability s ends with at
    most `s e^r / (1 - s + s e^r)`, so it gains

        F(s) = s (1 - s) (1 - e^-r) / (e^-r + s (1 - e^-r)),

    which is largest at s* = 1 / (1 + e^{r/2}), with F(s*) = tanh(r / 4). No set but the top class and its
    supersets has more than `1 - p_top`, none has less than `p_min`, and beyond s* the smaller of s and 1 - s
    gains more: F at s* clamped to [p_min, 1 - p_top] is the bound. It never exceeds tanh(r / 4), nor
    `1 - p_min`, which holds without knowing anything.

    Args:
        logits: [N, C], C ≥ 2.
        spread: [N], r ≥ 0, infinity allowed.

    Returns:
        float64 [N].

    Example:
        >>> probability_change(torch.tensor([[0.0, 0.0]]), torch.tensor([0.0])).tolist()
        [0.0]
    """
    chances = logits.detach().cpu().double().softmax(1).sort(1).values
    r = spread.double()
    s = torch.sigmoid(-r / 2).maximum(chances[:, 0]).minimum(chances[:, :-1].sum(1))
    gained = -torch.expm1(-r)
    change = s * (1 - s) * gained / (torch.exp(-r) + s * gained)
    # 0/0: a class without any chance cannot be gained from an infinite spread in float64.
    return torch.nan_to_num(change, nan=1.0)


def trivial_change(logits: Tensor) -> Tensor:
    """`1 - min_c p_c`: the most probabilities can change in total variation, whatever happens; [N]."""
    return 1 - logits.detach().cpu().double().softmax(1).amin(1)
