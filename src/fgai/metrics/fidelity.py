"""Fidelity of explanations, after GraphFramEx (Amara et al., 2022), from predictions alone.

As in PyG's `explain.metric`, but from class predictions instead of an explainer, so that it serves any way of
masking; with an empty or a perfect side the characterization score is its limit, not NaN.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fgai import checks
from fgai.attention import Observation
from fgai.errors import InputError
from fgai.metrics.common import _check_labels, _classes_of
from fgai.metrics.removal import _edge_ranking, _predict_without
from fgai.metrics.spec import Shown, metric
from fgai.metrics.views import Views
from fgai.topk import topk_mask
from fgai.typed import typed


def _fidelity(views: Views) -> dict[str, Any]:
    """Both fidelities and their characterization, clean and attacked."""
    if views.model is None or views.target is None:
        return {}
    return {
        "fidelity": {
            name: _fidelity_of_top(views.model, views.observations[name], views.rows, views.k)
            for name in ("clean", "attacked")
        }
    }


def _fidelity_of_top(model: nn.Module, observed: Observation, nodes: Tensor, k: int) -> dict[str, float]:
    """Fidelity of the top-k neighbours of every node, by the mean attention over layers; loops are kept.

    Args:
        model: to run.
        observed: on the graph to explain.
        nodes: [T] the rows of the logits that count.
        k: neighbours per explanation.

    Returns:
        `plus`, `minus` and `characterization`.
    """
    scored = _edge_ranking(observed.attention, "node")
    loops = scored.source == scored.destination
    top = topk_mask(scored.values[:, 0].masked_fill(loops, float("-inf")), scored.rowptr, k) & ~loops
    rest = ~top & ~loops
    whole = observed.logits[nodes]
    plus = fidelity_plus(whole, _predict_without(model, observed, scored.keys[top])[nodes])
    minus = fidelity_minus(whole, _predict_without(model, observed, scored.keys[rest])[nodes])
    return {"plus": plus, "minus": minus, "characterization": characterization(plus, minus)}


@metric(
    direction="higher",
    title="fidelity+",
    paths=("fidelity.*.plus",),
    section="fidelity",
    shown=(),
    measure=_fidelity,
)
@typed
def fidelity_plus(prediction: Tensor, without: Tensor, target: Tensor | None = None) -> float:
    """How often the prediction changes when the explanation is taken away.

        model       1 - mean 1(ŷ_without = ŷ)
        phenomenon  mean |1(ŷ = y) - 1(ŷ_without = y)|

    Args:
        prediction: ŷ, logits [N, C] or class indices [N] on the whole graph.
        without: the same with the explanatory edges removed.
        target: y, class indices [N], for the phenomenon form; None for the model form.

    Returns:
        In [0, 1]; high if the explanation is necessary. NaN without nodes.

    Example:
        >>> import torch
        >>> fidelity_plus(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 2, 0, 2]))
        0.5
    """
    return _changed(prediction, without, target)


@metric(
    direction="lower",
    title="fidelity−",
    paths=("fidelity.*.minus",),
    section="fidelity",
    shown=(),
    measure=_fidelity,
)
@typed
def fidelity_minus(prediction: Tensor, only: Tensor, target: Tensor | None = None) -> float:
    """How often the prediction changes when only the explanation is left.

    Arguments as in `fidelity_plus`, `only` predicted with nothing but the explanatory edges.

    Returns:
        In [0, 1]; low if the explanation is sufficient. NaN without nodes.

    Example:
        >>> import torch
        >>> fidelity_minus(torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 1, 0]))
        0.25
    """
    return _changed(prediction, only, target)


@metric(
    direction="higher",
    parameters=("weight",),
    paths=("fidelity.*.characterization",),
    section="fidelity",
    shown=(
        Shown(
            "fidelity.clean.characterization",
            words="Characterization of the top-k",
            about="Fidelity: are the strongest neighbours needed, and are they enough?",
            table="",
        ),
    ),
    measure=_fidelity,
)
@typed
def characterization(plus: float, minus: float, weight: float = 0.5) -> float:
    """Weighted harmonic mean of fidelity+ and 1 - fidelity-.

        1 / (weight / fid+ + (1 - weight) / (1 - fid-))

    Args:
        plus: fidelity+, in [0, 1].
        minus: fidelity-, in [0, 1].
        weight: of fidelity+, strictly between 0 and 1.

    Returns:
        In [0, 1]; 0 as soon as either side is worthless.

    Example:
        >>> characterization(0.5, 0.5)
        0.5
    """
    for name, share in (("plus", plus), ("minus", minus)):
        if not 0 <= checks.number(share, name) <= 1:
            raise InputError(f"`{name}` must be between 0 and 1, got {share!r}")
    checks.above(weight, "weight", 0)
    checks.above(1 - weight, "1 - weight", 0)
    if plus == 0 or minus == 1:
        return 0.0
    return 1 / (weight / plus + (1 - weight) / (1 - minus))


def _changed(prediction: Tensor, masked: Tensor, target: Tensor | None) -> float:
    before, after = _classes_of(prediction), _classes_of(masked)
    if before.shape != after.shape:
        raise InputError(
            f"both predictions must cover the same nodes, got {tuple(before.shape)} and {tuple(after.shape)}"
        )
    if target is None:
        return float((before != after).double().mean())
    _check_labels(target, tuple(before.shape))
    return float(((before == target) != (after == target)).double().mean())
