"""Files are replaced in one step, links are followed, and devices are written to, never replaced."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fgai.errors import FgaiError
from fgai.files import write_atomic
from support.cli_cases import environment, here


def test_a_link_stays_and_the_file_it_names_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "file", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_atomic(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    target.unlink()
    write_atomic(link, "anew")
    assert link.is_symlink() and target.read_text() == "anew"
    assert [path.name for path in (tmp_path / "real").iterdir()] == ["file"]


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(FgaiError, match="cannot write"):
        write_atomic(tmp_path / "a" / "file", "x")
    assert (tmp_path / "a").is_symlink() and (tmp_path / "b").is_symlink()


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, found = tmp_path / "pipe", list[bytes]()
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_atomic(pipe, "through")
    reader.join(10)
    assert found == [b"through"] and stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.fixture
def device() -> Iterator[Path]:
    """A terminal of our own: no file can be made beside it, so nothing breaks should the code be wrong."""
    ours, theirs = os.openpty()
    yield Path(os.ttyname(theirs))
    os.close(ours)
    os.close(theirs)


def test_devices_stay_devices(device: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(device)
    for path in (device, link):
        write_atomic(path, "x")
        assert stat.S_ISCHR(device.stat().st_mode) and link.is_symlink()
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_folders_and_impossible_names_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "null\0byte", tmp_path / ("x" * 999)):
        with pytest.raises(FgaiError, match="cannot write"):
            write_atomic(path, "x")
    assert list(tmp_path.iterdir()) == []


def test_what_is_printed_is_not_lost_when_the_output_is_the_same_file(tmp_path: Path) -> None:
    stdout = tmp_path / "stdout"
    stdout.symlink_to("/proc/self/fd/1")  # as /dev/stdout is; a link of our own, should it be replaced
    code = (
        "import pathlib; from fgai.files import write_atomic; print('before', flush=True);"
        f"write_atomic(pathlib.Path({str(stdout)!r}), 'written\\n'); print('after')"
    )
    with (tmp_path / "log").open("w") as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, env=environment(), check=True, timeout=100)
    assert (tmp_path / "log").read_text().split() == ["before", "written", "after"]
    piped = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
        timeout=100,
    )
    assert piped.stdout.split() == ["before", "written", "after"]


def test_the_command_line_writes_to_a_device(device: Path, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "link").symlink_to(device)
    done = here("bench", "table", "f1", "-o", "link", cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "link").is_symlink() and stat.S_ISCHR(device.stat().st_mode)
