"""What tests of stored graphs share."""

from __future__ import annotations

from pathlib import Path

HEADING = 128
"""Bytes of an `.npy` file before its numbers."""


def array_bytes(folder: Path) -> int:
    """Bytes of the files in a folder, without the headings of arrays."""
    return sum(file.stat().st_size - HEADING * (file.suffix == ".npy") for file in folder.iterdir())
