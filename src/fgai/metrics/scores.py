"""The scores of each task, from logits and labels: one place where it is decided what a task is judged by."""

from __future__ import annotations

from torch import Tensor

from fgai.checks import one_of
from fgai.metrics.prediction import accuracy, average_precision, f1, roc_auc

SCORES: dict[str, tuple[str, ...]] = {
    "node": ("f1",),
    "link": ("roc_auc", "average_precision"),
    "graph": ("accuracy", "roc_auc"),
}
"""Names of the scores by task; the first is the headline."""


def task_scores(task: str, logits: Tensor, target: Tensor) -> dict[str, float]:
    """Return the scores of a task by name.

        node   micro-F1
        link   ROC-AUC and average precision of the link's logit minus the other
        graph  accuracy, and ROC-AUC (two classes: of the second; more: mean of one against the rest)

    Args:
        task: `node`, `link` or `graph`.
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
    one_of(task, "task", tuple(SCORES))
    if task == "node":
        return {"f1": f1(logits, target)}
    known = target >= 0
    logits, target = logits[known], target[known]
    if task == "link":
        score = logits[:, 1] - logits[:, 0]
        return {"roc_auc": roc_auc(score, target), "average_precision": average_precision(score, target)}
    return {"accuracy": accuracy(logits, target), "roc_auc": class_auc(logits, target)}


def class_auc(logits: Tensor, target: Tensor) -> float:
    """ROC-AUC of classes: of the second of two, or the mean of each against the rest, where defined."""
    chance = logits.softmax(1)
    if logits.shape[1] == 2:
        return roc_auc(chance[:, 1], target == 1)
    values = [roc_auc(chance[:, c], target == c) for c in range(logits.shape[1])]
    defined = [value for value in values if value == value]
    return sum(defined) / len(defined) if defined else float("nan")
