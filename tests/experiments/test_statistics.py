"""Means, spreads and intervals against numpy and scipy; the paper's numbers against its print."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from experiments.sheet import Published, published
from experiments.statistics import Estimate, estimate, holm, paired

NUMBERS = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=7)


class TestStatistics:
    @given(NUMBERS)
    def test_estimate_is_numpys(self, values: list[float]) -> None:
        found = estimate(values)
        assert found is not None and found.seeds == len(values)
        assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
        assert found.std == pytest.approx(np.std(values, ddof=1), abs=1e-9)

    @given(st.lists(st.tuples(st.floats(-50, 50), st.floats(-50, 50)), min_size=3, max_size=7))
    def test_interval_is_students(self, pairs: list[tuple[float, float]]) -> None:
        ours, theirs = ({seed: pair[i] for seed, pair in enumerate(pairs)} for i in (0, 1))
        found = paired({**ours, 99: 1e6}, {**theirs, 77: -1e6})  # seeds only one of them has do not count
        differences = [a - b for a, b in pairs]
        assert found is not None and found.seeds == len(pairs)
        if np.ptp(differences) < 1e-9:
            assert found.low == pytest.approx(found.high, abs=1e-6)
            return
        test = stats.ttest_rel(*zip(*pairs, strict=True))
        low, high = test.confidence_interval(0.95)
        assert found.p == pytest.approx(test.pvalue, abs=1e-6)
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-6)

    @given(st.lists(st.floats(0, 0.1), max_size=7))
    def test_holm_compares_adjusted_values(self, p: list[float]) -> None:
        ordered = sorted(p)
        adjusted = [max(value * (len(p) - i) for i, value in enumerate(ordered) if value <= one) for one in p]
        assert holm(p) == [value <= 0.05 for value in adjusted]

    def test_too_few(self) -> None:
        assert estimate([]) is None and estimate([3.0]) == Estimate(3.0, 0.0, 1)
        assert (
            paired({0: 1.0, 1: 3.0}, {0: 2.0, 1: 5.0}) is None
            and paired({0: 1.0, 1: 2.0}, {2: 1.0, 3: 2.0}) is None
        )


class TestPaper:
    def test_numbers_spot_checked_by_hand(self) -> None:
        assert published("stability", "g_tvd", ("GAT", "amazon-cs", "vanilla")) == Published(24.4, 15.8)
        assert published("f1", "clean", ("GT", "coauthor-cs", "fgai")) == Published(0.916, 0.0)
        assert published("f_slope", "attacked.minus", ("GAT", "amazon-photo", "vanilla")) == Published(
            1.0594, None
        )
        assert published("ablation", "f1", ("GAT", "amazon-photo", "fgai[SP]")) == Published(0.8616, None)
        assert published("cost", "mib", ("GAT", "amazon-photo", "fgai")) == Published(1300, None)

    def test_other_features_are_another_dataset(self) -> None:
        assert published("f1", "clean", ("GAT", "ogbn-arxiv", "fgai")) is not None
        assert published("f1", "clean", ("GAT", "arxiv-tape", "fgai")) is None
