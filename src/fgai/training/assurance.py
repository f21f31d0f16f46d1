"""Is a faithful model more stable? A real attack on validation nodes says so, without labels."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from fgai.attacks import make_attack
from fgai.attention import call_model, evaluating
from fgai.divergence import tvd
from fgai.errors import BudgetError, ReliabilityWarning
from fgai.graph import Graph
from fgai.tasks import task_of

MAX_RATIO = 0.5
"""Shift of a faithful model's predictions over that of the vanilla model's, at most."""
MIN_SHIFT = 0.02
"""A vanilla model whose predictions shift less than this needs no model that is more stable."""
MIN_EPOCHS = 100
"""Trainings of fewer epochs are trials and are not judged."""


def prediction_shift(model: nn.Module, graph: Graph, seed: int) -> float | None:
    """How far a `standard` attack on the validation nodes shifts their predictions.

        mean over validation nodes of ½ Σ_c |p_c − p̃_c|

    Args:
        model: fgai's or the user's, on the graph's device.
        graph: prepared for it, with a validation mask.
        seed: of the attack.

    Returns:
        The mean total variation of the class probabilities, or None where nothing can be attacked: another
        task than node classification, no validation nodes or too few of them.
    """
    task = task_of(graph)
    if not task.checks_stability or graph.val_mask is None or graph.features is None:
        return None
    rows = task.rows(graph, "val")
    try:
        attacked = make_attack("standard", targets="val").run(model, graph, seed=seed).graph
    except BudgetError:
        return None
    with evaluating(model), torch.no_grad():
        before, after = (call_model(model, where)[rows] for where in (graph, attacked))
    return float(tvd(before, after, "probabilities").mean())


def is_more_stable(faithful: float | None, vanilla: float | None) -> bool:
    """Whether a prediction shift of `faithful` is clearly below `vanilla`, or nothing can be said."""
    if faithful is None or vanilla is None:
        return True
    return vanilla < MIN_SHIFT or faithful <= MAX_RATIO * vanilla


def warn_unless_more_stable(faithful: float | None, vanilla: float | None) -> None:
    """Warn of a faithful model that is hardly more stable than the vanilla one."""
    if not is_more_stable(faithful, vanilla):
        message = (
            f"under attack on validation nodes the faithful model's predictions shift by {faithful:.3f}"
            f" (total variation), the vanilla model's by {vanilla:.3f}: it is hardly more stable; raise"
            " `prediction_stability` or `epochs`"
        )
        warnings.warn(ReliabilityWarning("not-steadier", message), stacklevel=3)
