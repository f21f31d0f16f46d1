"""How well a model predicts: accuracy, recall and F1 of classes, ROC-AUC and average precision of scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import InputError
from fgai.metrics.common import _check_labels, _classes_of, mean_of_defined
from fgai.metrics.spec import METRICS, Shown, metric
from fgai.metrics.views import Views
from fgai.tasks import get_task, task_of
from fgai.typed import typed

MOST_CLASSES = 10_000_000
"""`recall` rejects class indices from here on: it counts each class."""


def _shown(
    name: str, words: str, about: str, clean: str = "clean graph", *, ends: bool = False
) -> tuple[Shown, ...]:
    """A score on the clean and on the attacked graph; with `ends` also by the endpoints of the attack."""
    again = "The same on the attacked graph." if clean == "clean graph" else "The same under attack."
    rows = [("clean", clean, about), ("attacked", "prediction attacked", again)]
    if ends:
        rule = (
            "The same where the attack chooses them by rules that read the graph, the reference or the model."
        )
        free = "The same where the attack may not choose its endpoints."
        rows += [
            ("attacked_random", "new nodes joined at random", free),
            ("attacked_chosen", "new nodes joined where it hurts", rule),
        ]
    return tuple(Shown(f"{name}.{view}", words=f"{words}, {row}", about=text) for view, row, text in rows)


def _most_frequent(target: Tensor) -> float:
    return float(torch.unique(target, return_counts=True)[1].max()) / target.numel()


@metric(
    direction="higher",
    title="F1",
    paths=("f1.*",),
    shown=(
        *_shown("f1", "F1", "Share of the tested nodes classified right.", ends=True),
        Shown(
            "f1.attacked_explanation",
            words="F1, explanation attacked",
            about="The same when the attack aims at the explanation instead.",
            table="",
        ),
    ),
    chance=_most_frequent,
)
def f1(prediction: Tensor, target: Tensor) -> float:
    """Micro-F1, `2 TP / (2 TP + FP + FN)` over all classes: the accuracy, where a node has one class."""
    return accuracy(prediction, target)


@metric(
    direction="higher",
    title="balanced accuracy",
    paths=("balanced_accuracy.*",),
    shown=_shown(
        "balanced_accuracy",
        "Balanced accuracy",
        "Mean over classes of the share of their nodes that are found: rare classes count as much.",
        ends=True,
    ),
    chance=lambda target: 1 / len(target.unique()),
)
def balanced_accuracy(prediction: Tensor, target: Tensor) -> float:
    """Mean recall of the classes that occur in `target`: 1/C if one class of C is always predicted."""
    return float(recall(prediction, target).nanmean())


@metric(
    direction="higher",
    title="macro-F1",
    paths=("macro_f1.*",),
    shown=_shown("macro_f1", "Macro-F1", "Mean over classes of their F1."),
    chance=lambda target: float("nan"),
)
def macro_f1(prediction: Tensor, target: Tensor) -> float:
    """Mean of `2 TP / (2 TP + FP + FN)` over the classes that occur in either argument."""
    guess, truth = _labelled(prediction, target)
    if not truth.numel():
        return float("nan")
    classes, label = torch.unique(torch.cat([guess, truth]), return_inverse=True)
    count = torch.bincount(label, minlength=len(classes))
    hit = torch.bincount(label[: len(guess)][guess == truth], minlength=len(classes))
    return float((2 * hit.double() / count).mean())


@metric(
    direction="higher",
    paths=("accuracy.*",),
    shown=_shown(
        "accuracy", "Accuracy", "Share of the tested graphs classified right.", "clean graphs", ends=True
    ),
    chance=_most_frequent,
)
def accuracy(prediction: Tensor, target: Tensor) -> float:
    """Share of nodes whose predicted class is the true one; NaN if no class is known."""
    guess, truth = _labelled(prediction, target)
    return float((guess == truth).double().mean())


@metric(
    direction="higher",
    title="AUC",
    paths=("roc_auc.*",),
    shown=_shown("roc_auc", "ROC-AUC", "Chance that a positive outranks a negative.", ends=True),
    chance=lambda target: 0.5,
)
def roc_auc(score: Tensor, target: Tensor) -> float:
    """Area under the ROC curve: the chance that a positive outranks a negative.

        AUC = P(s+ > s-) + 1/2 P(s+ = s-) = (sum of the positives' mid-ranks - n+(n+ + 1)/2) / (n+ n-)

    0.5 for equal scores, NaN if one of the two kinds is missing. `score` and `target` (bool or 0/1) are [M].

    Example:
        >>> roc_auc(torch.tensor([0.9, 0.4, 0.4, 0.1]), torch.tensor([1, 1, 0, 0]))
        0.875
    """
    score, positive = _scored(score, target)
    _, group, count = torch.unique(score, return_inverse=True, return_counts=True)
    rank = (count.cumsum(0).double() - (count.double() - 1) / 2)[group]
    return _auc_from_ranks(rank[positive].sum(), positive.sum(), (~positive).sum()).item()


@metric(
    direction="higher",
    title="AP",
    paths=("average_precision.*",),
    shown=_shown("average_precision", "Average precision", "Precision over all thresholds."),
    chance=_most_frequent,
)
def average_precision(score: Tensor, target: Tensor) -> float:
    """Average precision: the precision at every threshold, weighted by the recall gained there.

    `sum_n (R_n - R_{n-1}) P_n` over distinct scores, from the largest down. For equal scores the share of
    positives, NaN without positives.
    """
    score, positive = _scored(score, target)
    if not bool(positive.any()):
        return float("nan")
    levels, group = torch.unique(score, return_inverse=True)
    positives = torch.bincount(group[positive], minlength=levels.numel()).flip(0).double()
    listed = torch.bincount(group, minlength=levels.numel()).flip(0).double()
    precision = positives.cumsum(0) / listed.cumsum(0)
    return float((precision * positives).sum() / positives.sum())


def _recalls(views: Views) -> dict[str, Any]:
    """Recall by view, and how many scored rows each class has; nothing for links, which are ranked."""
    if views.target is None or task_of(views.graph).needs_links:
        return {}
    truth = views.target[views.rows]
    recalls: dict[str, Any] = {
        name: recall(logits[views.rows], truth).tolist() for name, logits in views.logits.items()
    }
    classes = views.logits["clean"].shape[1]
    return {**recalls, "support": torch.bincount(truth[truth >= 0], minlength=classes).tolist()}


@metric(direction="higher", paths=("recall",), measure=_recalls)
def recall(prediction: Tensor, target: Tensor) -> Tensor:
    """Share of the nodes of each class that are predicted as such, [C]; NaN for a class without nodes.

    Of class indices [N] in place of logits [N, C], C is the largest class plus one.
    """
    guess, truth = _labelled(prediction, target)
    classes = prediction.shape[1] if prediction.dim() == 2 else 0
    if truth.numel() and int(truth.max()) >= MOST_CLASSES:
        raise InputError(f"`target` must hold classes below {MOST_CLASSES}, got {int(truth.max())}")
    total = torch.bincount(truth, minlength=classes).double()
    return torch.bincount(truth[guess == truth], minlength=len(total)) / total


def _auc_from_ranks(rank_sum: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    """ROC-AUC from the sum of the positives' mid-ranks (from 1 up); NaN where one kind is missing."""
    n, m = positives.double(), negatives.double()
    return (rank_sum - n * (n + 1) / 2) / (n * m)


@typed
def task_scores(task: str, logits: Tensor, target: Tensor) -> dict[str, float]:
    """Return the scores of a task by name, each in [0, 1]; NaN where undefined.

        node   micro-F1, balanced accuracy, macro-F1
        link   ROC-AUC and average precision of the logit of a link minus that of no link
        graph  accuracy, and ROC-AUC (two classes: of the second; more: mean of one against the rest)

    Example:
        >>> logits = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
        >>> task_scores("link", logits, torch.tensor([1, 0, 0]))["roc_auc"]
        0.5
    """
    if logits.dim() != 2 or logits.shape[1] < 2 or not logits.is_floating_point():
        got = f"{logits.dtype} {tuple(logits.shape)}"
        raise InputError(f"`logits` must be floating-point of shape [rows, classes], got {got}")
    _check_labels(target, tuple(logits.shape[:1]))
    labelled = target >= 0
    logits, target = logits[labelled], target[labelled]
    functions = {**{name: spec.function for name, spec in METRICS.items()}, **_LOGIT_SCORES}
    scores = get_task(task).scores.items()
    return {
        name: functions[checks.one_of(one, "score", tuple(functions))](logits, target) for name, one in scores
    }


@typed
def chance_score(name: str, target: Tensor) -> float:
    """Return what guessing scores: the share of the most frequent class for F1 and accuracy.

    0.5 for ROC-AUC, 1 / classes for balanced accuracy; NaN for macro-F1, and without any known class.
    """
    _check_labels(target, tuple(target.shape))
    labels = target[target >= 0]
    if not labels.numel():
        return float("nan")
    spec = METRICS.get(name)
    guessed = None if spec is None or spec.measure is not None else spec.chance
    return (guessed or _most_frequent)(labels)


@typed
def error_weights(score: str, target: Tensor) -> Tensor | None:
    """Return what a wrong prediction of each row costs of a score, [T]; None where all rows cost the same.

    For balanced accuracy a row of a class with n of the rows costs 1 / (n · classes).
    """
    if score != "balanced_accuracy":
        return None
    counts = torch.bincount(target)
    return 1 / (counts[target] * (counts > 0).sum())


@typed
def score_views(views: Views, headline: str) -> dict[str, dict[str, float]]:
    """Return the task's scores by name and view, the headline also by endpoints; empty without labels."""
    task = task_of(views.graph)
    if views.target is None:
        return {name: {} for name in task.scores}
    truth = views.target[views.rows]
    by_view = {n: task_scores(task.name, logits[views.rows], truth) for n, logits in views.logits.items()}
    scores = {name: {view: values[name] for view, values in by_view.items()} for name in task.scores}
    for ends, damage in views.attacks["prediction"].damage.items():
        scores[headline][f"attacked_{ends}"] = 1 - damage
    for name in dict.fromkeys((task.headline, headline)):
        scores[name]["chance"] = chance_score(name, truth)
    return scores


def _class_auc(logits: Tensor, target: Tensor) -> float:
    """ROC-AUC of classes: of the second of two, or the mean of each against the rest, where defined."""
    chance = logits.softmax(1)
    if logits.shape[1] == 2:
        return roc_auc(chance[:, 1], target == 1)
    return mean_of_defined(roc_auc(chance[:, c], target == c) for c in range(logits.shape[1]))


_LOGIT_SCORES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "class_auc": _class_auc,
    "link_auc": lambda logits, target: roc_auc(logits[:, 1] - logits[:, 0], target),
    "link_precision": lambda logits, target: average_precision(logits[:, 1] - logits[:, 0], target),
}
"""Metrics of ranked values, read from logits."""


def _labelled(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    guess = _classes_of(prediction)
    _check_labels(target, tuple(guess.shape))
    labelled = target >= 0
    return guess[labelled], target[labelled].long()


def _scored(score: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    if score.shape != target.shape or score.dim() != 1:
        got = f"{tuple(score.shape)} and {tuple(target.shape)}"
        raise InputError(f"`score` and `target` must be [M] alike, got {got}")
    return checks.finite(score.detach().double(), "score"), target.bool()
