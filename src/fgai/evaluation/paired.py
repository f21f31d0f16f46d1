"""Whether two models differ by more than noise: intervals of a difference, paired over nodes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

LEVEL = 0.95
"""Coverage of an interval if nodes were independent."""


class Interval(NamedTuple):
    """A mean difference (second model minus first), its interval, and the number of nodes counted."""

    difference: float
    low: float
    high: float
    nodes: int

    @property
    def exceeds_noise(self) -> bool:
        """Whether zero lies outside."""
        return self.low > 0 or self.high < 0


def paired_interval(
    first: NDArray[Any], second: NDArray[Any], counted: NDArray[np.bool_] | None = None
) -> Interval | None:
    """Return the interval of the mean of `second - first` over the nodes with both values, or None.

        d̄ ± t · s / √(n + 2),   d_i = second_i − first_i

    The mean d̄ and the standard deviation s are over n + 2 values: those of the n nodes, and 1 and −1. Without
    the two a handful of nodes that happen to agree would prove a difference. For values of 0 and 1 that asks
    for six nodes on one side and none on the other, as the exact sign test does. `difference` is the mean
    over the n nodes alone. With layers a node's values are averaged, every layer counting the same.

    Args:
        first: [N] or [L, N], in [0, 1]; NaN where a node has no value.
        second: the same of the other model.
        counted: the nodes that count, of the same shape; all by default.

    Example:
        >>> right = np.ones(140)
        >>> paired_interval(right * (np.arange(140) > 3), right).exceeds_noise  # four of 140 nodes differ
        False
    """
    if first.shape != second.shape or (counted is not None and counted.shape != first.shape):
        return None
    difference = np.atleast_2d(second.astype(np.float64) - first.astype(np.float64))
    defined = np.isfinite(difference) & (True if counted is None else np.atleast_2d(counted))
    layers = defined.any(1)
    nodes = int(defined.any(0).sum())
    if not nodes:
        return None
    share = nodes / (defined[layers].sum(1, keepdims=True) * layers.sum())
    values = (np.where(defined[layers], difference[layers], 0.0) * share).sum(0)[defined.any(0)]
    mean, size = float(values.mean()), nodes + 2
    centre = values.sum() / size
    spread = float(stdtrit(size - 1, (1 + LEVEL) / 2)) * np.sqrt(
        max(0.0, (np.square(values).sum() + 2) / size - centre**2) / size
    )
    return Interval(mean, float(centre - spread), float(centre + spread), nodes)
