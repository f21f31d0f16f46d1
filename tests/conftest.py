"""Fixtures shared by all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# The first example of a test may compile a kernel, so a deadline per example means nothing.
settings.register_profile("fgai", deadline=None, max_examples=50)
settings.load_profile("fgai")

torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder of the real datasets, or skip."""
    root = os.environ.get("FGAI_DATA")
    if not root or not Path(root).is_dir():
        pytest.skip("set FGAI_DATA to the folder of the real datasets to run this test")
    return Path(root)
