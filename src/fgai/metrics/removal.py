"""How predictions change without the edges of highest attention: F-slope and fidelity.

F-slope is the slope of the share still right against the fraction of edges taken out of every layer. Fidelity
follows GraphFramEx (Amara et al., 2022) and PyG's `explain.metric`, from class predictions alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fgai import checks
from fgai.attention import AttentionMap, LayerAttention, Observation, observe
from fgai.errors import InputError
from fgai.metrics.common import _classes_of
from fgai.metrics.spec import Shown, _clean_and_attacked, metric
from fgai.metrics.stability import changed_share
from fgai.metrics.views import Views
from fgai.ops.segments import row_index, row_sum
from fgai.progress import current_stage, stage
from fgai.topk import ranks_in_rows, scoped_rows, topk_mask

_SCOPES = ("graph", "node")
FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)

# Shares lie in [0, 1]; the steepest line through six of them is 1, 1, 1, 0, 0, 0 over FRACTIONS.
_STEEPEST = 18 / 7


def _edges_to_remove(
    values: Tensor,
    rowptr: Tensor,
    fraction: float,
    *,
    largest: bool,
    scope: str = "node",
    keep: Tensor | None = None,
) -> Tensor:
    """Return positions of a fraction of the edges not in `keep`, of largest or smallest attention."""
    rows = scoped_rows(rowptr, values.shape[0], scope)
    free = torch.ones_like(values, dtype=torch.bool) if keep is None else ~keep
    ranks = ranks_in_rows((values if largest else -values).masked_fill(~free, float("-inf")), rows)
    # The nearest integer. The small shift makes halves go up where the product falls short, as 0.3 · 5 may.
    count = (row_sum(free, rows).double() * fraction + 0.5 + 1e-9).floor().long()
    return (ranks < count[row_index(rows, values.shape[0])]).nonzero().flatten()


def combined(attention: AttentionMap) -> LayerAttention:
    """Mean of a head-averaged map over its layers, types of edges joined, on the edges all layers have."""
    attention = attention.joined()
    first, *others = attention.layers
    if not all(first.same_edges(layer) for layer in others):
        shared = first.keys
        for layer in others:
            shared = shared[torch.isin(shared, layer.keys)]
        attention = attention.restrict(shared)
    return attention.over_layers("mean")


def _edge_ranking(attention: AttentionMap, scope: str) -> LayerAttention:
    """The heads' geometric mean, by which edges rank: of the last layer in scope `graph`, else of all."""
    shown = attention.heads("log").joined()
    return shown.last if scope == "graph" else combined(shown)


def _predict_without(model: nn.Module, observed: Observation, removed: Tensor) -> Tensor:
    """Logits without the edges of these keys [R] in any layer: w'_ij = w_ij / Σ_{kept m} w_im, 0 of none."""

    def without(index: int, attention: Tensor, source: Tensor, destination: Tensor) -> Tensor:
        layer = observed.attention.layers[index]
        kept = attention * torch.isin(layer.keys, removed, invert=True)[:, None].to(attention.dtype)
        total = row_sum(kept, layer.rowptr)
        return kept / torch.where(total > 0, total, 1.0)[destination]

    return observe(model, observed.graph, perturb=without).logits


def _removal_curves(
    model: nn.Module, observed: Observation, scored: LayerAttention, scope: str, right: Tensor, target: Tensor
) -> dict[str, Any]:
    """Remove edges from the top and from the bottom of a ranking, record the share of `right` still right."""
    count, values, rowptr = target.numel(), scored.values[:, 0], scored.rowptr
    loops = scored.source == scored.destination if scope == "node" else None
    curves: dict[bool, list[float]] = {True: [], False: []}
    for fraction in FRACTIONS:
        current_stage().advance()
        for largest in (True, False):
            gone = _edges_to_remove(values, rowptr, fraction, largest=largest, scope=scope, keep=loops)
            removed = scored.keys[gone]
            logits = _predict_without(model, observed, removed) if gone.numel() else observed.logits
            curves[largest].append(float((_classes_of(logits[:count]) == target)[right].double().mean()))
    plus, minus = f_slope_plus(curves[True]), f_slope_minus(curves[False])
    slopes = {"plus": plus, "minus": minus, "gap": f_slope_gap(minus, plus)}
    return {**slopes, "curve_plus": curves[True], "curve_minus": curves[False]}


def _slopes(views: Views) -> dict[str, Any]:
    if views.model is None or not views.curves or views.target is None:
        return {}
    target, rows = views.target, views.rows
    right = torch.zeros_like(target, dtype=torch.bool)
    right[rows] = views.logits["clean"][rows].argmax(1) == target[rows]
    observations = [(name, views.observations[name]) for name in ("clean", "attacked")]
    label = "removing edges" + (f" by {views.null} attention" if views.null else "")
    curves: dict[str, Any] = {scope: {} for scope in _SCOPES}
    with stage(label, len(_SCOPES) * len(observations) * len(FRACTIONS)):
        for scope, (name, view) in itertools.product(_SCOPES, observations):
            ranking = _edge_ranking(view.attention, scope)
            curves[scope][name] = _removal_curves(views.model, view, ranking, scope, right, target)
    return {"f_slope": curves}


_slope_metric = partial(
    metric, section="fidelity", low=-_STEEPEST, high=_STEEPEST, measure=_slopes, null=_slopes
)


@_slope_metric(direction="lower", title="f+", paths=("f_slope.*.*.plus", "f_slope.*.*.curve_plus"), shown=())
def f_slope_plus(shares: Sequence[float], fractions: Sequence[float] = FRACTIONS) -> float:
    """Slope of the share still right against the fraction of edges removed from the top of the ranking.

        Σ (r - mean r)(share - mean share) / Σ (r - mean r)², the least-squares line over the fractions r

    Strongly negative if the edges attention points at matter; NaN if a share is. The declared range is for
    the default `fractions`.
    """
    heights = [share if share != share else checks.real_number(share, "shares") for share in shares]
    x = torch.tensor([checks.real_number(one, "fractions") for one in fractions], dtype=torch.float64)
    y = torch.tensor(heights, dtype=torch.float64)
    if x.shape != y.shape or x.numel() < 2 or bool((x == x[0]).all()):
        got = f"{len(y)} shares at {list(fractions)}"
        raise InputError(f"`shares` and `fractions` must be as long and `fractions` must vary, got {got}")
    x = x - x.mean()
    return float((x * (y - y.mean())).sum() / x.square().sum())


@_slope_metric(
    direction="higher", title="f−", paths=("f_slope.*.*.minus", "f_slope.*.*.curve_minus"), shown=()
)
def f_slope_minus(shares: Sequence[float], fractions: Sequence[float] = FRACTIONS) -> float:
    """Slope of the share still right against the fraction of edges removed from the bottom of the ranking.

    Near 0 if edges of low attention do not matter; above 0 the model got better without them: a warning.
    """
    return f_slope_plus(shares, fractions)  # the same formula, of the other curve


@_slope_metric(
    direction="higher",
    low=-2 * _STEEPEST,
    high=2 * _STEEPEST,
    title="F-gap",
    paths=("f_slope.node.*.gap", "f_slope.graph.*.gap"),
    shown=(
        *_clean_and_attacked(
            "f_slope.node.{}.gap",
            "",
            "F-slope gap",
            "How much more removing the strongest edges hurts than removing the weakest.",
        ),
        *_clean_and_attacked(
            "f_slope.graph.{}.gap",
            "whole-graph F-gap",
            "F-slope gap over the whole graph",
            "The paper's way: all edges ranked together by the last layer.",
        ),
    ),
)
def f_slope_gap(minus: float, plus: float) -> float:
    """How much faster predictions fail from the top than from the bottom: `f_slope_minus - f_slope_plus`."""
    return minus - plus


def _fidelity(views: Views) -> dict[str, Any]:
    if views.model is None or not views.curves or views.target is None:
        return {}
    return {
        "fidelity": {
            name: _fidelity_of_top(views.model, views.observations[name], views.rows, views.k)
            for name in ("clean", "attacked")
        }
    }


def _fidelity_of_top(model: nn.Module, observed: Observation, nodes: Tensor, k: int) -> dict[str, float]:
    """Fidelity of the top-k neighbours at rows [T], by the mean attention over layers; loops are kept."""
    scored = _edge_ranking(observed.attention, "node")
    loops = scored.source == scored.destination
    top = topk_mask(scored.values[:, 0].masked_fill(loops, float("-inf")), scored.rowptr, k) & ~loops
    rest = ~top & ~loops
    full = observed.logits[nodes]
    plus = fidelity_plus(full, _predict_without(model, observed, scored.keys[top])[nodes])
    minus = fidelity_minus(full, _predict_without(model, observed, scored.keys[rest])[nodes])
    return {"plus": plus, "minus": minus, "characterization": characterization(plus, minus)}


_fidelity_metric = partial(metric, section="fidelity", measure=_fidelity)


@_fidelity_metric(direction="higher", title="fidelity+", paths=("fidelity.*.plus",), shown=())
def fidelity_plus(prediction: Tensor, without: Tensor) -> float:
    """Share of predictions that change without the explanation: high if it is necessary.

    `1 - mean 1(ŷ_without = ŷ)`, NaN without nodes. Both are logits [N, C] or class indices [N].
    """
    return changed_share(prediction, without)


@_fidelity_metric(direction="lower", title="fidelity−", paths=("fidelity.*.minus",), shown=())
def fidelity_minus(prediction: Tensor, only: Tensor) -> float:
    """Share of predictions that change when only the explanation is left: low if it is sufficient."""
    return changed_share(prediction, only)


@_fidelity_metric(
    direction="higher",
    paths=("fidelity.*.characterization",),
    shown=(
        Shown(
            "fidelity.clean.characterization",
            words="Characterization of the top-k",
            about="Fidelity: are the strongest neighbours needed, and are they enough?",
            table="",
        ),
    ),
)
def characterization(plus: float, minus: float) -> float:
    """Harmonic mean of fidelity+ and 1 - fidelity-, both in [0, 1]; 0 if either is 0."""
    checks.fraction(plus, "plus")
    checks.fraction(minus, "minus")
    if plus == 0 or minus == 1:
        return 0.0
    return 1 / (0.5 / plus + 0.5 / (1 - minus))
