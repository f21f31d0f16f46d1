"""A pipe in place of a file is refused at once; opening it would wait for a writer for ever."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import fgai
from fgai.errors import FgaiError
from support.cli_cases import refused
from support.file_cases import KINDS

SECONDS = 10


class Hang(BaseException):
    """Reading did not end."""


def stop(*_: object) -> None:
    raise Hang


@pytest.fixture(autouse=True)
def alarm() -> Any:
    before = signal.signal(signal.SIGALRM, stop)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", sorted(KINDS))
def test_every_kind_of_file(name: str, tmp_path: Path) -> None:
    for number, file in enumerate(KINDS[name].write(tmp_path)):
        kept = tmp_path / f"kept {number}"
        file.rename(kept)
        os.mkfifo(file)
        signal.alarm(SECONDS)
        with suppress(FgaiError):  # a part of some datasets repeats another and is not read
            KINDS[name].read(tmp_path)
        signal.alarm(0)
        file.unlink()
        kept.rename(file)


@pytest.mark.parametrize(
    "read",
    [
        fgai.load_model,
        fgai.reports.cards.Card.load,
        fgai.evaluation.EvaluationRecord.load,
        lambda path: fgai.trackers.LogFile(path.with_name("pipe.jsonl")),
        fgai.large.StoredGraph,
        lambda path: fgai.load_graph(path.with_name("pipe.npz")),
    ],
)
def test_readers(read: Callable[[Path], Any], tmp_path: Path) -> None:
    for name in ("pipe", "pipe.jsonl", "pipe.npz", "pipe.safetensors"):
        os.mkfifo(tmp_path / name)
    signal.alarm(SECONDS)
    with pytest.raises(FgaiError):
        read(tmp_path / "pipe")


def test_the_command_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    signal.alarm(SECONDS)
    assert "regular file" in refused("report", "pipe.json", cwd=tmp_path)
    assert "regular file" in refused("card", "pipe.json", cwd=tmp_path)
