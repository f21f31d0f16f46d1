"""F-slope: how fast predictions fail as edges are removed in the order of attention.

The loop is short and needs a model, so it belongs to whoever holds one: for each fraction r, remove
`edges_to_remove(...)` from the graph, predict, and record `still_right`; then take the slope.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import InputError
from fgai.metrics.given import check_attention, check_edge_mask, check_labels
from fgai.metrics.prediction import classes_of
from fgai.metrics.spec import metric
from fgai.ops.segments import row_index, row_sum
from fgai.topk import ranks_in_rows, scoped_rows
from fgai.typed import typed

FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)

# Shares lie in [0, 1]; the steepest line through six of them is 1, 1, 1, 0, 0, 0 over FRACTIONS.
_STEEPEST = 18 / 7


@typed
def edges_to_remove(
    values: Tensor,
    rowptr: Tensor,
    fraction: float,
    *,
    largest: bool,
    scope: str = "node",
    keep: Tensor | None = None,
) -> Tensor:
    """The edges with the largest (or smallest) attention, a given fraction of them.

    Of n removable edges (of each node, or of the graph) the nearest whole number to `fraction` n goes, halves
    up. Sets for growing fractions are nested. Ties go in edge order both for largest and for smallest, so an
    attention that ranks nothing loses the same edges either way.

    Args:
        values: [E].
        rowptr: [N+1].
        fraction: in [0, 1].
        largest: True removes from the top, False from the bottom.
        scope: "node" removes that fraction at every node, "graph" of all edges.
        keep: bool [E], edges that are never removed and do not count, as self-loops.

    Returns:
        int64 positions, ascending.

    Raises:
        InputError: if the fraction is not in [0, 1] or the scope is unknown.

    Example:
        >>> w = torch.tensor([0.1, 0.6, 0.3, 0.5, 0.5])
        >>> edges_to_remove(w, torch.tensor([0, 3, 5]), 0.5, largest=True).tolist()
        [1, 2, 3]
    """
    check_attention(values, rowptr, "values")
    if keep is not None:
        check_edge_mask(keep, values, "keep")
    if not 0 <= fraction <= 1:
        raise InputError(f"`fraction` must be between 0 and 1, got {fraction!r}")
    rows = scoped_rows(rowptr, values.shape[0], scope)
    free = torch.ones_like(values, dtype=torch.bool) if keep is None else ~keep
    score = values.detach() if largest else -values.detach()
    ranks = ranks_in_rows(score.masked_fill(~free, float("-inf")), rows)
    # The small shift makes halves go up even where the product falls just short, as 0.3 · 5 may.
    count = (row_sum(free, rows).double() * fraction + 0.5 + 1e-9).floor().long()
    return (ranks < count[row_index(rows, values.shape[0])]).nonzero().flatten()


@typed
def still_right(prediction: Tensor, target: Tensor, right: Tensor) -> float:
    """Share of the nodes in T whose class is still predicted right.

    Args:
        prediction: logits [N, C] or class indices [N], after removing edges.
        target: class indices [N].
        right: bool [N], T: the nodes that were right on the clean graph.

    Returns:
        In [0, 1]; NaN if T is empty.

    Example:
        >>> still_right(torch.tensor([0, 1, 1]), torch.tensor([0, 0, 1]), torch.tensor([True, True, False]))
        0.5
    """
    guess = classes_of(prediction)
    check_labels(target, tuple(guess.shape))
    checks.mask(right, tuple(guess.shape), "right")
    return float((guess == target)[right].double().mean())


@typed
def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of the least-squares line, `sum (x - mean x)(y - mean y) / sum (x - mean x)^2`.

    Args:
        x: at least two values, not all equal.
        y: as many values; where one is NaN, so is the slope.

    Raises:
        InputError: if the lengths differ or x does not vary.

    Example:
        >>> slope([0.0, 0.5], [1.0, 0.5])
        -1.0
    """
    undefined = [isinstance(entry, float) and math.isnan(entry) for entry in y]
    known = [0.0 if gone else entry for entry, gone in zip(y, undefined, strict=True)]
    a, b = (
        torch.tensor([checks.number(entry, name) for entry in values], dtype=torch.float64)
        for name, values in (("x", x), ("y", known))
    )
    if a.shape != b.shape or a.numel() < 2 or bool((a == a[0]).all()):
        raise InputError(
            f"`x` and `y` must be as long and `x` must vary, got x={list(x)} and {len(y)} values of y"
        )
    if any(undefined):
        return math.nan
    a = a - a.mean()
    return float((a * (b - b.mean())).sum() / a.square().sum())


@metric(
    direction="lower",
    low=-_STEEPEST,
    high=_STEEPEST,
    parameters=("fractions",),
    title="f+",
    paths=("f_slope.*.*.plus",),
)
@typed
def f_slope_plus(shares: Sequence[float], fractions: Sequence[float] = FRACTIONS) -> float:
    """Slope of the share still right against the fraction of edges removed from the top of the ranking.

    Args:
        shares: `still_right` at each fraction.
        fractions: where they were measured; the declared range is for the default.

    Returns:
        The least-squares slope: strongly negative if the edges attention points at matter.

    Example:
        >>> round(f_slope_plus([1.0, 0.9, 0.8, 0.7, 0.6, 0.5]), 6)
        -1.0
    """
    return slope(fractions, shares)


@metric(
    direction="higher",
    low=-_STEEPEST,
    high=_STEEPEST,
    parameters=("fractions",),
    title="f−",
    paths=("f_slope.*.*.minus",),
)
@typed
def f_slope_minus(shares: Sequence[float], fractions: Sequence[float] = FRACTIONS) -> float:
    """Slope of the share still right against the fraction of edges removed from the bottom of the ranking.

    Args:
        shares: `still_right` at each fraction.
        fractions: where they were measured; the declared range is for the default.

    Returns:
        The least-squares slope: near 0 if the edges attention passes over do not matter. Above 0 the model
        got better by losing them, which is a warning, not a success.

    Example:
        >>> f_slope_minus([1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
        0.0
    """
    return slope(fractions, shares)


@metric(
    direction="higher",
    low=-2 * _STEEPEST,
    high=2 * _STEEPEST,
    title="F-gap",
    paths=("f_slope.node.*.gap", "f_slope.graph.*.gap"),
    headings={"f_slope.graph.clean.gap": "paper's clean", "f_slope.graph.attacked.gap": "paper's attacked"},
)
@typed
def f_slope_gap(minus: float, plus: float) -> float:
    """How much faster predictions fail from the top than from the bottom: `f_slope_minus - f_slope_plus`.

    Example:
        >>> f_slope_gap(minus=-0.25, plus=-1.0)
        0.75
    """
    return minus - plus
