"""Files of arrays: where room on the disk comes from."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from fgai.large import arrays
from fgai.large.arrays import _scratch
from support.store_cases import HEADING


@pytest.fixture(params=["allocated", "written"])
def without(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to take room: as the system does it, and as on macOS, which does not."""
    if request.param == "written":
        monkeypatch.delattr(os, "posix_fallocate")
        monkeypatch.setattr(arrays, "ZEROS", 1000)


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("shape", [(0, 3), (1,), (250,), (37, 11, 5)])
def test_scratch_holds_zeros_that_lie_on_the_disk(shape: tuple[int, ...], tmp_path: Path) -> None:
    found = _scratch(tmp_path / "room", shape, np.float32)
    assert found.shape == shape and not found.any()
    state = (tmp_path / "room").stat()
    assert state.st_size == HEADING + 4 * np.prod(shape) and state.st_blocks * 512 >= state.st_size
    found[...] = 1.5
    assert (np.asarray(found) == 1.5).all()


@pytest.mark.usefixtures("without")
def test_a_full_disk_is_noticed_at_once(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            _scratch(tmp_path / "room", (4000,), np.float64)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
