"""Fixtures shared by all tests."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import support.short_threat  # noqa: F401, shortens the default threat

# The first example of a test may compile a kernel, so a deadline per example means nothing.
settings.register_profile("quick", deadline=None, max_examples=20)
settings.register_profile("whole", deadline=None, max_examples=60)

# Workers of pytest-xdist share the cores: threads that wait for each other's turn make all of them slower.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, min(2, (os.cpu_count() or 1) // WORKERS)))

MUCH = 1 << 30
"""Bytes of memory from which a file of tests is cleaned up after: this takes a third of a second."""

# A shell starts what runs in its background with Ctrl-C ignored, and all that starts from there inherits it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Draw few examples of a property where slow tests are left out, and many where they run."""
    settings.load_profile("quick" if config.option.markexpr == "not slow" else "whole")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `many`, keep every third case where slow tests are left out."""
    if config.option.markexpr == "not slow":
        cases: Counter[str] = Counter()
        for item in items:
            if item.get_closest_marker("many"):
                name = item.nodeid.partition("[")[0]
                if cases[name] % 3:
                    item.add_marker(pytest.mark.slow)
                cases[name] += 1


def pytest_collection_finish() -> None:
    """Leave modules and tests out of every later collection of garbage: they stay to the end."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of the real datasets, or skip."""
    root = os.environ.get("FGAI_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("set FGAI_DATA to the folder of the real datasets to run this test")
    return Path(root)


@pytest.fixture(autouse=True, scope="module")
def _memory_of_one_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give back what a file of tests keeps: a worker runs hundreds of them, and none may need 2 GB."""
    yield
    for value in vars(request.module).values():
        if hasattr(value, "cache_clear") and value.__module__ == request.module.__name__:
            value.cache_clear()
    if sys.platform != "linux":
        gc.collect()
    elif int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") > MUCH:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
