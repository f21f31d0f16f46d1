"""How far attention is from uniform, and the share of its strongest edge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fgai.attention import AttentionMap
from fgai.errors import InputError
from fgai.metrics.common import _check_attention, mean_over
from fgai.metrics.spec import Shown, metric
from fgai.metrics.views import Views
from fgai.ops.segments import check_rows, row_index, row_max, row_sum
from fgai.typed import typed

UNIFORM_SHARPNESS = 1e-6
"""Sharpness up to which attention is uniform but for rounding."""


@typed
def sharpness_per_node(w: Tensor, rowptr: Tensor) -> Tensor:
    """`KL(w_i ‖ uniform) / log(degree)` of every node with at least two neighbours, float64 [N]; else NaN.

    Each row is divided by its sum first, which changes nothing for attention. Rows of zeros count as uniform.
    """
    _check_attention(w, rowptr)
    if bool((w < 0).any()):
        raise InputError(f"`w` must not be negative, as attention is not, got {float(w.min())}")
    w = w.detach().double()
    degree = rowptr.diff().double()
    total = row_sum(w, rowptr)
    share = w / torch.where(total > 0, total, 1.0)[row_index(rowptr, w.shape[0])]
    entropy = -row_sum(torch.xlogy(share, share), rowptr)
    sharp = torch.where(total > 0, 1 - entropy / degree.clamp(min=2).log(), 0.0).clamp(0, 1)
    return torch.where(degree >= 2, sharp, float("nan"))


@typed
def sharpness_by_layer(attention: AttentionMap) -> list[float]:
    """Sharpness of every layer of a head-averaged map."""
    return [sharpness(layer.values[:, 0], layer.rowptr) for layer in attention]


def _sharpness(views: Views) -> dict[str, Any]:
    after = [sharpness(p.after, p.rowptr) for p in views.attacks["prediction"].worst.pair.layers]
    values = {"clean": sharpness_by_layer(views.attention["clean"]), "attacked": after}
    if views.vanilla_attention is not None:
        values["vanilla"] = sharpness_by_layer(views.vanilla_attention)
    return {"sharpness": {name: views.by_layer(layers) for name, layers in values.items()}}


def _uniform(views: Views) -> dict[str, Any]:
    """The null row of uniform attention; random scores are no distribution."""
    if views.null == "random":
        return {}
    shares = [uniform_share(layer.rowptr) for layer in views.attention["clean"]]
    return {"sharpness": views.by_layer([0.0] * len(shares)), "top_share": views.by_layer(shares)}


@metric(
    direction="higher",
    paths=("sharpness.*",),
    section="explanation",
    shown=(
        Shown(
            "sharpness.clean.all",
            "sharpness",
            "Sharpness, clean",
            "0: every neighbour gets the same attention, which explains nothing. 1: one gets it all.",
        ),
        Shown(
            "sharpness.attacked.all",
            words="Sharpness, attacked",
            about="The same under attack."
            " Sharper is no better here: attention that fake nodes draw is sharp, too.",
            table="",
            like="sharpness.clean.all",
        ),
    ),
    measure=_sharpness,
    null=_uniform,
)
def sharpness(w: Tensor, rowptr: Tensor, *, nodes: Tensor | None = None) -> float:
    """Mean distance of attention from uniform over nodes with at least two neighbours.

        KL(w_i ‖ uniform) / log(degree_i) = 1 - entropy(w_i) / log(degree_i)

    0: attention is uniform. 1: every node attends to one neighbour only. NaN if no node has two neighbours.

    Example:
        >>> sharpness(torch.tensor([0.5, 0.5, 1.0, 0.0]), torch.tensor([0, 2, 4]))
        0.5
    """
    return mean_over(sharpness_per_node(w, rowptr), nodes)


def _top_shares(views: Views) -> dict[str, Any]:
    pairs = views.attacks["prediction"].worst.pair.layers
    shares = {
        "clean": [top_share(p.before, p.rowptr) for p in pairs],
        "attacked": [top_share(p.after, p.rowptr) for p in pairs],
        "uniform": [uniform_share(p.rowptr) for p in pairs],
    }
    return {"top_share": {name: views.by_layer(values) for name, values in shares.items()}}


@metric(
    direction="higher",
    title="top neighbour's share",
    paths=("top_share.*",),
    section="explanation",
    shown=(
        Shown(
            "top_share.clean.all",
            words="Strongest neighbour's share, clean",
            about="Share of a node's attention that its strongest neighbour gets: sharpness in plain words.",
            table="",
        ),
    ),
    measure=_top_shares,
    null=_uniform,
)
def top_share(w: Tensor, rowptr: Tensor, *, nodes: Tensor | None = None) -> float:
    """Mean share of its attention that a node gives its strongest neighbour: sharpness in plain words.

    Of nodes with at least two neighbours. Rows are divided by their sum; rows of zeros count as uniform.
    """
    check_rows(w, rowptr, "w")
    w, degree = w.detach().double(), rowptr.diff()
    total = row_sum(w, rowptr)
    share = row_max(w, rowptr) / torch.where(total > 0, total, 1.0)
    share = torch.where(total > 0, share, 1 / degree.clamp(min=1))
    return mean_over(torch.where(degree >= 2, share, float("nan")), nodes)


@typed
def uniform_share(rowptr: Tensor) -> float:
    """What `top_share` is for uniform attention: mean of 1/degree of nodes with two or more neighbours."""
    degree = rowptr.diff().double()
    return mean_over(torch.where(degree >= 2, 1 / degree, float("nan")))


@metric(
    direction="",
    high=float("inf"),
    title="sharpest layer",
    form="d",
    paths=("sharpest",),
    section="explanation",
    shown=(),
    measure=lambda views: views.sharpest,
)
def sharpest_layer(sharpness: Sequence[float]) -> int:
    """Index of the layer with the largest sharpness, undefined ones last."""
    if not len(sharpness):
        raise InputError("`sharpness` must hold one value per layer, got none")
    return max(range(len(sharpness)), key=lambda i: sharpness[i] if sharpness[i] == sharpness[i] else -1.0)
