"""Paired intervals: a handful of nodes proves nothing, and noise is seldom taken for a difference."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from fgai.evaluation.summary import paired_interval


def shares(gained: int, lost: int, nodes: int = 140) -> tuple[np.ndarray, np.ndarray]:
    """What two models get right: the second `gained` nodes more and `lost` others less."""
    first, second = np.zeros(nodes, bool), np.zeros(nodes, bool)
    first[nodes // 2 :] = second[nodes // 2 :] = True
    second[:gained], second[nodes - lost :] = True, False
    return first, second


@pytest.mark.parametrize("nodes", [140, 1000])
@pytest.mark.parametrize(
    ("gained", "lost"), [(3, 0), (5, 0), (6, 0), (8, 1), (9, 1), (12, 7), (30, 10), (0, 6)]
)
def test_as_the_exact_sign_test(gained: int, lost: int, nodes: int) -> None:
    found = paired_interval(*shares(gained, lost, nodes))
    assert found is not None and found.nodes == nodes
    assert found.difference == pytest.approx((gained - lost) / nodes)
    assert found.exceeds_noise == (binomtest(gained, gained + lost).pvalue < 0.05)
    assert (found.low > 0) == (found.exceeds_noise and gained > lost)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_few_nodes_prove_nothing(nodes: int) -> None:
    found = paired_interval(np.zeros(nodes), np.ones(nodes))
    assert found is not None and not found.exceeds_noise


def test_noise_is_seldom_a_difference() -> None:
    draw = np.random.default_rng(0)
    wrong = 0
    for _ in range(600):
        first = draw.random(140) < 0.78
        second = np.where(draw.random(140) < 0.15, draw.random(140) < 0.78, first)
        found = paired_interval(first, second)
        wrong += found is not None and found.exceeds_noise
    assert wrong / 600 <= 0.06


def test_layers_count_alike_and_nodes_once() -> None:
    first = np.array([[0.2, 0.4, np.nan, 0.6], [0.0, np.nan, np.nan, 0.5]])
    second = np.array([[0.4, 0.8, 0.3, 0.6], [0.6, 0.1, np.nan, 0.7]])
    found = paired_interval(first, second)
    assert found is not None and found.nodes == 3
    assert found.difference == pytest.approx(((0.2 + 0.4 + 0.0) / 3 + (0.6 + 0.2) / 2) / 2)
    only = paired_interval(first, second, np.array([[True, False, True, False], [False] * 4]))
    assert only is not None and only.nodes == 1 and only.difference == pytest.approx(0.2)


def test_nothing_to_compare() -> None:
    assert paired_interval(np.full(3, np.nan), np.ones(3)) is None
    assert paired_interval(np.ones(3), np.ones(4)) is None
