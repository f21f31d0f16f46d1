"""What tests of stored graphs share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

HEADING = 128
"""Bytes of an `.npy` file before its numbers."""


def array_bytes(folder: Path) -> int:
    """Bytes of the files in a folder, without the headings of arrays."""
    return sum(file.stat().st_size - HEADING * (file.suffix == ".npy") for file in folder.iterdir())


def slow(*cases: tuple[Any, ...]) -> list[Any]:
    """Mark cases of a parametrised test slow."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]
