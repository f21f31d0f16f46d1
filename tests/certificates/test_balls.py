"""Balls per node: projection against a slow minimiser, steps against the dual norm."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq, minimize
from scipy.stats import kstest
from torch import Tensor

from fgai.errors import InputError
from support import balls
from support.balls import _norms, project, random_point, steepest
from support.csr_rows import pointer, rows, split

NORMS = ["l1", "l2", "linf"]
ORDER = {"l1": 1, "l2": 2, "linf": np.inf}
RADII = st.sampled_from([0.0, 0.01, 0.3, 1.0, 40.0])


def nearest(x: np.ndarray, radius: float, norm: str) -> np.ndarray:
    """The nearest point of one ball, for l1 by solving for the threshold with a root finder."""
    if np.linalg.norm(x, ORDER[norm]) <= radius:
        return x
    if norm == "linf":
        return np.array([min(max(v, -radius), radius) for v in x])
    if norm == "l2":
        return x * radius / np.linalg.norm(x)
    gap = lambda t: np.maximum(np.abs(x) - t, 0).sum() - radius  # noqa: E731
    theta = brentq(gap, 0, np.abs(x).max(), xtol=1e-15)
    return np.sign(x) * np.maximum(np.abs(x) - theta, 0)


@given(rows(), RADII, st.sampled_from(NORMS))
def test_projection_is_nearest_inside_and_idempotent(
    case: tuple[Tensor, Tensor], radius: float, norm: str
) -> None:
    x, rowptr = case
    got = project(x, rowptr, radius, norm)
    assert (_norms(got, rowptr, norm) <= radius * (1 + 1e-12)).all()
    torch.testing.assert_close(project(got, rowptr, radius, norm), got, rtol=1e-12, atol=1e-12)
    for a, b in zip(split(x, rowptr), split(got, rowptr), strict=True):
        if len(a):
            np.testing.assert_allclose(b, nearest(a.numpy(), radius, norm), atol=1e-9)


@pytest.mark.parametrize("norm", NORMS)
def test_projection_equals_a_general_purpose_minimiser(norm: str) -> None:
    x = torch.tensor([0.9, -0.7, 0.1, 0.35, -0.05], dtype=torch.float64)
    got = project(x, pointer([5]), 0.6, norm).numpy()
    # x = positive - negative turns the l1 constraint into a smooth one.
    limit = {
        "l1": lambda z: 0.6 - z.sum(),
        "l2": lambda z: 0.6**2 - ((z[:5] - z[5:]) ** 2).sum(),
        "linf": lambda z: 0.6 - np.abs(z[:5] - z[5:]),
    }[norm]
    answer = minimize(
        lambda z: ((z[:5] - z[5:] - x.numpy()) ** 2).sum(),
        np.full(10, 0.01),
        bounds=[(0, None)] * 10,
        constraints={"type": "ineq", "fun": limit},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    np.testing.assert_allclose(got, answer.x[:5] - answer.x[5:], atol=2e-5)


@given(rows(), RADII)
def test_l1_thresholds_equal_those_by_sorting(case: tuple[Tensor, Tensor], radius: float) -> None:
    x, rowptr = case
    limit = torch.full((len(rowptr) - 1,), radius, dtype=torch.float64)
    thresholds = balls._l1_threshold(x, rowptr, limit)
    for row, threshold in zip(split(x.abs(), rowptr), thresholds, strict=True):
        ordered = row.sort(descending=True).values
        excess = (ordered.cumsum(0) - radius) / torch.arange(1, len(row) + 1)
        used = max(1, int((ordered > excess).sum()))  # with R = 0 none, and θ is the largest entry
        sorting = excess[used - 1] if row.sum() > radius else torch.zeros_like(threshold)
        torch.testing.assert_close(threshold, sorting, rtol=1e-9, atol=1e-12)


def test_rows_of_very_different_size_do_not_disturb_each_other() -> None:
    rowptr = pointer([3, 2, 3])
    x = torch.tensor([1e30, -1e30, 1.0, 0.5, -0.25, 1e-30, 2e-30, -1e-30], dtype=torch.float64)
    limit = torch.full((3,), 0.5, dtype=torch.float64)
    theta = balls._l1_threshold(x.abs(), rowptr, limit)
    torch.testing.assert_close(theta, torch.tensor([1e30, 0.125, 0.0], dtype=torch.float64))
    for norm in NORMS:
        for dtype in (torch.float32, torch.float64):
            got = project(x.to(dtype), rowptr, 0.5, norm)
            assert torch.isfinite(got).all()
            assert (_norms(got, rowptr, norm) <= 0.5 * (1 + 1e-6)).all()


@given(rows(columns=3), st.sampled_from(NORMS), st.integers(0, 99))
def test_heads_and_radii_per_node_are_separate_balls(case: tuple[Tensor, ...], norm: str, seed: int) -> None:
    *columns, rowptr = case
    x = torch.stack(columns, 1)
    generator = torch.Generator().manual_seed(seed)
    radius = torch.rand(len(rowptr) - 1, generator=generator, dtype=torch.float64)
    together = project(x, rowptr, radius, norm)
    step = steepest(x, rowptr, radius, norm)
    for h, column in enumerate(columns):
        torch.testing.assert_close(together[:, h], project(column, rowptr, radius, norm))
        torch.testing.assert_close(step[:, h], steepest(column, rowptr, radius, norm))
        for i, row in enumerate(split(column, rowptr)):
            alone = project(row, pointer([len(row)]), radius[i].item(), norm)
            torch.testing.assert_close(together[rowptr[i] : rowptr[i + 1], h], alone)


@given(rows(), st.sampled_from(NORMS))
def test_norms_equal_numpy(case: tuple[Tensor, Tensor], norm: str) -> None:
    x, rowptr = case
    expected = [np.linalg.norm(r.numpy(), ORDER[norm]) if len(r) else 0.0 for r in split(x, rowptr)]
    np.testing.assert_allclose(_norms(x, rowptr, norm), expected, rtol=1e-12, atol=1e-150)
    assert torch.isfinite(_norms(x.float() * 1e30, rowptr, "l2")).all()


@given(rows(), st.sampled_from(NORMS), st.integers(0, 2**16))
def test_no_point_of_the_ball_rises_more_than_the_steepest(
    case: tuple[Tensor, Tensor], norm: str, seed: int
) -> None:
    gradient, rowptr = case
    step = steepest(gradient, rowptr, 0.7, norm)
    assert (_norms(step, rowptr, norm) <= 0.7 * (1 + 1e-12)).all()
    generator = torch.Generator().manual_seed(seed)
    for i, row in enumerate(split(gradient, rowptr)):
        mine = float((row * step[rowptr[i] : rowptr[i + 1]]).sum())
        dual = {"l1": np.inf, "l2": 2, "linf": 1}[norm]
        assert mine == pytest.approx(0.7 * np.linalg.norm(row.numpy(), dual) if len(row) else 0.0, abs=1e-12)
    point = random_point(rowptr, len(gradient), 0.7, norm, generator=generator, dtype=torch.float64)
    for a, b in zip(split(gradient * point, rowptr), split(gradient * step, rowptr), strict=True):
        assert float(a.sum()) <= float(b.sum()) + 1e-12


def test_zero_gradient_does_not_move_and_ties_take_the_first() -> None:
    rowptr = pointer([2, 0, 3])
    for norm in NORMS:
        assert steepest(torch.zeros(5), rowptr, 1.0, norm).tolist() == [0.0] * 5
        assert torch.isfinite(steepest(torch.full((5,), 1e-44), rowptr, 1.0, norm)).all()
        assert torch.isfinite(steepest(torch.full((5,), 1e38), rowptr, 1.0, norm)).all()
    tied = steepest(torch.tensor([1.0, -1.0, 0.5, -2.0, 2.0]), rowptr, 1.0, "l1")
    assert tied.tolist() == [1.0, 0.0, 0.0, -1.0, 0.0]


def test_random_points_are_uniform() -> None:
    # In d dimensions the norm of a uniform point satisfies P(norm <= t R) = t^d.
    degrees = [3] * 400 + [0] + [2] * 400
    rowptr = pointer(degrees)
    for norm in NORMS:
        generator = torch.Generator().manual_seed(4)
        point = random_point(rowptr, 2000, 0.2, norm, generator=generator, dtype=torch.float64)
        size = _norms(point, rowptr, norm) / 0.2
        assert (size <= 1 + 1e-12).all()
        uniform = torch.cat([size[:400] ** 3, size[401:] ** 2])
        assert kstest(uniform.numpy(), "uniform").pvalue > 0.01
        assert abs(float(point.sign().mean())) < 0.1
        again = random_point(
            rowptr, 2000, 0.2, norm, generator=torch.Generator().manual_seed(4), dtype=torch.float64
        )
        assert torch.equal(point, again)
        assert random_point(rowptr, 2000, 0.2, norm, generator=generator).dtype == torch.float32
        assert (random_point(rowptr, 2000, 0.0, norm, generator=generator) == 0).all()


def test_nothing_to_perturb() -> None:
    empty, rowptr = torch.zeros(0), pointer([0, 0, 0])
    for norm in NORMS:
        assert project(empty, rowptr, 1.0, norm).shape == (0,)
        assert steepest(empty, rowptr, 1.0, norm).shape == (0,)
        assert _norms(empty, rowptr, norm).tolist() == [0.0, 0.0, 0.0]
        assert random_point(rowptr, 0, 1.0, norm, generator=torch.Generator()).shape == (0,)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, p: project(x, p, -1.0), "`radius` must be at least 0"),
        (lambda x, p: project(x, p, torch.tensor([0.1, -0.1])), "must not be negative"),
        (lambda x, p: project(x, p, torch.ones(3)), r"one per node, \[2\]"),
        (lambda x, p: project(x, p, 1.0, "l0"), "`norm` must be one of"),
        (lambda x, p: project(x[:2], p, 1.0), "ends at 5, but there are 2 entries of `delta`"),
        (lambda x, p: steepest(x, p, -0.1), "`step_size` must be at least 0"),
    ],
)
def test_bad_input_is_named(call: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call(torch.arange(5.0), pointer([2, 3]))  # type: ignore[operator]
