"""Real processes of the command line at the price of a fork.

Importing takes seconds, so one process imports everything once and then forks a child for every command:
each has its own standard streams, folder, signals and exit code, and runs the entry point of the script, or
Python code after the word `-c`.
"""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

PARENT = r"""
import json, os, sys
from typer.main import get_command
from fgai.cli import app, main
sys.path.insert(0, sys.argv[1])
import support.short_threat, support.warm
sys.path.pop(0)
for command in get_command(app).commands.values():
    command.loaded
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(asked["cwd"])
        os.environ.update(asked["env"])
        for fd, name, flags in ((0, os.devnull, os.O_RDONLY), (1, asked["out"], 1), (2, asked["err"], 1)):
            os.dup2(os.open(name, flags | (os.O_CREAT | os.O_TRUNC if fd else 0), 0o600), fd)
        words = asked["words"]
        code = 0
        try:
            if words[0] == "-c":
                sys.argv = ["-c", *words[2:]]
                exec(words[1], {"__name__": "__main__"})
            else:
                sys.argv = ["fgai", *words]
                main()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        except BaseException:
            import traceback
            traceback.print_exc()
            code = 99
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""

UNHEARD = 20
"""Seconds after which a command that still runs did not hear Ctrl-C; saving what there is takes far less."""


class Done(NamedTuple):
    """What a process left behind."""

    code: int
    out: str
    err: str


class Processes:
    """Starts commands, one at a time.

    Args:
        scratch: folder for the streams.
    """

    def __init__(self, scratch: Path) -> None:
        self._streams = scratch / "out.txt", scratch / "err.txt"
        quiet = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        drop = ("FGAI_DATA", "FGAI_DEBUG", "COLUMNS", "FORCE_COLOR")
        self._parent = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(Path(__file__).parent.parent)],
            env={**{k: v for k, v in os.environ.items() if k not in drop}, **quiet, "TERM": "xterm"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._line() == "ready"

    def close(self) -> None:
        """End the process that forks."""
        assert self._parent.stdin is not None
        self._parent.stdin.close()
        self._parent.wait(30)

    def run(self, *words: object, cwd: Path, **env: str) -> Done:
        """Run a command to its end."""
        self.start(*words, cwd=cwd, **env)
        return self.finish()

    def interrupt(self, *words: object, cwd: Path, when: str) -> Done:
        """Press Ctrl-C as soon as standard error holds `when`.

        A press that ends nothing is told as a warning and repeated; a command that stays is killed.
        """
        child = self.start(*words, cwd=cwd)
        deadline = time.monotonic() + 120
        while when not in self.read()[1] and time.monotonic() < deadline and self._alive(child):
            time.sleep(0.02)
        for press in (signal.SIGINT, signal.SIGINT, signal.SIGKILL):
            if not self._alive(child):
                break
            os.kill(child, press)
            patience = time.monotonic() + UNHEARD
            while self._alive(child) and time.monotonic() < patience:
                time.sleep(0.02)
            if self._alive(child):
                warnings.warn(f"{press.name} was not heard by {words} in {UNHEARD} s", stacklevel=2)
        return self.finish()

    def on_a_terminal(self, *words: object, cwd: Path, **env: str) -> Done:
        """Run a command to its end with a terminal as its standard error."""
        ours, theirs = pty.openpty()
        child = self.start(*words, cwd=cwd, terminal=os.ttyname(theirs), **env)
        shown = b""
        while self._alive(child) or select.select([ours], [], [], 0)[0]:
            if select.select([ours], [], [], 0.05)[0]:
                shown += os.read(ours, 4096)
        os.close(theirs)
        os.close(ours)
        return self.finish()._replace(err=shown.decode())

    def start(self, *words: object, cwd: Path, terminal: str = "", **env: str) -> int:
        """Start a command and return its process; `finish` waits for it, and only then may the next begin."""
        for path in self._streams:
            path.write_text("")
        out, err = map(str, self._streams)
        err = terminal or err
        asked: dict[str, Any] = {"words": [str(word) for word in words], "cwd": str(cwd), "env": env}
        assert self._parent.stdin is not None
        self._parent.stdin.write(json.dumps({**asked, "out": out, "err": err}) + "\n")
        self._parent.stdin.flush()
        return int(self._line())

    @staticmethod
    def _alive(child: int) -> bool:
        return Path(f"/proc/{child}").exists()  # reaped at once, so what is there runs

    def finish(self) -> Done:
        """Wait for the command that was started."""
        return Done(int(self._line()), *self.read())

    def read(self) -> tuple[str, str]:
        """Return what was written so far to both streams."""
        out, err = (path.read_text() for path in self._streams)
        return out, err

    def _line(self) -> str:
        assert self._parent.stdout is not None
        return self._parent.stdout.readline().strip()
