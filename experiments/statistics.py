"""Mean, spread and paired intervals over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from scipy.special import stdtr, stdtrit

LEVEL = 0.95
LEAST = 3
"""Seeds from which an interval is drawn: of two it is twelve times as wide as they are apart."""


class Estimate(NamedTuple):
    """Mean and sample standard deviation (n − 1; 0 for one value) over `seeds` runs."""

    mean: float
    std: float
    seeds: int


class Interval(NamedTuple):
    """A mean difference with the ends of its confidence interval over the `seeds` both have.

    `p` is that of the two-sided paired t-test that the difference is zero.
    """

    mean: float
    low: float
    high: float
    seeds: int
    p: float


def estimate(values: Iterable[float]) -> Estimate | None:
    """Summarise values over seeds; None without any.

    Example:
        >>> estimate([1.0, 2.0, 3.0])
        Estimate(mean=2.0, std=1.0, seeds=3)
    """
    held = list(values)
    if not held:
        return None
    mean = math.fsum(held) / len(held)
    if len(held) == 1:
        return Estimate(mean, 0.0, 1)
    spread = math.fsum((value - mean) ** 2 for value in held) / (len(held) - 1)
    return Estimate(mean, math.sqrt(spread), len(held))


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    """Return the 95 % interval of the mean difference `ours − theirs` over the seeds both have.

        d_s = ours_s − theirs_s,   mean(d) ± t_{0.975, n−1} · std(d) / √n

    The interval is Student's, exact for normal differences; with five seeds a bootstrap would be too narrow.
    None with fewer than three seeds in common.

    Example:
        >>> low, high = paired({0: 1.0, 1: 2.0, 2: 4.0}, {0: 0.5, 1: 1.0, 2: 2.5})[1:3]
        >>> round(low, 3), round(high, 3)
        (-0.242, 2.242)
    """
    differences = estimate(ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs)))
    if differences is None or differences.seeds < LEAST:
        return None
    mean, std, count = differences
    error = std / math.sqrt(count)
    reach = float(stdtrit(count - 1, 0.5 + LEVEL / 2)) * error
    p = 2 * float(stdtr(count - 1, -abs(mean) / error)) if error else float(mean == 0)
    return Interval(mean, mean - reach, mean + reach, count, p)


def holm(p: Sequence[float]) -> list[bool]:
    """Return which of several hypotheses are rejected at 5 % for all together, by Holm's method.

    In ascending order the m values are compared with 0.05 / m, 0.05 / (m − 1), … up to the first larger one.

    Example:
        >>> holm([0.04, 0.001, 0.03])
        [False, True, False]
    """
    rejected = [False] * len(p)
    for rank, index in enumerate(sorted(range(len(p)), key=p.__getitem__)):
        if p[index] > (1 - LEVEL) / (len(p) - rank):
            break
        rejected[index] = True
    return rejected
