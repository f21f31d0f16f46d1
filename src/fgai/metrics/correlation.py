"""Rank correlation of two attentions, node by node: Spearman's and Kendall's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fgai import checks
from fgai.compiled import compiled
from fgai.metrics.common import _check_attentions, mean_over
from fgai.metrics.spec import metric
from fgai.metrics.views import Views
from fgai.ops.segments import row_index, row_max, row_order, row_sum
from fgai.typed import typed

CORRELATIONS = ("spearman", "kendall")


def _correlation(views: Views) -> dict[str, Any]:
    return views.per_layer("rank_correlation", lambda p: rank_correlation(*p.ranks, p.rowptr))


@metric(
    direction="higher",
    low=-1,
    high=1,
    parameters=("method",),
    paths=("rank_correlation.*", "similarity.rank_correlation"),
    section="explanation",
    shown=(),
    measure=_correlation,
    null=_correlation,
)
@typed
def rank_correlation(
    w: Tensor, w_other: Tensor, rowptr: Tensor, method: str = "spearman", *, nodes: Tensor | None = None
) -> float:
    """Mean rank correlation over nodes with at least two neighbours.

        spearman  the correlation of the ranks; tied values share the mean of their ranks
        kendall   tau-b, (P - Q) / sqrt((P + Q + T)(P + Q + U)): P pairs in the same order, Q in opposite
                  order, T and U tied in one argument only. Takes time quadratic in the degree.

    Where all values of a node are equal there is no ranking and the formulas are 0/0: such a node counts as 0
    if only one argument is constant there, and as 1 if both are.

    0 for unrelated rankings, NaN if no node counts.

    Args:
        w: [E], finite.
        w_other: [E], finite, on the same edges.
        rowptr: [N+1].
        method: "spearman" or "kendall".
        nodes: bool [N] or indices; only these nodes count.

    Example:
        >>> w = torch.tensor([0.5, 0.3, 0.2])
        >>> rank_correlation(w, w.flip(0), torch.tensor([0, 3]))
        -1.0
    """
    _check_attentions(w, w_other, rowptr)
    checks.one_of(method, "method", CORRELATIONS)
    a, b = w.detach().double(), w_other.detach().double()
    rho = (_spearman if method == "spearman" else _kendall)(a, b, rowptr)
    flat_a, flat_b = (row_max(x, rowptr) == -row_max(-x, rowptr) for x in (a, b))
    rho = torch.where(flat_a & flat_b, 1.0, torch.where(flat_a | flat_b, 0.0, rho))
    return mean_over(torch.where(rowptr.diff() >= 2, rho, float("nan")), nodes)


def _row_midranks(values: Tensor, rowptr: Tensor) -> Tensor:
    """Ascending ranks within each row, from 1 up; tied values share the mean of theirs. float64 [E]."""
    row = row_index(rowptr, values.shape[0])
    order = row_order(-values, rowptr)
    ordered = values[order]
    place = torch.arange(1, values.shape[0] + 1, device=values.device) - rowptr[row]
    # A tie group is a run of equal values in one row.
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = (ordered[1:] != ordered[:-1]) | (row[1:] != row[:-1])
    group = starts.long().cumsum(0) - 1
    count = torch.bincount(group)
    middle = place[starts].double() + (count.double() - 1) / 2
    ranks = middle[group]
    return torch.empty_like(ranks).scatter_(0, order, ranks)


def _spearman(a: Tensor, b: Tensor, rowptr: Tensor) -> Tensor:
    row = row_index(rowptr, a.shape[0])
    # The mean rank of a row of d is (d + 1)/2 with or without ties.
    centre = (rowptr.diff().double() + 1)[row] / 2
    x, y = _row_midranks(a, rowptr) - centre, _row_midranks(b, rowptr) - centre
    scale = (row_sum(x.square(), rowptr) * row_sum(y.square(), rowptr)).sqrt()
    return (row_sum(x * y, rowptr) / scale).clamp(-1, 1)


def _kendall(a: Tensor, b: Tensor, rowptr: Tensor) -> Tensor:
    tau = np.empty(rowptr.numel() - 1)
    _kendall_rows(a.cpu().numpy(), b.cpu().numpy(), rowptr.cpu().numpy(), tau)
    return torch.from_numpy(tau).to(a.device)


@compiled
def _kendall_rows(a: np.ndarray, b: np.ndarray, rowptr: np.ndarray, tau: np.ndarray) -> None:
    for i in range(rowptr.shape[0] - 1):
        balance, ordered_a, ordered_b = 0, 0, 0
        for e in range(rowptr[i], rowptr[i + 1]):
            for f in range(rowptr[i], e):
                sign_a = (a[e] > a[f]) - (a[e] < a[f])
                sign_b = (b[e] > b[f]) - (b[e] < b[f])
                balance += sign_a * sign_b
                ordered_a += sign_a != 0
                ordered_b += sign_b != 0
        tau[i] = balance / np.sqrt(float(ordered_a) * float(ordered_b)) if ordered_a and ordered_b else np.nan
