"""Warnings about numbers that may not mean what they seem to; docs/reliability.md explains each code."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai import errors, metrics
from fgai.attacks import AttackResult
from fgai.attention import AttentionMap
from fgai.errors import ReliabilityWarning
from fgai.graph import Graph
from fgai.tasks import task_of

NOISE = 1e-4  # difference of two equal passes, relative to the largest logit, that rounding explains
OUTSIDE = 0.02  # share of values that may lie outside a model's limits, on top of twice the reference share
FLAT = 5e-3  # sharpness below which attention is flat: untrained networks reach as much
WEAK = 5e-2  # sharpness below which two seeds rank neighbours no more alike than chance
TIED = 0.1  # share of the nodes whose top-k is cut within rounding, above which the ranking is tied


def _warn(code: str, message: str) -> None:
    errors.warn(ReliabilityWarning(code, message))


def warning_entries(notes: list[Warning]) -> list[dict[str, str]]:
    """Return code and message of warnings, each once, as records keep them."""
    texts = {(getattr(note, "code", "note"), str(note)) for note in notes}
    return [{"code": code, "message": message} for code, message in sorted(texts)]


def check_split(graph: Graph, targets: str) -> None:
    """Warn if there is no split (`no-split`), or if test nodes are not kept apart (`split-overlap`)."""
    task = task_of(graph)
    if not task.has_part(graph, targets):
        _warn(
            "no-split",
            f"{graph.name!r} has no `{targets}_mask`: all {task.count(graph)} {task.rows_are} are attacked"
            f" and scored, those the model was trained on too; see `{task.split_function}`",
        )
    others = [mask for mask in (graph.train_mask, graph.val_mask) if mask is not None]
    if graph.test_mask is None or not others:
        return
    shared = int((graph.test_mask & torch.stack(others).any(0)).sum())
    if shared:
        _warn("split-overlap", f"{shared} test nodes of {graph.name!r} are training or validation nodes too")


def check_outputs(logits: Tensor, again: Tensor) -> None:
    """Warn if the outputs [N, C] of two equal forward passes differ, or are not logits."""
    noise = (logits - again).abs().max() / logits.abs().max().clamp(min=1e-30)
    from_one = (logits.sum(1) - 1).abs().max()
    from_zero = torch.logsumexp(logits, 1).abs().max()
    if not float(noise) <= NOISE:
        _warn(
            "not-deterministic",
            f"two forward passes in eval mode differ by {noise:.2g} of the largest logit;"
            " all differences under attack contain this noise",
        )
    if float(from_one) <= 1e-3 and float(logits.min()) >= 0:
        _warn("probabilities", "the model returns probabilities, so gradients vanish; return logits")
    elif float(from_zero) <= 1e-3 and float(logits.max()) <= 1e-6:
        text = "the model returns log-probabilities, so g_tvd on logits does not compare; return logits"
        _warn("log-probabilities", text)


def check_range(clipped: int, total: int, reference_share: float) -> None:
    """Warn if limits clip more values than on the graph the limits come from (`out-of-range`)."""
    share = clipped / total if total else 0.0
    if share > 2 * reference_share + OUTSIDE:
        _warn(
            "out-of-range",
            f"{share:.1%} of the nodes' values lie outside the model's limits, {reference_share:.1%} on the"
            " graph the limits come from; measure them on this graph with `fgai.limit`",
        )


def check_score(score: float, chance: float, name: str = "f1") -> None:
    """Warn if the clean score is no better than chance, see `fgai.metrics.chance_score` (`chance-level`)."""
    if chance != chance or score > chance:
        return
    label = {"f1": "F1", "roc_auc": "ROC-AUC"}.get(name, name.replace("_", " "))
    guess = "guessing" if name == "roc_auc" else "always naming the most frequent class"
    _warn("chance-level", f"clean {label} is {score:.3f}; {guess} scores {chance:.3f}")


def check_attention(sharpness: list[float], attention: AttentionMap, k: int) -> None:
    """Warn if attention is flat in every layer (`flat-attention`, `weak-attention`) or cannot be ranked.

    It cannot where no node has more than `k` neighbours (`no-ranked-nodes`), or where rounding cuts the top-k
    of many nodes (`tied-ranking`). `sharpness` is that of each layer, NaN where undefined.
    """
    tops = [metrics.top_share(layer.values[:, 0], layer.rowptr) for layer in attention]
    check_sharpness(sharpness, tops, [metrics.uniform_share(layer.rowptr) for layer in attention])
    if not any(bool((layer.degree > k).any()) for layer in attention):
        _warn("no-ranked-nodes", f"no node has more than k={k} neighbours: overlap is undefined, lower `k`")
        return
    tied = max(metrics.tied_share(layer.heads("log"), layer.rowptr, k) for layer in attention)
    if tied > TIED:
        _warn(
            "tied-ranking",
            f"at {tied:.0%} of the nodes with more than k={k} neighbours rounding decides the top-k: the k-th"
            " and the next attention are equal; choose another `k`",
        )


def check_sharpness(sharpness: list[float], top: list[float], uniform: list[float]) -> None:
    """Warn if attention is flat in every layer, see `fgai.metrics.top_share` and `uniform_share`."""
    most = max((value for value in sharpness if value == value), default=0.0)
    layer = sharpness.index(most) if most in sharpness else 0
    text = (
        f"sharpness at most {most:.2g} of 1: the strongest neighbour gets {top[layer]:.1%} of a node's"
        f" attention, {uniform[layer]:.1%} if all got the same"
    )
    if most < FLAT:
        flat = f"attention is almost uniform ({text}), as in untrained networks"
        _warn("flat-attention", f"{flat}, so its ranking explains nothing")
    elif most < WEAK:
        _warn(
            "weak-attention",
            f"attention hardly prefers one neighbour to another ({text}), so another seed may rank them"
            " otherwise; compare two seeds before you show it",
        )


def check_reach(result: AttackResult, targets: Tensor, before: Tensor, after: Tensor) -> None:
    """Warn if the budget reaches every one of the targets [T], or changes every predicted class [R]."""
    ends, count = result.change.endpoints, targets.numel()
    if ends is not None and torch.unique(ends).numel() >= count:
        _warn("budget-hits-all", f"all {count} attacked nodes have an injected neighbour; lower `edges`")
    if not bool((before == after).any()):
        message = "no attacked node kept its prediction, so the budget does not tell models apart; lower it"
        _warn("all-predictions-changed", message)
