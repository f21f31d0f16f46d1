"""Records on disk: whole or not there, and what is wrong with one is named."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from experiments import Store, run_cell, run_grid
from fgai.errors import CheckpointError, FgaiError
from support import bench_cases as cases


class TestStore:
    CELL = cases.tiny()

    def written(self, folder: Path) -> tuple[Store, Path]:
        store = Store(folder)
        return store, store.write(self.CELL, cases.body_of(self.CELL))

    def test_round_trip(self, tmp_path: Path) -> None:
        store, path = self.written(tmp_path)
        record = store.read(self.CELL)
        assert record is not None and record["cell"] == self.CELL.to_dict() and path.is_relative_to(tmp_path)
        assert [r["key"] for r in store.records()] == [self.CELL.key]
        assert store.read(cases.tiny(seed=1)) is None
        assert list(Store(tmp_path / "none").records()) == []

    def test_failed_and_outdated_records_stay_out_of_tables(self, tmp_path: Path) -> None:
        store, path = self.written(tmp_path)
        other = cases.tiny(seed=1)
        store.write(other, {**cases.body_of(other), "status": "failed", "error": "x"})
        record = {**json.loads(path.read_text()), "protocol": 0}
        path.write_text(json.dumps(record))
        assert list(store.records()) == []

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda text: text[: len(text) // 2], "not a whole record"),
            (lambda text: "", "not a whole record"),
            (lambda text: "[]", "not a whole record"),
            (lambda text: text.replace('"schema": 2', '"schema": 7'), "schema 7.*update fgai"),
            (lambda text: text.replace('"schema": 2', '"schema": 0'), "schema 0"),
            (lambda text: text.replace('"status": "done"', '"state": "done"'), "lacks status"),
            (lambda text: text.replace('"epochs": 2', '"epochs": 3'), "another cell under this name"),
        ],
    )
    def test_damage_is_named_and_nothing_overwritten(self, tmp_path: Path, damage: Any, message: str) -> None:
        store, path = self.written(tmp_path)
        text = damage(path.read_text())
        path.write_text(text)
        with pytest.raises(CheckpointError, match=message) as caught:
            store.read(self.CELL)
        assert str(path) in str(caught.value)
        for again in (lambda: run_cell(self.CELL, store), lambda: run_grid([self.CELL], store)):
            with pytest.raises(CheckpointError, match=message):
                again()
        assert path.read_text() == text

    def test_the_old_name_of_a_method_is_not_taken_for_the_new_one(self, tmp_path: Path) -> None:
        """What schema 1 calls `fgai-paper` is the variant with injected nodes."""
        store, cell = Store(tmp_path), cases.tiny(method="fgai-paper")
        path = store.write(cell, cases.body_of(cell))
        path.write_text(path.read_text().replace('"schema": 2', '"schema": 1'))
        (record,) = store.records()
        assert record["cell"]["method"] == "fgai-injection"
        with pytest.raises(CheckpointError, match="another cell under this name"):
            store.read(cell)

    def test_full_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store, path = self.written(tmp_path)
        before = path.read_bytes()

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(FgaiError, match=r"No space left on device; nothing was changed"):
            store.write(self.CELL, cases.body_of(self.CELL))
        with pytest.raises(FgaiError, match="No space left"):
            run_grid([cases.tiny(seed=1)], store)
        assert path.read_bytes() == before and [p for p in path.parent.iterdir() if p != path] == []

    def test_folder_that_cannot_be_written(self, tmp_path: Path) -> None:
        blocked = tmp_path / "results"
        blocked.write_text("a file, no folder")
        with pytest.raises(FgaiError, match="cannot write"):
            run_grid([self.CELL], Store(blocked))
        assert blocked.read_text() == "a file, no folder"

    def test_what_is_derived_is_made_again_once_a_record_changes(self, tmp_path: Path) -> None:
        store, path = self.written(tmp_path)
        made = list[int]()

        def count() -> int:
            made.append(len(list(store.records())))
            return made[-1]

        asked = [store.derived("count", ("evaluate",), count) for _ in range(3)]
        assert asked == [1, 1, 1] and made == [1], "read once"
        other = cases.tiny(seed=1)
        store.write(other, cases.body_of(other))
        assert store.derived("count", ("evaluate",), count) == 2
        os.utime(path, ns=(0, 0))
        assert store.derived("count", ("evaluate",), count) == 2 and len(made) == 3
        store.path(other).unlink()
        assert store.derived("count", ("evaluate",), count) == 1
        assert store.derived("count", ("attack",), count) == 1 and len(made) == 5, "other kinds, other files"

    def test_sweep_takes_old_halves_only(self, tmp_path: Path) -> None:
        store, path = self.written(tmp_path)
        old, new = (path.with_name(f".{path.name}.{word}") for word in ("old", "new"))
        for half in (old, new):
            half.write_text("{")
        os.utime(old, (time.time() - 3600, time.time() - 3600))
        assert store.sweep() == 1
        assert not old.exists() and new.exists() and path.exists()
