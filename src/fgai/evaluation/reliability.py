"""Warnings about numbers that may not mean what they seem to; docs/reliability.md explains each code."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fgai.attacks import AttackResult
from fgai.attention import AttentionMap
from fgai.errors import FgaiWarning, ReliabilityWarning
from fgai.graph import Graph
from fgai.tasks import task_of

NOISE = 1e-4
"""Largest difference of two equal forward passes, relative to the largest logit, that rounding explains."""
FLAT = 1e-3
"""Sharpness of every layer below which attention is called flat."""


def warn(code: str, message: str) -> None:
    """Give a reliability warning."""
    warnings.warn(ReliabilityWarning(code, message), stacklevel=3)


@dataclass
class Notes:
    """What was warned of inside a `collected` block.

    Attributes:
        caught: every warning, fgai's or not.
    """

    caught: list[warnings.WarningMessage] = field(default_factory=list)

    def entries(self) -> list[dict[str, str]]:
        """Return code and message of fgai's warnings, each once, as records keep them."""
        found = {
            (getattr(entry.message, "code", "note"), str(entry.message))
            for entry in self.caught
            if isinstance(entry.message, FgaiWarning)
        }
        return [{"code": code, "message": message} for code, message in sorted(found)]


@contextmanager
def collected() -> Iterator[Notes]:
    """Hold back what is warned of inside the block.

    Yields:
        The notes, filled when the block ends; whoever asked gives the warnings again.
    """
    notes = Notes()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    notes.caught = list(caught)


def check_split(graph: Graph, targets: str) -> None:
    """Warn if there is no split (`no-split`), or if test nodes are not kept apart (`split-overlap`).

    Args:
        graph: with or without masks.
        targets: the part that is scored.
    """
    task = task_of(graph)
    if not task.has_part(graph, targets):
        warn(
            "no-split",
            f"{graph.name!r} has no `{targets}_mask`: all {task.count(graph)} {task.rows_are} are attacked"
            f" and scored, those the model was trained on too; see `{task.split_function}`",
        )
    others = [mask for mask in (graph.train_mask, graph.val_mask) if mask is not None]
    if graph.test_mask is None or not others:
        return
    shared = int((graph.test_mask & torch.stack(others).any(0)).sum())
    if shared:
        warn("split-overlap", f"{shared} test nodes of {graph.name!r} are training or validation nodes too")


def check_outputs(logits: Tensor, again: Tensor) -> None:
    """Warn if two forward passes differ, or if the outputs are not logits.

    Args:
        logits: [N, C] of the first forward.
        again: [N, C] of a second one on the same graph.
    """
    size = logits.abs().max().clamp(min=1e-30)
    difference, sums = (logits - again).abs().max() / size, logits.sum(1)
    near_one = (sums - 1).abs().max()
    normalised = torch.logsumexp(logits, 1).abs().max()
    lowest, highest = logits.min(), logits.max()
    found = torch.stack([difference, near_one, normalised, lowest, highest]).double().tolist()
    if not found[0] <= NOISE:
        warn(
            "not-deterministic",
            f"two forward passes in eval mode differ by {found[0]:.2g} of the largest logit;"
            " every difference below mixes this with the attack",
        )
    if found[1] <= 1e-3 and found[3] >= 0:
        warn("probabilities", "the model returns probabilities where logits are expected: gradients vanish")
    elif found[2] <= 1e-3 and found[4] <= 1e-6:
        warn(
            "log-probabilities",
            "the model returns log-probabilities: g_tvd on logits and g_tvd_rel measure those",
        )


def check_score(score: float, truth: Tensor, name: str = "f1") -> None:
    """Warn if the clean score is no better than naming the most frequent class, or guessing (`chance-level`).

    Args:
        score: the task's headline on the clean graph.
        truth: [T] classes that are scored.
        name: of the score: `f1`, `accuracy` or `roc_auc`.
    """
    if name == "roc_auc":
        if not score > 0.5:
            warn("chance-level", f"clean ROC-AUC is {score:.3f}; guessing scores 0.5")
        return
    known = truth[truth >= 0]
    if not known.numel():
        return
    share = float(torch.bincount(known).max()) / known.numel()
    if not score > share:
        label = "F1" if name == "f1" else name
        warn(
            "chance-level",
            f"clean {label} is {score:.3f}; always naming the most frequent class scores {share:.3f}",
        )


def check_attention(sharpness: list[float], attention: AttentionMap, k: int) -> None:
    """Warn if attention is flat in every layer, or if no node has more than `k` neighbours.

    Args:
        sharpness: of each layer, NaN where undefined.
        attention: on the clean graph.
        k: size of the explanation.
    """
    if not any(value >= FLAT for value in sharpness):
        top = max((value for value in sharpness if value == value), default=0.0)
        warn(
            "flat-attention",
            f"attention is almost uniform (sharpness at most {top:.2g} of 1): it explains nothing",
        )
    if not any(bool((layer.degree > k).any()) for layer in attention):
        warn("no-ranked-nodes", f"no node has more than k={k} neighbours: overlap is undefined, lower `k`")


def check_reach(result: AttackResult, targets: Tensor, before: Tensor, after: Tensor) -> None:
    """Warn if the budget reaches every attacked node, or changes every prediction.

    Args:
        result: of the attack.
        targets: [T] the nodes that could be joined.
        before: [R] predicted classes of what was attacked, on the clean graph.
        after: [R] predicted classes on the attacked graph.
    """
    ends = result.change.endpoints
    if ends is not None and torch.unique(ends).numel() >= targets.numel():
        warn(
            "budget-hits-all", f"every one of the {targets.numel()} attacked nodes got an injected neighbour"
        )
    if not bool((before == after).any()):
        warn(
            "all-predictions-changed",
            "no attacked node kept its prediction: the budget cannot tell models apart",
        )
