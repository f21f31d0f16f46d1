"""The scores of a task, from logits and labels: the functions behind the names that tasks declare."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fgai.checks import one_of
from fgai.errors import InputError
from fgai.metrics.given import check_labels
from fgai.metrics.prediction import average_precision, roc_auc
from fgai.metrics.spec import METRICS
from fgai.tasks import get_task
from fgai.typed import typed


@typed
def task_scores(task: str, logits: Tensor, target: Tensor) -> dict[str, float]:
    """Return the scores of a task by name.

        node   micro-F1, balanced accuracy, macro-F1
        link   ROC-AUC and average precision of the link's logit minus the other
        graph  accuracy, and ROC-AUC (two classes: of the second; more: mean of one against the rest)

    Args:
        task: its name, e.g. `node`, `link` or `graph`; see `fgai.tasks.Task.scores`.
        logits: [T, C].
        target: [T] classes; -1 is left out.

    Returns:
        Scores in [0, 1]; NaN where undefined.

    Example:
        >>> import torch
        >>> logits = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
        >>> task_scores("link", logits, torch.tensor([1, 0, 0]))["roc_auc"]
        0.5
    """
    if logits.dim() != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
        got = f"{logits.dtype} {tuple(logits.shape)}"
        raise InputError(f"`logits` must be floating-point of shape [rows, classes], got {got}")
    check_labels(target, tuple(logits.shape[:1]))
    known = target >= 0
    logits, target = logits[known], target[known]
    return {name: _function(score)(logits, target) for name, score in get_task(task).scores.items()}


@typed
def chance_score(name: str, target: Tensor) -> float:
    """What a score is without looking: the share of the most frequent class for F1 and accuracy.

    0.5 for ROC-AUC, one over the number of classes for balanced accuracy.

    Args:
        name: of the score, e.g. `f1`, `balanced_accuracy` or `roc_auc`.
        target: [T] classes; -1 is left out.

    Returns:
        In [0, 1]; NaN without any known class, and for macro-F1.

    Example:
        >>> import torch
        >>> chance_score("f1", torch.tensor([2, 2, 0, -1]))
        0.6666666666666666
    """
    check_labels(target, tuple(target.shape))
    known = target[target >= 0]
    if not known.numel():
        return float("nan")
    counts = torch.unique(known, return_counts=True)[1]
    levels = {"roc_auc": 0.5, "balanced_accuracy": 1 / len(counts), "macro_f1": float("nan")}
    return levels.get(name, float(counts.max()) / known.numel())


@typed
def error_weights(score: str, target: Tensor) -> Tensor | None:
    """What a wrong prediction costs of a score, row by row; None where all rows cost the same.

    For balanced accuracy a row of a class with n of the rows costs 1 / (n · classes), so that the weights of
    the wrong rows sum to one minus the score.

    Args:
        score: name of a metric, as in `fgai.tasks.Task.scores`.
        target: [T] classes, all known.

    Returns:
        [T] float32, or None.

    Example:
        >>> import torch
        >>> error_weights("balanced_accuracy", torch.tensor([0, 0, 1]))
        tensor([0.2500, 0.2500, 0.5000])
    """
    if score != "balanced_accuracy":
        return None
    counts = torch.bincount(target)
    return 1 / (counts[target] * (counts > 0).sum())


def link_auc(logits: Tensor, target: Tensor) -> float:
    """ROC-AUC of the second class's logit minus the first's."""
    return roc_auc(logits[:, 1] - logits[:, 0], target)


def link_precision(logits: Tensor, target: Tensor) -> float:
    """Average precision of the second class's logit minus the first's."""
    return average_precision(logits[:, 1] - logits[:, 0], target)


def class_auc(logits: Tensor, target: Tensor) -> float:
    """ROC-AUC of classes: of the second of two, or the mean of each against the rest, where defined."""
    chance = logits.softmax(1)
    if logits.shape[1] == 2:
        return roc_auc(chance[:, 1], target == 1)
    values = [roc_auc(chance[:, c], target == c) for c in range(logits.shape[1])]
    defined = [value for value in values if value == value]
    return sum(defined) / len(defined) if defined else float("nan")


LOGIT_SCORES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "class_auc": class_auc,
    "link_auc": link_auc,
    "link_precision": link_precision,
}
"""Metrics of ranked values, read from logits."""


def _function(score: str) -> Callable[[Tensor, Tensor], float]:
    """A metric of logits [T, C] and known classes [T] by the name a task gives it."""
    known = {**{name: spec.function for name, spec in METRICS.items()}, **LOGIT_SCORES}
    return known[one_of(score, "score", tuple(known))]
