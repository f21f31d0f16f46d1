"""The linear program behind `certify_budget`: how much of its rows a budget of edges can cover.

    max Σ_v min(1, (W x)_v)   over   0 ≤ x ≤ most,  Σ_u x_u ≤ edges

is the saddle point of `Σ_v (1 − π_v) + πᵀ W x` over prices 0 ≤ π ≤ 1 and x. Any prices bound it from above,
by `Σ_v (1 − π_v) + max_x πᵀ W x`, whose maximum takes the columns that are worth most. So how good the prices
are decides how tight the bound is, never whether it is one. The search takes primal-dual steps with a step
size of each row and column (Pock and Chambolle, 2011) and restarts at the mean (Applegate and others, 2021),
until an x covers as much as the bound but for a share `GAP`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]

SLACK = 1e-9
"""Rounding of sums in float64, relative."""
GAP, LEAST_GAP = 1e-3, 0.25
"""Distance from the optimum at which the search ends: relative, and in nodes."""
STEPS, LOOK = 4000, 50
"""Steps at most, and steps between two looks at the gap."""
HALVINGS = 50


def _most_covered(weights: Any, most: int, edges: int) -> float:
    """Return an upper bound of the program for `weights`, sparse [R, N] and not negative."""
    weights = weights[_reachable(weights, most, edges)]
    weights = weights[:, np.unique(weights.indices)].tocsr()
    best = float(weights.shape[0])
    if not best:
        return 0.0
    covered = 0.0
    for prices, spent in _prices(weights, most, edges):
        best = min(best, _bound(weights, prices, most, edges))
        covered = max(covered, float(np.minimum(1, weights @ spent).sum()))
        if best - covered < max(LEAST_GAP, GAP * covered):
            break
    return best


def _bound(weights: Any, prices: Array, most: int, edges: int) -> float:
    """Bound the program by prices of the rows [R] in [0, 1]."""
    return float((1 - prices).sum()) + _best_spent(weights.T @ prices, most, edges)


def _best_spent(worth: Array, most: int, edges: int) -> float:
    """The most that columns of this worth [N] bring."""
    best = -np.sort(-worth)
    full, rest = divmod(edges, most)
    return float(most * best[:full].sum() + rest * best[full : full + 1].sum())


def _reachable(weights: Any, most: int, edges: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Rows, bool [R], that the edges can bring to 1 if they are spent on them alone."""
    ends = zip(weights.indptr, weights.indptr[1:], strict=False)
    covered = [_best_spent(weights.data[start:stop], most, edges) for start, stop in ends]
    return np.array(covered, dtype=np.float64) >= 1 - SLACK


def _prices(weights: Any, most: int, edges: int) -> Iterator[tuple[Array, Array]]:
    """Yield prices of rows [R] and numbers of edges [N], both better and better."""
    turned = weights.T.tocsr()
    up, down = (1 / np.asarray(weights.sum(axis=axis)).ravel() for axis in (0, 1))  # step sizes
    prices, spent = np.full(len(down), 0.5), _allowed(1 / up, np.ones_like(up), most, edges)
    covered, sums, count, last = weights @ spent, [0 * prices, 0 * spent], 0, np.inf
    for step in range(1, STEPS + 1):
        spent = _allowed(spent + up * (turned @ prices), up, most, edges)
        before, covered = covered, weights @ spent
        prices = np.clip(prices - down * (2 * covered - before - 1), 0, 1)
        sums, count = [sums[0] + prices, sums[1] + spent], count + 1
        if step % LOOK:
            continue
        pairs = [(prices, spent), (sums[0] / count, sums[1] / count)]
        gaps = [_bound(weights, p, most, edges) - np.minimum(1, weights @ x).sum() for p, x in pairs]
        place = int(np.argmin(gaps))
        yield pairs[place]
        if gaps[place] < last / 2 or count >= 20 * LOOK:
            (prices, spent), last = pairs[place], gaps[place]
            covered, sums, count = weights @ spent, [0 * prices, 0 * spent], 0


def _allowed(spent: Array, size: Array, most: int, edges: int) -> Array:
    """The nearest numbers of edges within the budget, where a unit of column u counts as `1 / size_u`."""
    inside = np.clip(spent, 0, most)
    if inside.sum() <= edges:
        return inside
    low, high = 0.0, float((spent / size).max())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if np.clip(spent - size * middle, 0, most).sum() > edges:
            low = middle
        else:
            high = middle
    return np.clip(spent - size * high, 0, most)
