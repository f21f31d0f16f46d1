"""Did the training help? A real attack on validation nodes, before and after, says so without labels."""

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

HELPED = 0.5
"""A twin may move by at most this share of what its parent moves."""
WORTH = 0.02
"""A parent that moves less than this needs no twin that moves less still."""
TRIAL = 100
"""Trainings of fewer epochs are trials and are not judged."""


def moved(model: nn.Module, graph: Graph, seed: int) -> float | None:
    """How far a `standard` attack on the validation nodes moves their predictions.

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
    return float(tvd(before, after, "probs").mean())


def helped(twin: float | None, parent: float | None) -> bool:
    """Whether a twin that moves by `twin` is steadier than its parent, as far as can be told."""
    return twin is None or parent is None or parent < WORTH or twin <= HELPED * parent


def warn_unless_helped(twin: float | None, parent: float | None) -> None:
    """Tell the user of a twin that is hardly steadier than its parent."""
    if not helped(twin, parent):
        message = (
            f"under attack on validation nodes the faithful twin's predictions move by {twin:.3f} (total"
            f" variation), its parent's by {parent:.3f}: the training hardly helped; raise"
            " `prediction_stability` or `epochs`"
        )
        warnings.warn(ReliabilityWarning("not-steadier", message), stacklevel=3)
