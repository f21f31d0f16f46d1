"""Commands through a process of their own, or in this one where that is enough."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner, Result

from fgai.cli import app
from support.cli_process import Done, Processes


def commands(command: Any = None, name: str = "") -> dict[str, Any]:
    """Every command by its words, imported."""
    command = command or get_command(app)
    command = getattr(command, "loaded", command)
    inner = getattr(command, "commands", {})
    found = {} if inner else {name: command}
    for word, child in inner.items():
        found |= commands(child, f"{name} {word}".strip())
    return found


def environment(**more: str) -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if k not in ("FGAI_DATA", "FGAI_DEBUG", "COLUMNS")}
    return {**keep, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **more}


@functools.cache
def processes() -> Processes:
    """What forks the commands that tests run; it ends with the interpreter."""
    scratch = tempfile.TemporaryDirectory(prefix="fgai-streams-")
    atexit.register(scratch.cleanup)
    made = Processes(Path(scratch.name))
    atexit.register(made.close)
    return made


def fgai(*words: object, cwd: Path) -> Done:
    """Run a command as a process of its own."""
    return processes().run(*words, cwd=cwd)


def answer(*words: object, cwd: Path) -> dict[str, Any]:
    """Run with --json and parse standard output, which must hold nothing else."""
    done = fgai(*words, "--json", cwd=cwd)
    assert done.code == 0, done.err
    return json.loads(done.out)


def here(*words: object, cwd: Path) -> Result:
    """Run a command in this process, in a folder."""
    with contextlib.chdir(cwd):
        return CliRunner().invoke(app, list(map(str, words)))


def refused(*words: object, cwd: Path, code: int = 2) -> str:
    done = here(*words, cwd=cwd)
    assert done.exit_code == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr
