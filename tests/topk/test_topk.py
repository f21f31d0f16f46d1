"""Top-k sets, overlap, swap costs and the surrogate loss against loops, linear programs and minimisers."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize_scalar
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fgai.errors import InputError
from fgai.ops import segments
from fgai.topk import (
    leaders,
    overlap,
    ranks_in_rows,
    scoped_rows,
    swap_costs,
    swap_margin,
    topk_l1,
    topk_mask,
)
from support.csr_rows import attention, pointer, rows, split


def slow_order(row: Tensor) -> list[int]:
    return sorted(range(len(row)), key=lambda e: (-float(row[e]), e))


def slow_mask(values: Tensor, rowptr: Tensor, k: int) -> Tensor:
    mask = torch.zeros(len(values), dtype=torch.bool)
    for start, row in zip(rowptr.tolist(), split(values, rowptr), strict=False):
        for e in slow_order(row)[:k]:
            mask[start + e] = True
    return mask


@given(rows(), st.sampled_from([torch.float32, torch.float64]))
def test_orders_and_ranks_equal_a_loop(case: tuple[Tensor, Tensor], dtype: torch.dtype) -> None:
    values, rowptr = case[0].to(dtype), case[1]
    expected = [
        start + e
        for start, row in zip(rowptr.tolist(), split(values, rowptr), strict=False)
        for e in slow_order(row)
    ]
    assert segments.row_order(values, rowptr).tolist() == expected
    ranks = ranks_in_rows(values, rowptr)
    assert all(ranks[e] == place - rowptr[i] for place, e in enumerate(expected) for i in [row_of(e, rowptr)])


def row_of(edge: int, rowptr: Tensor) -> int:
    return int(torch.searchsorted(rowptr, edge, right=True)) - 1


def test_long_rows_and_special_values_are_ordered() -> None:
    generator = torch.Generator().manual_seed(3)
    rowptr = pointer([70, 0, 45, 2])
    values = torch.randint(-4, 5, (117,), generator=generator).float()
    values[:6] = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), -0.0, 1e-38])
    values[70:73] = torch.tensor([-1e-38, -1.0, float("inf")])
    for dtype in (torch.float32, torch.float64):
        order = segments.row_order(values.to(dtype), rowptr)
        for start, piece in zip(rowptr.tolist(), split(values, rowptr), strict=False):
            assert (order[start : start + len(piece)] - start).tolist() == slow_order(piece)


@given(rows(columns=1))
def test_row_sums_and_maxima(case: tuple[Tensor, Tensor]) -> None:
    values, rowptr = case
    two = torch.stack([values, values.square()], dim=1)
    for i, row in enumerate(split(two, rowptr)):
        torch.testing.assert_close(segments.row_sum(two, rowptr)[i], row.sum(0))
        expected = row.max(0).values if len(row) else torch.full((2,), float("-inf")).double()
        torch.testing.assert_close(segments.row_max(two, rowptr)[i], expected)
    counted = segments.row_sum(values > 0, rowptr)
    assert counted.dtype == torch.int64
    assert counted.tolist() == [int((row > 0).sum()) for row in split(values, rowptr)]


@given(rows(), st.integers(1, 9))
def test_mask_equals_a_loop(case: tuple[Tensor, Tensor], k: int) -> None:
    values, rowptr = case
    assert torch.equal(topk_mask(values, rowptr, k), slow_mask(values, rowptr, k))
    whole = torch.tensor([0, len(values)])
    assert torch.equal(topk_mask(values, rowptr, k, "graph"), slow_mask(values, whole, k))
    assert bool(topk_mask(values, rowptr, None).all())


def test_mask_with_k_above_the_selection_limit() -> None:
    generator = torch.Generator().manual_seed(0)
    rowptr = pointer([90, 3, 0, 130])
    values = torch.randint(0, 20, (223,), generator=generator).double()
    for k in (64, 65, 100):
        assert torch.equal(topk_mask(values, rowptr, k), slow_mask(values, rowptr, k))
        found = leaders(values, rowptr, k)
        assert found.shape == (4, k)
        assert (found >= 0).sum(1).tolist() == [min(90, k), 3, 0, min(130, k)]


@given(rows(columns=2), st.integers(1, 9), st.randoms(use_true_random=False))
def test_relabelling_nodes_moves_the_sets_along(case: tuple[Tensor, ...], k: int, random: object) -> None:
    values, other, rowptr = case
    order = list(range(len(rowptr) - 1))
    random.shuffle(order)  # type: ignore[attr-defined]
    pieces = [split(torch.stack([values, other], 1), rowptr)[i] for i in order]
    moved = pointer([len(p) for p in pieces])
    joined = torch.cat(pieces) if len(values) else torch.zeros(0, 2, dtype=torch.float64)
    v = overlap(topk_mask(values, rowptr, k), topk_mask(other, rowptr, k), rowptr)
    v_moved = overlap(topk_mask(joined[:, 0], moved, k), topk_mask(joined[:, 1], moved, k), moved)
    assert torch.equal(v[order], v_moved)


@given(rows(columns=2), st.integers(1, 9))
def test_overlap_equals_sets(case: tuple[Tensor, ...], k: int) -> None:
    a, b, rowptr = case
    got = overlap(topk_mask(a, rowptr, k), topk_mask(b, rowptr, k), rowptr)
    for i, (x, y) in enumerate(zip(split(a, rowptr), split(b, rowptr), strict=True)):
        size = min(k, len(x))
        shared = set(slow_order(x)[:k]) & set(slow_order(y)[:k])
        assert got[i] == (len(shared) / size if size else 1.0)


def swap_program(a: np.ndarray, k: int, m: int, norm: str) -> float:
    """Least change after which some m members are at or below some m outsiders, by linear programs."""
    d = len(a)
    order = np.argsort(-a, kind="stable")
    best = np.inf
    for leave in itertools.combinations(order[:k], m):
        for enter in itertools.combinations(order[k:], m):
            # Variables: change x (d), |x| bounds u (d for l1, 1 for linf), common level t.
            extra = d if norm == "l1" else 1
            rows_, bound = [], []
            for j in range(d):
                for sign in (1, -1):
                    line = np.zeros(d + extra + 1)
                    line[j], line[d + (j if norm == "l1" else 0)] = sign, -1
                    rows_.append(line)
                    bound.append(0)
            for j, sign in [(j, 1) for j in leave] + [(j, -1) for j in enter]:
                line = np.zeros(d + extra + 1)
                line[j], line[-1] = sign, -sign
                rows_.append(line)
                bound.append(-sign * a[j])
            goal = np.r_[np.zeros(d), np.ones(extra), 0]
            answer = linprog(goal, np.array(rows_), np.array(bound), bounds=(None, None), method="highs")
            best = min(best, answer.fun)
    return float(best)


@pytest.mark.parametrize("norm", ["l1", "linf"])
@pytest.mark.parametrize(("degree", "k", "seed"), [(3, 1, 0), (4, 2, 1), (5, 3, 2), (6, 2, 3), (6, 3, 4)])
def test_swap_costs_equal_linear_programs(norm: str, degree: int, k: int, seed: int) -> None:
    values, rowptr = attention([2, degree], seed)
    costs = swap_costs(values, rowptr, k, norm)
    row = values[2:].numpy()
    most = min(k, degree - k)
    for m in range(1, most + 1):
        assert costs[1, m - 1].item() == pytest.approx(swap_program(row, k, m, norm), abs=1e-9)
    assert torch.isinf(costs[1, most:]).all()


@given(rows(max_degree=12), st.integers(1, 6))
def test_l2_swap_costs_equal_a_numeric_minimum(case: tuple[Tensor, Tensor], k: int) -> None:
    values, rowptr = case
    costs = swap_costs(values, rowptr, k, "l2")
    for i, row in enumerate(split(values, rowptr)):
        a = np.sort(row.numpy())[::-1]
        for m in range(1, min(k, len(a) - k) + 1):
            high, low = a[k - m : k], a[k : k + m]

            def square(t: float, high: np.ndarray = high, low: np.ndarray = low) -> float:
                return float((np.maximum(high - t, 0) ** 2).sum() + (np.maximum(t - low, 0) ** 2).sum())

            # An exact minimum of a piecewise quadratic: on each piece its vertex, clipped to the piece.
            knots = np.r_[a[-1] - 1, np.sort(np.r_[high, low]), a[0] + 1]
            best = min(
                minimize_scalar(square, bounds=(p, q), method="bounded", options={"xatol": 1e-12}).fun
                for p, q in itertools.pairwise(knots)
                if q > p
            )
            assert costs[i, m - 1].item() ** 2 == pytest.approx(best, abs=1e-10, rel=1e-6)


def test_l2_cost_keeps_its_digits_on_a_large_offset() -> None:
    gaps = torch.tensor([3e-6, 1e-6, -1e-6, -5e-6], dtype=torch.float64)
    rowptr = pointer([4])
    # Powers of two keep the shifted values exact, so both calls see the same gaps.
    exact = torch.round(gaps * 2**40) / 2**40
    small = swap_costs(exact, rowptr, 2, "l2")
    shifted = swap_costs(exact + 1024, rowptr, 2, "l2")
    torch.testing.assert_close(shifted, small, rtol=1e-9, atol=0)


@given(rows(max_degree=10), st.integers(1, 5), st.sampled_from(["l1", "l2", "linf"]))
def test_swap_costs_rise_with_m_and_scale(case: tuple[Tensor, Tensor], k: int, norm: str) -> None:
    values, rowptr = case
    costs = swap_costs(values, rowptr, k, norm)
    assert costs.shape[1] <= k
    assert (costs >= 0).all()
    finite = costs.nan_to_num(posinf=1e9)
    assert (finite.diff(dim=1) >= -1e-12).all()
    for i, row in enumerate(split(values, rowptr)):
        assert int(torch.isfinite(costs[i]).sum()) == max(0, min(k, len(row) - k))
    torch.testing.assert_close(swap_costs(4 * values, rowptr, k, norm), 4 * costs)


@given(rows(max_degree=10), st.integers(1, 4), st.sampled_from(["l1", "l2", "linf"]), st.integers(0, 2**16))
def test_no_perturbation_below_the_cost_swaps(
    case: tuple[Tensor, Tensor], k: int, norm: str, seed: int
) -> None:
    values, rowptr = case
    costs = swap_costs(values, rowptr, k, norm)
    order = {"l1": 1, "l2": 2, "linf": torch.inf}[norm]
    before = topk_mask(values, rowptr, k)
    generator = torch.Generator().manual_seed(seed)
    for i, row in enumerate(split(values, rowptr)):
        start = int(rowptr[i])
        kept = before[start : start + len(row)]
        for m in range(1, max(0, min(k, len(row) - k)) + 1):
            for _ in range(3):
                push = torch.where(kept, -1.0, 1.0) * torch.rand(len(row), generator=generator).double() ** 3
                push *= 0.999 * costs[i, m - 1] / torch.linalg.vector_norm(push, order)
                after = topk_mask(row + push, pointer([len(row)]), k)
                assert int((kept & ~after).sum()) < m or costs[i, m - 1] < 1e-12


def test_wide_k_gives_the_same_costs_as_one_row_at_a_time() -> None:
    values, rowptr = attention([150, 80, 3, 200], 5)
    for norm in ("l1", "l2", "linf"):
        costs = swap_costs(values, rowptr, 70, norm)
        assert costs.shape == (4, 70)
        for i, row in enumerate(split(values, rowptr)):
            alone = swap_costs(row, pointer([len(row)]), 70, norm)
            torch.testing.assert_close(costs[i, : alone.shape[1]], alone[0])
            assert torch.isinf(costs[i, alone.shape[1] :]).all()


@pytest.mark.parametrize("norm", ["l1", "l2", "linf"])
def test_swap_costs_pass_gradcheck(norm: str) -> None:
    values, rowptr = attention([4, 0, 7, 2], 11)
    finite = torch.isfinite(swap_costs(values, rowptr, 3, norm))
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: swap_costs(v, rowptr, 3, norm)[finite], values)
    margin = torch.relu(0.5 - swap_costs(values, rowptr, 3, norm)).sum()
    (gradient,) = torch.autograd.grad(margin, values)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().sum() > 0
    assert gradient[-2:].abs().sum() == 0


def test_gradients_are_finite_where_all_values_tie() -> None:
    rowptr = pointer([6, 3])
    values = torch.full((9,), 1 / 6, requires_grad=True)
    for norm in ("l1", "l2", "linf"):
        torch.relu(0.1 - swap_costs(values, rowptr, 2, norm)).sum().backward()
        assert values.grad is not None
        assert torch.isfinite(values.grad).all()


def slow_loss(w: Tensor, v: Tensor, rowptr: Tensor, k: int, scope: str, form: str) -> float:
    pieces = rowptr if scope == "node" else torch.tensor([0, len(w)])
    a, b = slow_mask(w, pieces, k), slow_mask(v, pieces, k)
    total = sum(float(abs(w[e] - v[e])) * (int(a[e]) + int(b[e])) for e in range(len(w)))
    nodes = max(1, sum(1 for row in split(w, rowptr) if len(row)))
    if form == "tv":
        return total / 4 / nodes
    return total / (2 * k) / (nodes if scope == "node" else 1)


@given(
    rows(columns=2), st.integers(1, 9), st.sampled_from(["node", "graph"]), st.sampled_from(["tv", "paper"])
)
def test_surrogate_equals_a_loop(case: tuple[Tensor, ...], k: int, scope: str, form: str) -> None:
    w, v, rowptr = case
    expected = slow_loss(w, v, rowptr, k, scope, form)
    assert topk_l1(w, v, rowptr, k, scope, form=form).item() == pytest.approx(expected, abs=1e-12)
    again = topk_l1(w, v, rowptr, k, scope, form=form, known=topk_mask(w, rowptr, k, scope), factor=3.0)
    assert again.item() == pytest.approx(3 * expected, abs=1e-12)


def test_surrogate_is_total_variation_for_large_k_and_has_a_gradient() -> None:
    w, rowptr = attention([4, 0, 6, 1], 1)
    v, _ = attention([4, 0, 6, 1], 2)
    v.requires_grad_()
    variation = (
        sum(0.5 * (a - b).abs().sum() for a, b in zip(split(w, rowptr), split(v, rowptr), strict=True)) / 3
    )
    for k, scope in [(None, "node"), (6, "node"), (99, "graph"), (11, "graph")]:
        torch.testing.assert_close(topk_l1(w, v, rowptr, k, scope), variation)
    assert torch.autograd.gradcheck(lambda x: topk_l1(w, x, rowptr, 2), v)


def test_nothing_to_rank() -> None:
    empty, rowptr = torch.zeros(0), pointer([0, 0, 0])
    assert topk_mask(empty, rowptr, 2).shape == (0,)
    assert overlap(empty.bool(), empty.bool(), rowptr).tolist() == [1.0, 1.0, 1.0]
    assert swap_costs(empty, rowptr, 2).shape == (3, 0)
    assert topk_l1(empty, empty, rowptr, 2).item() == 0.0
    assert ranks_in_rows(empty, rowptr).shape == (0,)
    assert leaders(empty, rowptr, 70).tolist() == [[-1] * 70] * 3
    assert scoped_rows(rowptr, 0, "graph").tolist() == [0, 0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda v, p: topk_mask(v, p, 0), "use `k=None`"),
        (lambda v, p: topk_mask(v, p, 2.0), "`k` must be at least 1"),  # type: ignore[arg-type]
        (lambda v, p: topk_mask(v, p, 2, "edge"), "`scope` must be one of node, graph"),
        (lambda v, p: swap_costs(v, p, 2, "l3"), "`norm` must be one of"),
        (lambda v, p: topk_mask(v[:-1], p, 2), "`rowptr` ends at 5"),
        (lambda v, p: topk_mask(v, p.int(), 2), "`rowptr` must be an int64"),
        (lambda v, p: ranks_in_rows(torch.stack([v, v], 1), p), "average the heads"),
        (lambda v, p: overlap(v > 0, v[:-1] > 0, p), "match the edges"),
        (lambda v, p: topk_l1(v, v[:-1], p, 2), "match the edges"),
        (lambda v, p: topk_l1(v, v, p, None, form="paper"), "divides by it"),
        (lambda v, p: topk_l1(v, v, p, 2, form="half"), "`form` must be one of"),
    ],
)
def test_bad_input_is_named(call: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call(torch.arange(5.0), pointer([2, 3]))  # type: ignore[operator]


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Callable[..., object], types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.numel = max(self.numel, made.numel())
        return made


def test_a_set_of_thousands_takes_no_more_memory_than_the_edges() -> None:
    nodes, k = 2_000, 1_500
    rowptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.full((nodes,), nodes - 1)])
    values = torch.rand(nodes - 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with Largest() as largest:
        margin = swap_margin(values, rowptr, k, 0.1)
    assert largest.numel <= 2 * nodes
    ordered, count = values.sort(descending=True).values, nodes - 1 - k
    costs = (ordered[k - count : k].flip(0) - ordered[k:]).cumsum(0) / torch.arange(1, count + 1)
    assert margin.item() == pytest.approx(float(((0.1 - costs).clamp(min=0) / 0.1).mean()))


def test_more_costs_than_memory_holds_are_refused() -> None:
    nodes = 60_000
    rowptr = torch.cat([torch.zeros(1, dtype=torch.long), torch.full((nodes,), nodes - 1)])
    values = torch.rand(nodes - 1)
    with Largest() as largest, pytest.raises(InputError, match="smaller `k`"):
        swap_costs(values, rowptr, 10_000)
    with pytest.raises(InputError, match="smaller `count`"):
        leaders(values, rowptr, 10**9)
    assert largest.numel <= 2 * nodes
