"""Conversions that were killed go on from their last finished stage, to the same bytes."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fgai.errors import DataError, FgaiError, FgaiWarning
from fgai.large import convert, edge_lists, sort, write
from fgai.large.arrays import _ArrayFile
from fgai.large.write import _file_identity

NODES, EDGES = 60, 400
FORK = multiprocessing.get_context("fork")
HIDDEN = Path(".stored.partial")
pytestmark = pytest.mark.filterwarnings("ignore:.*duplicate edges were merged")
OPTIONS: dict[str, Any] = {"features": "x.npy", "labels": "y.npy", "undirected": True}


@pytest.fixture(autouse=True)
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edge list with weights, features and labels, in parts so small that every stage has many."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(edge_lists, "PART", 64)
    monkeypatch.setattr(sort, "BLOCK", 7)
    write_edges()
    np.save("x.npy", np.random.default_rng(1).normal(size=(NODES, 3)))
    np.save("y.npy", np.arange(NODES) % 4)


def write_edges(seed: int = 0) -> None:
    source, destination = np.random.default_rng(seed).integers(0, NODES, (2, EDGES))
    lines = (f"{a},{b},{(a + b) / 8}\n" for a, b in zip(source, destination, strict=True))
    Path("e.csv").write_text("source,destination,weight\n" + "".join(lines))


def content(folder: str) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def converted(name: str, **options: Any) -> dict[str, bytes]:
    convert("e.csv", name, **{**OPTIONS, **options})
    return content(name)


def hang(ready: Any) -> None:
    ready.set()
    time.sleep(60)


def killed_at(prepare: Callable[[pytest.MonkeyPatch, Callable[[], None]], None], **options: Any) -> None:
    """Convert in another process, and kill it when it calls the function that `prepare` was given."""
    ready = FORK.Event()

    def work() -> None:
        prepare(pytest.MonkeyPatch(), lambda: hang(ready))
        converted("stored", **options)

    running = FORK.Process(target=work)
    running.start()
    assert ready.wait(30)
    assert running.is_alive() and not Path("stored").exists()
    running.kill()
    running.join()


def behind(module: Any, name: str, calls: int = 1) -> Callable[..., None]:
    """Hang after a function was called so many times."""

    def prepare(patch: pytest.MonkeyPatch, stop: Callable[[], None]) -> None:
        original, seen = getattr(module, name), []

        def called(*given: Any, **options: Any) -> Any:
            found = original(*given, **options)
            seen.append(1)
            if len(seen) == calls:
                stop()
            return found

        patch.setattr(module, name, called)

    return prepare


def before_the_folder_moves(patch: pytest.MonkeyPatch, stop: Callable[[], None]) -> None:
    patch.setattr(write, "_move", lambda *_: stop())


MOMENTS = {
    "features half": (behind(_ArrayFile, "append"), []),
    "nodes written": (behind(import_module("fgai.large.convert"), "_write_nodes"), []),
    "nodes recorded": (behind(write, "write_atomic"), ["nodes"]),
    "edges half": (behind(edge_lists, "_by_columns", 5), ["nodes"]),
    "edges written": (behind(sort, "_write_spool"), ["nodes"]),
    "edges recorded": (behind(write, "write_atomic", 2), ["nodes", "edges"]),
    "places half": (behind(sort, "_positions", 9), ["nodes", "edges"]),
    "places written": (behind(sort, "_move_to_rows"), ["nodes", "edges"]),
    "places recorded": (behind(write, "write_atomic", 3), ["nodes", "edges", "places"]),
    "rows half": (behind(sort, "_check_duplicates", 9), ["nodes", "edges", "places"]),
    "rows recorded": (behind(write, "write_atomic", 4), ["nodes", "edges", "places", "rows"]),
    "no fingerprint": (behind(write, "write_atomic", 5), ["nodes", "edges", "places", "rows"]),
    "whole": (before_the_folder_moves, ["nodes", "edges", "places", "rows", "fingerprint"]),
}


def recorded() -> list[str]:
    path = HIDDEN / "work.json"
    return list(json.loads(path.read_text())["stages"]) if path.exists() else []


def refuse_to_read(*_: Any) -> None:
    raise AssertionError("edges are read again")


@pytest.mark.many
@pytest.mark.parametrize("moment", MOMENTS)
def test_goes_on_to_the_same_bytes(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare, stages = MOMENTS[moment]
    killed_at(prepare)
    assert recorded() == stages
    wanted = converted("unbroken/stored")
    if "edges" in stages:
        monkeypatch.setattr(edge_lists, "_by_columns", refuse_to_read)
    assert converted("stored") == wanted
    assert not HIDDEN.exists()


def test_killed_again_and_again() -> None:
    """At whatever moments: a little later each time, until one comes to its end."""
    wanted, seconds = converted("unbroken/stored"), 0.0
    while not Path("stored").exists():
        running = FORK.Process(target=converted, args=("stored",))
        running.start()
        time.sleep(seconds)
        running.kill()
        running.join()
        seconds += 0.005
    assert content("stored") == wanted
    with pytest.warns(FgaiWarning, match="stored exists already, complete and of these sources"):
        assert converted("stored") == wanted
    source = np.load("stored/source.npy")
    np.save("stored/source.npy", source[::-1])
    with pytest.raises(DataError, match="damaged"):
        converted("stored")


@pytest.mark.parametrize("change", ["edges", "features", "options", "damage"])
def test_what_changed_begins_anew_and_says_so(change: str) -> None:
    killed_at(behind(sort, "_move_to_rows"))
    words, options = "its sources or options have changed", {}
    if change == "edges":
        write_edges(seed=5)
    elif change == "features":
        x, found = np.load("x.npy"), Path("x.npy").stat()
        x[31, 1] += 1
        np.save("x.npy", x)
        os.utime("x.npy", ns=(found.st_atime_ns, found.st_mtime_ns))  # size and time tell nothing
    elif change == "options":
        options = {"undirected": False}
    else:
        words = "its files have changed"
        os.truncate(HIDDEN / "files" / "source.spool.npy", 40)
    with pytest.warns(FgaiWarning, match=words):
        found = converted("stored", **options)
    assert found == converted("unbroken/stored", **options)


def test_what_is_left_can_be_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    killed_at(behind(sort, "_move_to_rows"))
    with monkeypatch.context() as patch:
        patch.setattr(edge_lists, "_by_columns", refuse_to_read)
        with pytest.raises(AssertionError, match="read again"):
            converted("stored", resume=False)
    assert not HIDDEN.exists()
    assert converted("stored") == converted("unbroken/stored")


def test_ctrl_c_keeps_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    for name, stages in (("_write_spool", ["nodes"]), ("_write_rows", ["nodes", "edges", "places"])):
        with monkeypatch.context() as patch:
            patch.setattr(sort, name, stop)
            with pytest.raises(KeyboardInterrupt):
                converted("stored")
        assert recorded() == stages
    wanted = converted("unbroken/stored")
    monkeypatch.setattr(edge_lists, "_by_columns", refuse_to_read)
    assert converted("stored") == wanted


def test_a_failure_leaves_nothing() -> None:
    Path("e.csv").write_text(Path("e.csv").read_text() + "1,x,2\n")
    with pytest.raises(DataError, match="line 402"):
        converted("stored")
    assert not HIDDEN.exists() and not Path("stored").exists()


def test_two_at_once() -> None:
    ready = FORK.Event()

    def work() -> None:
        behind(sort, "_move_to_rows")(pytest.MonkeyPatch(), lambda: hang(ready))
        converted("stored")

    running = FORK.Process(target=work)
    running.start()
    assert ready.wait(30)
    with pytest.raises(FgaiError, match="another process is writing stored"):
        converted("stored")
    running.kill()
    running.join()
    assert converted("stored") == converted("unbroken/stored")


def test_a_graph_that_was_being_replaced_is_put_back() -> None:
    wanted = converted("stored")
    HIDDEN.mkdir()
    Path("stored").rename(HIDDEN / "old")  # and there the process was killed
    with pytest.raises(DataError, match="stored exists already"):
        converted("stored")
    assert content("stored") == wanted
    shutil.rmtree("stored")
    assert converted("stored") == wanted and not HIDDEN.exists()


@pytest.mark.parametrize("size", [0, 1, 16, 17, 300, 1025, 10_000])
def test_sources_are_told_apart_from_front_to_end(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "SAMPLE", 16)
    path, hashes = Path("source"), []
    whole = size <= 16 * write.SAMPLES
    for place in [None, *(range(size) if whole else (0, 15, size - 16, size - 1))]:
        raw = bytearray(size)
        if place is not None:
            raw[place] = 1
        path.write_bytes(raw)
        hashes.append(_file_identity(path)["hash"])
    assert len(set(hashes)) == len(hashes) == (size + 1 if whole else 5)
