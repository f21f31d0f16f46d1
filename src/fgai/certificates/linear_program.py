"""The linear program behind `certify_budget`: how much of its rows a budget of edges can cover.

    max Σ_v min(1, (W x)_v)   over   0 ≤ x ≤ most,  Σ_u x_u ≤ edges

is the saddle point of `Σ_v (1 − π_v) + πᵀ W x` over prices (dual variables) 0 ≤ π ≤ 1 and allocations x. Any
prices bound it from above, by `Σ_v (1 − π_v) + max_x πᵀ W x`, whose maximum takes the columns of the largest
value: bad prices give a loose bound, never a wrong one. The search takes primal-dual steps with a step
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
STEPS, GAP_EVERY = 4000, 50
"""Steps at most, and steps between two computations of the gap."""
HALVINGS = 50


def _max_covered(weights: Any, most: int, edges: int) -> float:
    """Return an upper bound of the program for `weights`, sparse [R, N] and not negative."""
    weights = weights[_coverable(weights, most, edges)]
    weights = weights[:, np.unique(weights.indices)].tocsr()
    best = float(weights.shape[0])
    if not best:
        return 0.0
    covered = 0.0
    for prices, allocation in _price_search(weights, most, edges):
        best = min(best, _dual_bound(weights, prices, most, edges))
        covered = max(covered, float(np.minimum(1, weights @ allocation).sum()))
        if best - covered < max(LEAST_GAP, GAP * covered):
            break
    return best


def _dual_bound(weights: Any, prices: Array, most: int, edges: int) -> float:
    """Return the upper bound of the program by prices [R] in [0, 1]."""
    return float((1 - prices).sum()) + _best_value(weights.T @ prices, most, edges)


def _best_value(values: Array, most: int, edges: int) -> float:
    """Return the largest total value of an allocation to columns of these values [N]."""
    best = -np.sort(-values)
    full, rest = divmod(edges, most)
    return float(most * best[:full].sum() + rest * best[full : full + 1].sum())


def _coverable(weights: Any, most: int, edges: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return the rows, bool [R], that the whole budget can bring to 1 by itself."""
    ends = zip(weights.indptr, weights.indptr[1:], strict=False)
    covered = [_best_value(weights.data[start:stop], most, edges) for start, stop in ends]
    return np.array(covered, dtype=np.float64) >= 1 - SLACK


def _price_search(weights: Any, most: int, edges: int) -> Iterator[tuple[Array, Array]]:
    """Yield prices of rows [R] and allocations [N] that approach the optimum."""
    transposed = weights.T.tocsr()
    up, down = (1 / np.asarray(weights.sum(axis=axis)).ravel() for axis in (0, 1))  # step sizes
    prices, allocation = np.full(len(down), 0.5), _project(1 / up, np.ones_like(up), most, edges)
    covered, sums, count, last = weights @ allocation, [0 * prices, 0 * allocation], 0, np.inf
    for step in range(1, STEPS + 1):
        allocation = _project(allocation + up * (transposed @ prices), up, most, edges)
        before, covered = covered, weights @ allocation
        prices = np.clip(prices - down * (2 * covered - before - 1), 0, 1)
        sums, count = [sums[0] + prices, sums[1] + allocation], count + 1
        if step % GAP_EVERY:
            continue
        pairs = [(prices, allocation), (sums[0] / count, sums[1] / count)]
        gaps = [_dual_bound(weights, p, most, edges) - np.minimum(1, weights @ x).sum() for p, x in pairs]
        chosen = int(np.argmin(gaps))
        yield pairs[chosen]
        if gaps[chosen] < last / 2 or count >= 20 * GAP_EVERY:
            (prices, allocation), last = pairs[chosen], gaps[chosen]
            covered, sums, count = weights @ allocation, [0 * prices, 0 * allocation], 0


def _project(allocation: Array, size: Array, most: int, edges: int) -> Array:
    """Project an allocation on the budget, in the norm that weighs column u by `1 / size_u`."""
    inside = np.clip(allocation, 0, most)
    if inside.sum() <= edges:
        return inside
    low, high = 0.0, float((allocation / size).max())
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if np.clip(allocation - size * middle, 0, most).sum() > edges:
            low = middle
        else:
            high = middle
    return np.clip(allocation - size * high, 0, most)
