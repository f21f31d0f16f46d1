"""Overlap, rank correlation and sharpness against sets, scipy and chance."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import fgai.metrics as fm
from support.csr_rows import attention, pointer, rows, split

DEGREES = [7, 0, 2, 9, 1, 6, 4]


@given(rows(columns=2), st.integers(1, 5))
def test_overlap_counts_only_nodes_with_more_than_k_neighbours(case: tuple[Tensor, ...], k: int) -> None:
    a, b, rowptr = case
    expected, chance = [], []
    for x, y in zip(split(a, rowptr), split(b, rowptr), strict=True):
        if len(x) > k:
            top = [set(np.argsort(-r.numpy(), kind="stable")[:k].tolist()) for r in (x, y)]
            expected.append(len(top[0] & top[1]) / k)
            chance.append(k / len(x))
    got = fm.overlap(a, b, rowptr, k)
    if not expected:
        assert math.isnan(got)
        assert math.isnan(fm.overlap_chance(rowptr, k))
        return
    assert got == pytest.approx(np.mean(expected))
    assert fm.overlap_chance(rowptr, k) == pytest.approx(np.mean(chance))
    per_node = fm.overlap_per_node(a, b, rowptr, k)
    assert per_node[~per_node.isnan()].tolist() == pytest.approx(expected)


def test_overlap_on_touched_nodes() -> None:
    w, rowptr = attention(DEGREES, 1)
    v, _ = attention(DEGREES, 2)
    per_node = fm.overlap_per_node(w, v, rowptr, 3)
    touched = torch.tensor([True, True, False, False, True, True, False])
    assert fm.overlap(w, v, rowptr, 3, nodes=touched) == pytest.approx(float((per_node[0] + per_node[5]) / 2))
    assert fm.overlap(w, v, rowptr, 3, nodes=touched.nonzero().flatten()) == pytest.approx(
        fm.overlap(w, v, rowptr, 3, nodes=touched)
    )
    assert fm.overlap_chance(rowptr, 3, nodes=touched) == pytest.approx((3 / 7 + 3 / 6) / 2)
    assert math.isnan(fm.overlap(w, v, rowptr, 3, nodes=torch.zeros(7, dtype=torch.bool)))


def test_random_rankings_reach_the_chance_level() -> None:
    rowptr = pointer([8, 12, 20, 6] * 60)
    size = int(rowptr[-1])
    a, b = fm.random_ranking(size, 0), fm.random_ranking(size, 1)
    assert fm.overlap(a, b, rowptr) == pytest.approx(fm.overlap_chance(rowptr), abs=0.04)
    assert fm.overlap_graph(a, b, rowptr, k=size // 4) == pytest.approx(0.25, abs=0.04)
    assert fm.rank_correlation(a, b, rowptr) == pytest.approx(0, abs=0.06)


def test_overlap_over_the_graph_equals_sets() -> None:
    w, rowptr = attention(DEGREES, 5)
    v, _ = attention(DEGREES, 6)
    for k in (1, 8, 13):
        top = [set(np.argsort(-x.numpy(), kind="stable")[:k].tolist()) for x in (w, v)]
        assert fm.overlap_graph(w, v, rowptr, k) == pytest.approx(len(top[0] & top[1]) / k)
    assert fm.overlap_graph(w, v, rowptr) == 1.0


@given(rows(columns=2))
def test_rank_correlation_equals_scipy(case: tuple[Tensor, ...]) -> None:
    a, b, rowptr = case
    got = [fm.rank_correlation(a, b, rowptr, nodes=torch.tensor([i])) for i in range(len(rowptr) - 1)]
    for i, (x, y) in enumerate(zip(split(a, rowptr), split(b, rowptr), strict=True)):
        constant = [len(set(r.tolist())) == 1 for r in (x, y)]
        if len(x) < 2:
            assert math.isnan(got[i])
        elif any(constant):
            assert got[i] == (1.0 if all(constant) else 0.0)
        else:
            assert got[i] == pytest.approx(stats.spearmanr(x.numpy(), y.numpy()).statistic, abs=1e-12)


def test_sharpness_equals_scipy_and_has_its_ends() -> None:
    w, rowptr = attention(DEGREES, 7)
    expected = [
        stats.entropy(r, np.full(len(r), 1 / len(r))) / np.log(len(r)) for r in split(w, rowptr) if len(r) > 1
    ]
    assert fm.sharpness(w, rowptr) == pytest.approx(np.mean(expected))
    per_node = fm.sharpness_per_node(w, rowptr)
    assert per_node.isnan().tolist() == [d < 2 for d in DEGREES]
    assert fm.sharpness(fm.uniform_attention(rowptr, len(w)), rowptr) == pytest.approx(0, abs=1e-6)
    one_hot = torch.cat([torch.eye(d)[0] if d else torch.zeros(0) for d in DEGREES])
    assert fm.sharpness(one_hot, rowptr) == 1.0
    assert fm.sharpness(3 * w, rowptr) == pytest.approx(np.mean(expected))
    assert fm.sharpness(torch.zeros_like(w), rowptr) == 0.0
    assert math.isnan(fm.sharpness(torch.ones(2), pointer([1, 0, 1])))
