"""Fidelity of explanations, after GraphFramEx (Amara et al., 2022), from predictions alone.

As in PyG's `explain.metric`, but from class predictions instead of an explainer, so that it serves any way of
masking; with an empty or a perfect side the characterization score is its limit, not NaN.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fgai import checks
from fgai.attention import Observation
from fgai.metrics.common import _check_labels, _matched_classes
from fgai.metrics.removal import _edge_ranking, _predict_without
from fgai.metrics.spec import Shown, metric
from fgai.metrics.views import Views
from fgai.topk import topk_mask
from fgai.typed import typed


def _fidelity(views: Views) -> dict[str, Any]:
    """Both fidelities of the top-k and their characterization, clean and attacked."""
    if views.model is None or views.target is None:
        return {}
    seen = {name: views.observations[name] for name in ("clean", "attacked")}
    fidelities = {n: _fidelity_of_top(views.model, view, views.rows, views.k) for n, view in seen.items()}
    return {"fidelity": fidelities}


def _fidelity_of_top(model: nn.Module, observed: Observation, nodes: Tensor, k: int) -> dict[str, float]:
    """Fidelity of the top-k neighbours at rows [T], by the mean attention over layers; loops are kept."""
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
    """How often the prediction changes when the explanation is taken away: high if it is necessary.

        model       1 - mean 1(ŷ_without = ŷ)
        phenomenon  mean |1(ŷ = y) - 1(ŷ_without = y)|

    NaN without nodes.

    Args:
        prediction: ŷ, logits [N, C] or class indices [N] on the whole graph.
        without: the same with the explanatory edges removed.
        target: y, class indices [N], for the phenomenon form; None for the model form.

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
    """How often the prediction changes when only the explanation is left: low if it is sufficient.

    Arguments as in `fidelity_plus`, `only` predicted with nothing but the explanatory edges.

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
    """Weighted harmonic mean of fidelity+ and 1 - fidelity-; 0 as soon as either side is worthless.

        1 / (weight / fid+ + (1 - weight) / (1 - fid-))

    Args:
        plus: fidelity+, in [0, 1].
        minus: fidelity-, in [0, 1].
        weight: of fidelity+, strictly between 0 and 1.

    Example:
        >>> characterization(0.5, 0.5)
        0.5
    """
    checks.fraction(plus, "plus")
    checks.fraction(minus, "minus")
    checks.above(weight, "weight", 0)
    checks.above(1 - weight, "1 - weight", 0)
    if plus == 0 or minus == 1:
        return 0.0
    return 1 / (weight / plus + (1 - weight) / (1 - minus))


def _changed(prediction: Tensor, masked: Tensor, target: Tensor | None) -> float:
    before, after = _matched_classes(prediction, masked)
    if target is None:
        return float((before != after).double().mean())
    _check_labels(target, tuple(before.shape))
    return float(((before == target) != (after == target)).double().mean())
