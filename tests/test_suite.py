"""The test command of the README: a worker that dies fails the run at once, and no size is taken on trust."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fgai import checks
from fgai.errors import InputError

MAKEFILE = Path(__file__).parents[1] / "Makefile"


def test_a_dead_worker_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_dies.py").write_text(
        "import os, signal\n\ndef test_dies():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    (tmp_path / "test_passes.py").write_text("def test_passes():\n    pass\n")
    (options,) = re.findall(r"-m pytest (-m .*-n .*)", MAKEFILE.read_text())
    command = [sys.executable, "-m", "pytest", *shlex.split(options), "-p", "no:cacheprovider", "."]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1 and run.stdout.count("crashed while running") == 2, run.stdout


@pytest.mark.parametrize(("count", "fits"), [(10, True), (10**12, False), (2**62, False)])
def test_sizes_are_checked_before_allocation(count: int, fits: bool) -> None:
    if fits:
        checks.memory(count, 8, "count")
    else:
        with pytest.raises(InputError, match=r"`count` needs .* GB of memory, and .* GB are free; lower it"):
            checks.memory(count, 8, "count")
