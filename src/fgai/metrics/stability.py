"""How far predictions and attention moved: g-TVD on logits and probabilities, its relative form, g-JSD.

All compare the original nodes and edges before and after, already matched, and compute in float64.
"""

from __future__ import annotations

import math

from torch import Tensor

from fgai import checks, divergence
from fgai.metrics.spec import metric
from fgai.typed import typed


@metric(
    direction="lower",
    low=0,
    high=math.inf,
    title="g-TVD logits",
    form=".2f",
    paths=("g_tvd.logits", "g_tvd_explanation.logits"),
)
@typed
def g_tvd(y: Tensor, y_other: Tensor) -> float:
    """Total variation of the logits, per node: `1/(2|N|) sum |y - y'|`.

    Not scale-free: halving all logits halves it. `g_tvd_rel` is.

    Args:
        y: [N, C], logits before.
        y_other: [N, C], logits after, same nodes.

    Returns:
        At least 0; 0 exactly when nothing changed.

    Example:
        >>> import torch
        >>> g_tvd(torch.tensor([[1.0, 0.0], [2.0, 2.0]]), torch.tensor([[0.5, 1.0], [2.0, 2.0]]))
        0.375
    """
    return divergence.graph_tvd(*_finite(y, y_other)).item()


@metric(
    direction="lower",
    low=0,
    high=1,
    title="g-TVD probs",
    form=".2e",
    paths=("g_tvd.probs", "g_tvd_explanation.probs"),
)
@typed
def g_tvd_prob(y: Tensor, y_other: Tensor) -> float:
    """Total variation of the class probabilities, per node: `1/(2|N|) sum |softmax(y) - softmax(y')|`.

    Args:
        y: [N, C], logits before.
        y_other: [N, C], logits after.

    Returns:
        In [0, 1].

    Example:
        >>> import torch
        >>> g_tvd_prob(torch.tensor([[100.0, 0.0]]), torch.tensor([[0.0, 100.0]]))
        1.0
    """
    return divergence.graph_tvd(*_finite(y, y_other), "probabilities").item()


@metric(
    direction="lower",
    low=0,
    high=math.inf,
    title="g-TVD rel",
    form=".2e",
    paths=("g_tvd.rel", "g_tvd_explanation.rel"),
)
@typed
def g_tvd_rel(y: Tensor, y_other: Tensor) -> float:
    """Change of the logits relative to their spread: `sum |y - y'| / sum |y - mean_c y|`.

    Args:
        y: [N, C], logits before; their spread is the unit.
        y_other: [N, C], logits after.

    Returns:
        At least 0, unchanged when both arguments are multiplied by one factor; infinite if all logits before
        were equal and moved.

    Example:
        >>> import torch
        >>> g_tvd_rel(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 2.0]]))
        0.5
    """
    return divergence.graph_tvd_rel(*_finite(y, y_other)).item()


@metric(
    direction="lower",
    low=0,
    high=math.log(2) / 2,
    title="g-JSD",
    form=".2e",
    paths=("g_jsd", "g_jsd_explanation", "similarity.g_jsd"),
)
@typed
def g_jsd(w: Tensor, w_other: Tensor) -> float:
    """Jensen-Shannon divergence of attention per edge: `1/(2|E|) (KL(w‖m) + KL(w'‖m))`.

    Args:
        w: [E], attention before (heads averaged).
        w_other: [E], attention after, on the same edges in the same order.

    Returns:
        At least 0, in nats; 0 exactly when nothing changed.

    Example:
        >>> import torch
        >>> g_jsd(torch.tensor([0.25, 0.75]), torch.tensor([0.25, 0.75]))
        0.0
    """
    return divergence.graph_jsd(*_finite(w, w_other, "w")).item()


def _finite(one: Tensor, two: Tensor, name: str = "y") -> tuple[Tensor, Tensor]:
    """Both in float64 and without history, if no entry is NaN or infinite."""
    first, second = checks.finite(one, name), checks.finite(two, f"{name}_other")
    return first.detach().double(), second.detach().double()
