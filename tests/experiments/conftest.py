"""Fixtures of the bench suites."""

from __future__ import annotations

import pytest

from experiments import Store
from support import bench_cases as cases


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """Every grid, run; shared, and read once, so no test may write to it."""
    return cases.everything(Store(tmp_path_factory.mktemp("results")))
