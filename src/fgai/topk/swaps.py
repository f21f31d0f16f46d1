"""The swap cost c(m): how far attention must move before m members can have left the top-k set."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import InputError
from fgai.ops.segments import check_rows, row_order
from fgai.topk import cpu
from fgai.topk.sets import FEW, LARGEST_TABLE, _row_kernels, _with_gradient, check_k, leaders
from fgai.typed import typed

NORMS = ("l1", "l2", "linf")


@typed
def swap_costs(values: Tensor, rowptr: Tensor, k: int | None, norm: str = "l1") -> Tensor:
    """The least change of attention, in `norm`, after which m members of the top-k set can have left it.

    With the row sorted, a_1 >= ... >= a_d, and m = 1..min(k, d-k), the m weakest members and the m strongest
    outsiders all move to a common level t:

        l1    c(m) = sum_{s<=m} (a_{k-s+1} - a_{k+s})
        linf  c(m) = (a_{k-m+1} - a_{k+m}) / 2
        l2    c(m)^2 = min_t sum_{s<=m} (a_{k-s+1} - t)_+^2 + (t - a_{k+s})_+^2

    c is non-decreasing in m; c(1) is the radius below which the set cannot change. A tie between a member and
    an outsider costs 0. The l2 minimum is exact: the objective is piecewise quadratic in t, and bisection
    finds the piece.

    Columns are m = 1..M with M <= k, infinity where m > min(k, d-k): [N, M]. Differentiable in `values` [E];
    where an l2 cost is 0 its gradient is set to 0. For a graph-wide set pass `scoped_rows(rowptr, E,
    "graph")` as `rowptr`; with `k=None` no edge is outside. `InputError` if k is below 1, the norm is
    unknown, or there are more costs than memory holds.

    Example:
        >>> a = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
        >>> [round(c, 6) for c in swap_costs(a, torch.tensor([0, 4]), 2)[0].tolist()]
        [0.1, 0.4]
    """
    check_k(k)
    checks.one_of(norm, "norm", NORMS)
    check_rows(values, rowptr)
    if values.dtype == torch.bool:
        raise InputError("`values` must be numbers, got torch.bool")
    num_rows = rowptr.numel() - 1
    if k is None or k >= values.shape[0]:
        return values.new_full((num_rows, 0), float("inf"))
    if k <= FEW:
        return _costs(values, *_nearest_to_cut(values, rowptr, k), norm)
    rows, members, outsiders = _nearest_to_deep_cut(values, rowptr, k)
    if num_rows * members.shape[1] > LARGEST_TABLE:
        costs = f"{members.shape[1]} costs at each of {num_rows} nodes"
        raise InputError(f"`k` of {k} asks for {costs}, too many to list; take a smaller `k`")
    table = values.new_full((num_rows, members.shape[1]), float("inf"))
    return table.index_copy(0, rows, _costs(values, members, outsiders, norm))


def _nearest_to_cut(values: Tensor, rowptr: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Positions of the weakest members and the strongest outsiders, [N, k] each; -1 for none."""
    lead = leaders(values, rowptr, 2 * k)
    return lead[:, :k].flip(1), lead[:, k:]


def _nearest_to_deep_cut(values: Tensor, rowptr: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """`_nearest_to_cut` for large k: the R rows with more than k edges, and positions [R, M] twice."""
    degree = rowptr.diff()
    rows = (degree > k).nonzero().flatten()
    count = (degree[rows] - k).clamp(max=k)
    steps = torch.arange(int(count.max()) if len(rows) else 0, device=rowptr.device)
    exists, order = steps < count[:, None], row_order(values, rowptr)
    middle = rowptr[rows, None] + k
    members, outsiders = (
        torch.where(exists, order[torch.where(exists, slots, 0)], -1)
        for slots in (middle - 1 - steps, middle + steps)
    )
    return rows, members, outsiders


def _costs(values: Tensor, members: Tensor, outsiders: Tensor, norm: str) -> Tensor:
    """c(m) where there is an m-th outsider, infinity elsewhere."""
    valid = outsiders >= 0
    # Entries without an outsider read another value, which the fill replaces, so no gradient reaches it. Each
    # row reads a different one: adding the zero gradients of all at one address would be slow on a GPU.
    spare = torch.arange(len(valid), device=values.device)[:, None].clamp(max=values.shape[0] - 1)
    upper = take_values(values, torch.where(valid, members, spare)).masked_fill(~valid, 0)
    lower = take_values(values, torch.where(valid, outsiders, spare)).masked_fill(~valid, 0)
    if norm == "l1":
        costs = (upper - lower).cumsum(1)
    elif norm == "linf":
        costs = (upper - lower) / 2
    else:
        costs = _l2_costs(upper, lower)
    return costs.masked_fill(~valid, float("inf"))


@typed
def swap_margin(values: Tensor, rowptr: Tensor, k: int, radius: float) -> Tensor:
    """How far the top-k sets are from being certified at `radius` R, in units of R; 0 if all are certified.

        mean over rows with more than k edges and over m of  relu(R − c(m) / m) / R

    with `c(m)` the l1 cost of m swaps. A scalar in [0, 1] for costs of at least 0; 0 where no row is longer.

    Example:
        >>> a = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
        >>> round(float(swap_margin(a, torch.tensor([0, 4]), 2, 0.4)), 6)
        0.625
    """
    checks.whole(k, "k", 1)
    radius = float(checks.above(radius, "radius", 0))
    check_rows(values, rowptr)
    if not values.is_floating_point():
        raise InputError(f"`values` must be floating-point numbers, got {values.dtype}")
    if k >= values.shape[0]:
        return values.sum() * 0
    if 2 * k <= FEW and (kernels := _row_kernels(values)) is not None:
        return _with_gradient(kernels.margins, values, rowptr, k, radius)  # type: ignore[no-any-return,no-untyped-call]
    near = _nearest_to_cut(values, rowptr, k) if k <= FEW else _nearest_to_deep_cut(values, rowptr, k)[1:]
    costs = _costs(values, *near, "l1")
    real = torch.isfinite(costs)
    steps = torch.arange(1, costs.shape[1] + 1, device=values.device, dtype=values.dtype)
    short = (radius - torch.where(real, costs, radius * steps) / steps).clamp(min=0) / radius
    return short.sum() / real.sum().clamp(min=1)


def _l2_costs(upper: Tensor, lower: Tensor) -> Tensor:
    """c(m) in l2 for members `upper` (rising with s) and outsiders `lower` (falling); all [N, M]."""
    # Centred between the first pair: then the squares lose no digits, since sum x^2 <= 3 c(m)^2.
    centre = ((upper[:, :1] + lower[:, :1]) / 2).detach().double()
    high, low = upper.double() - centre, lower.double() - centre
    sum_high, sum_low = _prefix_sums(high), _prefix_sums(low)
    m = torch.arange(1, high.shape[1] + 1, device=high.device).expand_as(high)
    with torch.no_grad():
        # Members below t and outsiders above t stay where they are; only one of the two kinds can occur.
        idle_high = _members_below(high, sum_high, sum_low, m)
        idle_low = _members_below(-low, -sum_low, -sum_high, m)
    total = _between(sum_high, idle_high) + _between(sum_low, idle_low)
    squares = _between(_prefix_sums(high.square()), idle_high)
    squares = squares + _between(_prefix_sums(low.square()), idle_low)
    moved = (2 * m - idle_high - idle_low).double()
    # At the minimum the derivative in t is zero, so t counts as a constant (envelope theorem).
    level = (total / moved).detach()
    cost = squares - 2 * level * total + moved * level.square()
    positive = cost > 0
    return torch.where(positive, torch.where(positive, cost, 1.0).sqrt(), 0.0).to(upper.dtype)


def _prefix_sums(x: Tensor) -> Tensor:
    """Sums of the first 0, 1, ..., M columns, [N, M] -> [N, M+1]."""
    return torch.cat([torch.zeros_like(x[:, :1]), x.cumsum(1)], dim=1)


def _between(sums: Tensor, skip: Tensor) -> Tensor:
    """Sums over columns skip < s <= m for every m, from prefix sums; [N, M]."""
    return sums[:, 1:] - sums.gather(1, skip)


def _members_below(high: Tensor, sum_high: Tensor, sum_low: Tensor, m: Tensor) -> Tensor:
    """How many of the first m members lie below the best level t; int64 [N, M].

    With all m outsiders moving, half the derivative of the objective at t = high_j is

        h_m(j) = (2m - j) high_j - sum_{j<s<=m} high_s - sum_{s<=m} low_s,

    non-decreasing in j and at j = m never negative, so we bisect for the first j with h_m(j) >= 0.
    """
    first, last = torch.ones_like(m), m.clone()
    for _ in range(m.shape[1].bit_length()):
        j = (first + last) // 2
        below = (2 * m - j) * high.gather(1, j - 1) - _between(sum_high, j) - sum_low[:, 1:] < 0
        first = torch.where(below, torch.minimum(j + 1, last), first)
        last = torch.where(below, last, j)
    return first - 1


def swap_gaps(
    scores: Tensor, exists: Tensor, members: Tensor, rowptr: Tensor, rows: Tensor, k: int
) -> tuple[Tensor, Tensor]:
    """How far the s-th strongest outsider is above the s-th weakest member, s = 1..k, at `rows` [R].

    Edges count where `exists` (bool [E]); `members` (bool [E]) is the top-k. Returns the differences of their
    `scores` [E] as [R, k], 0 where there is no such pair, and bool [R, k] where there is one.
    """
    kernels, fixed = _row_kernels(scores) if k <= FEW else None, scores.detach()
    if scores.is_cuda and kernels is not None:
        gaps: tuple[Tensor, Tensor] = kernels.swap_gaps(scores, exists, members, rowptr, rows, k)
        return gaps
    if kernels is not None:
        strong, weak = cpu.pick_pairs(fixed, exists, members, rowptr, rows, k)
    else:
        strong = leaders(fixed.masked_fill(members | ~exists, float("-inf")), rowptr, k)[rows]
        weak = leaders((-fixed).masked_fill(~(members & exists), float("-inf")), rowptr, k)[rows]
        weak = weak.where(~members[strong] & exists[strong] & members[weak] & exists[weak], -1)
    paired = (strong >= 0) & (weak >= 0)
    strong, weak = strong.clamp(min=0), weak.clamp(min=0)
    return torch.where(paired, take_values(scores, strong) - take_values(scores, weak), 0.0), paired


def take_values(values: Tensor, index: Tensor) -> Tensor:
    """`values[index]` with a gradient that needs no sort on a GPU."""
    return values.index_select(0, index.flatten()).view(index.shape)
