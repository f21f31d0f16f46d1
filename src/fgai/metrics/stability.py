"""How far predictions and attention moved on original nodes and edges: g-TVD and g-JSD, in float64."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fgai import checks
from fgai.divergence import same_shape, tvd
from fgai.metrics.common import _matched_classes
from fgai.metrics.spec import Shown, metric
from fgai.metrics.views import AttentionPair, Views


def _output_changes(views: Views) -> dict[str, Any]:
    before = views.logits["clean"][views.measured]
    out: dict[str, Any] = {}
    for attack, attacked in views.attacks.items():
        after = attacked.worst.output.logits[views.measured]
        out["g_tvd" if attack == "prediction" else f"g_tvd_{attack}"] = {
            "logits": g_tvd(before, after),
            "probs": g_tvd_prob(before, after),
            "rel": g_tvd_rel(before, after),
        }
    return out


def _attention_change(views: Views) -> dict[str, Any]:
    if views.null == "random":
        return {}  # its scores are no distribution

    def change(pair: AttentionPair) -> dict[str, Any]:
        return views.by_layer([g_jsd(p.before, p.after) for p in pair.layers])

    out: dict[str, Any] = {
        "g_jsd" if attack == "prediction" else f"g_jsd_{attack}": change(attacked.worst.pair)
        for attack, attacked in views.attacks.items()
    }
    if views.similarity is not None and not views.null:
        out["similarity"] = {"g_jsd": change(views.similarity)}
    return out


def _class_changes(views: Views) -> dict[str, float]:
    before = views.logits["clean"][views.rows]
    attacked = {name: logits for name, logits in views.logits.items() if name != "clean"}
    return {name: changed_share(before, logits[views.rows]) for name, logits in attacked.items()}


_output_metric = partial(metric, direction="lower", measure=_output_changes)


@_output_metric(
    high=math.inf,
    title="g-TVD rel",
    form=".2e",
    paths=("g_tvd.rel", "g_tvd_explanation.rel"),
    shown=(
        Shown(
            "g_tvd.rel",
            words="Change of logits, relative (g-TVD)",
            about="How far the outputs move under attack, as a share of their own spread.",
        ),
    ),
)
def g_tvd_rel(y: Tensor, y_other: Tensor) -> float:
    """Change of the logits relative to their spread: `sum |y - y'| / sum |y - mean_c y|`.

    Scale-free. Where every node had equal logits before: 0 if nothing moved, else infinite.
    """
    y, y_other = _finite(y, y_other)
    change, spread = float((y - y_other).abs().sum()), float((y - y.mean(-1, keepdim=True)).abs().sum())
    return change / spread if spread else math.inf if change else 0.0


@_output_metric(
    title="g-TVD probs",
    form=".2e",
    paths=("g_tvd.probs", "g_tvd_explanation.probs"),
    shown=(
        Shown(
            "g_tvd.probs",
            words="Change of probabilities (g-TVD)",
            about="Probability that changes hands between classes, averaged over nodes.",
        ),
    ),
)
def g_tvd_prob(y: Tensor, y_other: Tensor) -> float:
    """Total variation of the class probabilities, per node: `1/(2|N|) sum |softmax(y) - softmax(y')|`."""
    change = tvd(*_finite(y, y_other), "probabilities")
    return float(change.sum() / max(1, change.numel()))


@_output_metric(
    high=math.inf,
    title="g-TVD logits",
    form=".2f",
    paths=("g_tvd.logits", "g_tvd_explanation.logits"),
    shown=(),
)
def g_tvd(y: Tensor, y_other: Tensor) -> float:
    """Total variation of the logits, per node: `1/(2|N|) sum |y - y'|`.

    Not scale-free: halving all logits halves it. `g_tvd_rel` is.
    """
    change = tvd(*_finite(y, y_other))
    return float(change.sum() / max(1, change.numel()))


@metric(
    direction="lower",
    high=math.log(2) / 2,
    title="g-JSD",
    form=".2e",
    paths=("g_jsd", "g_jsd_explanation", "similarity.g_jsd"),
    section="explanation",
    shown=(
        Shown(
            "g_jsd.last",
            words="Change of attention, last layer (g-JSD)",
            about="How far the output layer's attention moves under attack, per edge, as in the paper.",
            table="prediction",
        ),
        Shown(
            "g_jsd.all",
            words="Change of attention, all layers (g-JSD)",
            about="The same over all layers.",
            table="prediction",
        ),
    ),
    measure=_attention_change,
    null=_attention_change,
)
def g_jsd(w: Tensor, w_other: Tensor) -> float:
    """Jensen-Shannon divergence of attention per edge: `1/(2|E|) (KL(w‖m) + KL(w'‖m))`, `m = (w + w')/2`.

    In nats, the sums over all edges at once; 0 exactly when nothing changed.
    """
    w, w_other = _finite(w, w_other, "w")
    # With d = (w - w')/(w + w') an edge adds m φ(d), φ(d) = (1+d) log(1+d) + (1-d) log(1-d). For small d,
    # where stable attention lives, nothing cancels in the form φ(d) = 2 d atanh(d) + log(1 - d²).
    total = w + w_other
    d = torch.where(total > 0, (w - w_other) / torch.where(total > 0, total, 1.0), 0.0)
    wide, one_sided = d.abs() > 0.5, d.abs() > 1 - torch.finfo(d.dtype).eps
    near, far = torch.where(wide, 0.0, d), torch.where(wide & ~one_sided, d, 0.0)
    small = 2 * near * torch.atanh(near) + torch.log1p(-near.square())
    large = (1 + far) * torch.log1p(far) + (1 - far) * torch.log1p(-far)
    phi = torch.where(one_sided, 2 * math.log(2), torch.where(wide, large, small))
    return float((total / 2 * phi).sum() / (2 * max(1, w.shape[0])))


@metric(direction="lower", title="changed predictions", paths=("changed",), measure=_class_changes)
def changed_share(before: Tensor, after: Tensor) -> float:
    """Share of nodes whose predicted class is another one, whatever the true one is.

    Both are logits [N, C] or class indices [N], of the same nodes. NaN without nodes.
    """
    one, two = _matched_classes(before, after)
    return float((one != two).double().mean())


def _finite(one: Tensor, two: Tensor, name: str = "y") -> tuple[Tensor, Tensor]:
    """Both in float64 and without history, if they have one shape and finite entries."""
    first = checks.finite(one, name).detach().double()
    second = checks.finite(two, f"{name}_other").detach().double()
    same_shape(first, second)
    return first, second
