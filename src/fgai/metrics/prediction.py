"""How well a model predicts: accuracy, recall and F1 of classes, ROC-AUC and average precision of scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import InputError
from fgai.metrics.declared import ENDS
from fgai.metrics.given import check_labels
from fgai.metrics.spec import metric
from fgai.metrics.views import Views
from fgai.tasks import task_of
from fgai.typed import typed

AVERAGES = ("micro", "macro")
MOST_CLASSES = 10_000_000
"""Classes that are counted one by one."""


def _by_endpoints(path: str, title: str) -> dict[str, str]:
    """Headings of a score under attacks whose new nodes are joined at random, and where it hurts most."""
    return {f"{path}.attacked_{ends}": f"{title} {ends} ends" for ends in ENDS}


def classes_of(prediction: Tensor) -> Tensor:
    """Class indices [N], from logits or probabilities [N, C] (largest, first on ties) or as they are."""
    checks.dense(prediction, "prediction")
    if prediction.dim() == 2 and prediction.shape[1]:
        return checks.finite(prediction, "prediction").argmax(1)
    if prediction.dim() != 1 or prediction.is_floating_point():
        raise InputError(
            "`prediction` must be logits [num_nodes, num_classes] or class indices [num_nodes],"
            f" got {prediction.dtype} {tuple(prediction.shape)}"
        )
    return prediction.long()


@metric(
    direction="higher",
    low=0,
    high=1,
    paths=("accuracy.*",),
    headings=_by_endpoints("accuracy", "accuracy"),
)
@typed
def accuracy(prediction: Tensor, target: Tensor) -> float:
    """Share of nodes whose predicted class is the true one.

    Args:
        prediction: logits [N, C], or class indices [N].
        target: class indices [N]; -1 marks an unknown class, which is left out.

    Returns:
        In [0, 1]; NaN if no class is known.

    Example:
        >>> accuracy(torch.tensor([0, 1, 1]), torch.tensor([0, 1, -1]))
        1.0
    """
    guess, truth = _known(prediction, target)
    return float((guess == truth).double().mean())


@metric(
    direction="higher",
    low=0,
    high=1,
    parameters=("average",),
    title="F1",
    paths=("f1.*",),
    headings=_by_endpoints("f1", "F1"),
)
@typed
def f1(prediction: Tensor, target: Tensor, average: str = "micro") -> float:
    """F1 score of a classification with one class a node.

        micro  2 TP / (2 TP + FP + FN) over all classes together, which is the accuracy
        macro  the mean over classes of that ratio, over the classes that occur in either argument

    Args:
        prediction: logits [N, C], or class indices [N].
        target: class indices [N]; -1 is left out.
        average: "micro" or "macro".

    Returns:
        In [0, 1]; NaN if no class is known.

    Example:
        >>> f1(torch.tensor([0, 1, 1, 1]), torch.tensor([0, 0, 1, 1]))
        0.75
    """
    if checks.one_of(average, "average", AVERAGES) == "micro":
        return accuracy(prediction, target)
    guess, truth = _known(prediction, target)
    if not truth.numel():
        return float("nan")
    classes, label = torch.unique(torch.cat([guess, truth]), return_inverse=True)
    seen = torch.bincount(label, minlength=len(classes))
    hit = torch.bincount(label[: len(guess)][guess == truth], minlength=len(classes))
    return float((2 * hit.double() / seen).mean())


@metric(
    direction="higher",
    low=0,
    high=1,
    title="macro-F1",
    paths=("macro_f1.*",),
)
@typed
def macro_f1(prediction: Tensor, target: Tensor) -> float:
    """Mean of the F1 scores of the classes, see `f1`: rare classes count as much as frequent ones.

    Args:
        prediction: logits [N, C], or class indices [N].
        target: class indices [N]; -1 is left out.

    Returns:
        In [0, 1]; NaN if no class is known.

    Example:
        >>> macro_f1(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 0, 1]))
        0.42857142857142855
    """
    return f1(prediction, target, "macro")


@metric(
    direction="higher",
    low=0,
    high=1,
    title="balanced accuracy",
    paths=("balanced_accuracy.*",),
    headings=_by_endpoints("balanced_accuracy", "balanced accuracy"),
)
@typed
def balanced_accuracy(prediction: Tensor, target: Tensor) -> float:
    """Mean of the recalls of the classes that occur in `target`: 1/C for a model that names one class of C.

    Args:
        prediction: logits [N, C], or class indices [N].
        target: class indices [N]; -1 is left out.

    Returns:
        In [0, 1]; NaN if no class is known.

    Example:
        >>> balanced_accuracy(torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 0, 1]))
        0.5
    """
    return float(recall(prediction, target).nanmean())


def _recalls(views: Views) -> dict[str, Any]:
    """Recall by view, and how many scored rows each class has; nothing for links, which are ranked."""
    if views.target is None or task_of(views.graph).needs_links:
        return {}
    truth = views.target[views.rows]
    found: dict[str, Any] = {
        name: recall(logits[views.rows], truth).tolist() for name, logits in views.logits.items()
    }
    classes = views.logits["clean"].shape[1]
    return {**found, "support": torch.bincount(truth[truth >= 0], minlength=classes).tolist()}


@metric(direction="higher", low=0, high=1, paths=("recall",), measure=_recalls)
@typed
def recall(prediction: Tensor, target: Tensor) -> Tensor:
    """Share of the nodes of each class that are predicted as such.

    Args:
        prediction: logits [N, C], or class indices [N].
        target: class indices [N]; -1 is left out.

    Returns:
        [C] in [0, 1]; NaN for a class without nodes. Without logits C is the largest class plus one.

    Example:
        >>> recall(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 1]))
        tensor([0.6667, 1.0000], dtype=torch.float64)
    """
    guess, truth = _known(prediction, target)
    classes = prediction.shape[1] if prediction.dim() == 2 else 0
    if truth.numel() and int(truth.max()) >= MOST_CLASSES:
        raise InputError(f"`target` must hold classes below {MOST_CLASSES}, got {int(truth.max())}")
    total = torch.bincount(truth, minlength=classes).double()
    return torch.bincount(truth[guess == truth], minlength=len(total)) / total


def _changes(views: Views) -> dict[str, float]:
    """Share of the scored rows that an attack gives another class, by view."""
    before = views.logits["clean"][views.rows]
    attacked = {name: logits for name, logits in views.logits.items() if name != "clean"}
    return {name: changed_share(before, logits[views.rows]) for name, logits in attacked.items()}


@metric(
    direction="lower",
    low=0,
    high=1,
    title="changed predictions",
    paths=("changed",),
    measure=_changes,
)
@typed
def changed_share(before: Tensor, after: Tensor) -> float:
    """Share of nodes whose predicted class is another one, whatever the true one is.

    Args:
        before: logits [N, C], or class indices [N].
        after: likewise, of the same nodes.

    Returns:
        In [0, 1]; NaN without nodes.

    Example:
        >>> changed_share(torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 0, 0]))
        0.25
    """
    one, two = classes_of(before), classes_of(after)
    if one.shape != two.shape:
        got = f"{tuple(one.shape)} and {tuple(two.shape)}"
        raise InputError(f"`before` and `after` must cover the same nodes, got {got}")
    return float((one != two).double().mean())


@metric(
    direction="higher",
    low=0,
    high=1,
    title="AUC",
    paths=("roc_auc.*",),
    headings=_by_endpoints("roc_auc", "AUC"),
)
@typed
def roc_auc(score: Tensor, target: Tensor) -> float:
    """Area under the ROC curve: the chance that a positive outranks a negative.

        AUC = P(s+ > s-) + 1/2 P(s+ = s-) = (sum of the positives' mid-ranks - n+(n+ + 1)/2) / (n+ n-)

    Args:
        score: [M], larger for more likely positive.
        target: bool or 0/1 [M].

    Returns:
        In [0, 1]; 0.5 for equal scores, NaN if one of the two kinds is missing.

    Example:
        >>> roc_auc(torch.tensor([0.9, 0.4, 0.4, 0.1]), torch.tensor([1, 1, 0, 0]))
        0.875
    """
    score, positive = _scored(score, target)
    _, group, count = torch.unique(score, return_inverse=True, return_counts=True)
    rank = (count.cumsum(0).double() - (count.double() - 1) / 2)[group]
    return auc_from_ranks(rank[positive].sum(), positive.sum(), (~positive).sum()).item()


@metric(direction="higher", low=0, high=1, title="AP", paths=("average_precision.*",))
@typed
def average_precision(score: Tensor, target: Tensor) -> float:
    """Average precision: the precision at every threshold, weighted by the recall gained there.

        AP = sum_n (R_n - R_{n-1}) P_n over distinct scores, from the largest down

    Args:
        score: [M].
        target: bool or 0/1 [M].

    Returns:
        In [0, 1]; for equal scores the share of positives, NaN without positives.

    Example:
        >>> average_precision(torch.tensor([0.9, 0.4, 0.4, 0.1]), torch.tensor([1, 1, 0, 0]))
        0.8333333333333333
    """
    score, positive = _scored(score, target)
    if not bool(positive.any()):
        return float("nan")
    levels, group = torch.unique(score, return_inverse=True)
    found = torch.bincount(group[positive], minlength=levels.numel()).flip(0).double()
    listed = torch.bincount(group, minlength=levels.numel()).flip(0).double()
    precision = found.cumsum(0) / listed.cumsum(0)
    return float((precision * found).sum() / found.sum())


def auc_from_ranks(rank_sum: Tensor, positives: Tensor, negatives: Tensor) -> Tensor:
    """ROC-AUC from the sum of the positives' mid-ranks (from 1 up); NaN where one kind is missing."""
    n, m = positives.double(), negatives.double()
    return (rank_sum - n * (n + 1) / 2) / (n * m)


def _known(prediction: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    guess = classes_of(prediction)
    check_labels(target, tuple(guess.shape))
    known = target >= 0
    return guess[known], target[known].long()


def _scored(score: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    if score.shape != target.shape or score.dim() != 1:
        raise InputError(
            f"`score` and `target` must be [M] alike, got {tuple(score.shape)} and {tuple(target.shape)}"
        )
    return checks.finite(score.detach().double(), "score"), target.bool()
