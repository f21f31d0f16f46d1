"""The four properties of a faithful attention as losses, and their weighted sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from fgai.checks import at_least, one_of
from fgai.errors import InputError
from fgai.metrics import NOTHING
from fgai.ops import mean_shift
from fgai.topk import Cut, swap_margin, topk_l1
from fgai.typed import typed

DIVERGENCES = ("log", "relative", "logits", "probabilities", "kl")
TERMS = (
    "closeness",
    "similarity",
    "prediction_stability",
    "explanation_stability",
    "margin",
    "certified",
    "sharpness",
)
LEAD = 0.1
"""By which a class shall lead in the worst case, in units of the vanilla logits' spread."""
NEAR = 0.3
"""How far from it, in the same units, a node still counts as near."""
KEPT = 0.95
"""Share of the vanilla sharpness below which attention counts as flattened."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weight of each term; all terms are of order one at the start of training, whatever the graph.

    Attributes:
        closeness: the faithful model predicts what the vanilla one did.
        similarity: its attention has the vanilla one's top-k.
        prediction_stability: its predictions stay under perturbation.
        explanation_stability: its attention stays under perturbation.
        margin: distance between the top-k of the explanation vector and the rest.
        certified: the class provably stays ahead when every node gains new neighbours, see `_shortfall`.
        sharpness: the attention is no flatter than the vanilla one, see `_flattening`.
    """

    closeness: float = 1.0
    similarity: float = 7.0
    prediction_stability: float = 1.0
    explanation_stability: float = 1.0
    margin: float = 0.1
    certified: float = 0.0
    sharpness: float = 0.0

    def __post_init__(self) -> None:
        for name in TERMS:
            at_least(getattr(self, name), name, 0.0)
        if not any(getattr(self, name) for name in TERMS):
            raise InputError(
                "all weights are zero: there is nothing to train; give at least one a positive value"
            )


def spread(logits: Tensor) -> Tensor:
    """Mean over nodes of `½ Σ_c |y_c − mean_c y|`: the size that makes a change of logits relative."""
    return (logits - logits.mean(1, keepdim=True)).abs().sum(1).mean().clamp(min=1e-12) / 2


@typed
def prediction_distance(
    y: Tensor, other: Tensor, divergence: str, scale: Tensor | float = 1.0, share: float = 1.0
) -> Tensor:
    """The distance D between two predictions, averaged over nodes: total variation.

    Args:
        y: [N, C] logits.
        other: [N, C] logits.
        divergence: `logits`; `relative` (logits, divided by `scale`); `log`, the logarithm of 1 + the
            relative distance per node, which is the same for small changes and keeps a few nodes that were
            thrown far off from drowning everything else; `probabilities` after a softmax; or `kl`, the
            Kullback-Leibler divergence KL(softmax y ‖ softmax other) instead of total variation.
        scale: the spread of the frozen vanilla logits; constant, so shrinking one's own logits does not help.
        share: of the nodes that count; the mean over all nodes is divided by it.
    """
    one_of(divergence, "divergence", DIVERGENCES)
    if divergence == "kl":
        return kl_div(other.log_softmax(1), y.log_softmax(1), reduction="batchmean", log_target=True) / share
    if divergence == "probabilities":
        y, other = y.softmax(1), other.softmax(1)
    size = scale if divergence in ("relative", "log") else 1.0
    return mean_shift(y, other, size, log=divergence == "log", share=share)


def _attention_distance(
    before: Sequence[Tensor],
    after: Sequence[Tensor],
    rowptrs: Sequence[Tensor],
    k: int | None,
    scope: str,
    shares: Sequence[float] | None = None,
    known: Sequence[Tensor | Cut | None] | None = None,
    grown: Tensor | None = None,
    form: str = "tv",
) -> Tensor:
    """The distance L summed over layers: l1 on the top-k of one and on that of the other (see `topk_l1`).

    Args:
        before: per layer [E].
        after: per layer [E], on the same edges (more with `grown`).
        rowptrs: per layer [N + 1].
        k: size of the sets.
        scope: `node` or `graph`.
        shares: per layer, what the mean over nodes is divided by; 1 when None.
        known: per layer, the sets of `before` where they are known already (see `frozen_topk`).
        grown: where the rows of `after` begin, if it has further edges behind those of `before`.
        form: `tv` or `paper`.
    """
    sizes = shares or [1.0] * len(before)
    layers = zip(before, after, rowptrs, known or [None] * len(before), sizes, strict=True)
    terms = [
        topk_l1(a, b, ptr, k, scope, form=form, known=top, factor=1 / size, grown=grown)
        for a, b, ptr, top, size in layers
    ]
    return _weighted_sum(terms, [1.0] * len(terms))


def _weighted_sum(terms: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """`Σ weight · term` of scalars, one GPU kernel a term: no vector of them is made first."""
    total = terms[0] if weights[0] == 1 else weights[0] * terms[0]
    for term, weight in zip(terms[1:], weights[1:], strict=True):
        total = torch.add(total, term, alpha=weight)
    return total


def contrast(w: Tensor, rowptr: Tensor) -> float:
    """How far an attention is from saying nothing: mean over nodes of the total variation to a uniform one.

    Args:
        w: [E] attention, summing to one over each node's edges.
        rowptr: [N + 1].
    """
    degree = rowptr.diff()
    apart = (w - (1.0 / degree.clamp(min=1).to(w.dtype)).repeat_interleave(degree)).abs().sum() / 2
    return max(float(apart / max(1, degree.numel())), 1e-7)


def _margin_loss(values: Sequence[Tensor], rowptrs: Sequence[Tensor], k: int, radius: float) -> Tensor:
    """How far the top-k is from being certified at `radius`, relative to it; 0 when every node is.

        mean over nodes with more than k neighbours and over m of  relu(R − c(m) / m) / R

    summed over layers, with `c(m)` the l1 cost of m swaps. Unlike the literal worst case of L in attention
    space, which has no gradient in the attention (see docs/method.md), this one pulls members and outsiders
    of the top-k apart.

    Args:
        values: per layer [E], the explanation vectors, see `LayerAttention.explanation`.
        rowptrs: per layer [N + 1].
        k: size of the explanation.
        radius: R > 0.
    """
    terms = [swap_margin(w, ptr, k, radius) for w, ptr in zip(values, rowptrs, strict=True)]
    return _weighted_sum(terms, [1.0] * len(terms))


def sharp(w: Tensor, rowptr: Tensor, destination: Tensor) -> Tensor:
    """`fgai.metrics.sharpness` of an attention that sums to one at every node, with a gradient.

    Args:
        w: [E].
        rowptr: [N + 1].
        destination: [E].
    """
    degree = rowptr.diff().to(w.dtype)
    many = degree >= 2
    size = degree.clamp(min=2)
    apart = w * (w.clamp(min=torch.finfo(w.dtype).tiny) * size[destination]).log()
    each = torch.zeros_like(degree).index_add(0, destination, apart) / size.log()
    return torch.where(many, each, 0.0).sum() / many.sum().clamp(min=1)


def _flattening(now: Sequence[Tensor], before: Sequence[float]) -> Tensor:
    """Σ over layers of `relu(0.95 − sharpness / vanilla sharpness)`; 0 where no layer is flatter.

    Layers that are flat in the vanilla model (sharpness up to 1e-6) do not count: what they rank is rounding,
    and to ask for its share would be to ask for something made up.

    Args:
        now: sharpness per layer.
        before: the vanilla model's.
    """
    terms = [
        (KEPT - value / old).clamp(min=0) if old > NOTHING else value * 0
        for value, old in zip(now, before, strict=True)
    ]
    return _weighted_sum(terms, [1.0] * len(terms))


def _shortfall(leads: Tensor, scale: float) -> Tensor:
    """How far classes are from a certificate: mean over nodes of `sigmoid((0.1 − least lead / scale) / 0.3)`.

    A smooth count of the nodes without one: those that no training can certify, and those that lead by far,
    pull little; those that are near pull most.

    Args:
        leads: [N, C] least leads over every other class, see `fgai.bounds.worst_leads`.
        scale: spread of the vanilla logits.
    """
    return torch.sigmoid((LEAD - leads.amin(1) / scale) / NEAR).mean()
