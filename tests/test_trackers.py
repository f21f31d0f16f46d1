"""Logs in files: whole after every epoch, put back when a run goes on, and other files left alone."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import fgai
from fgai.attacks import Budget, PGDInjection
from fgai.errors import CheckpointError, FgaiError, InputError
from fgai.trackers import LogFile, Tracker
from fgai.training import TrainConfig, VanillaRecipe, fit
from fgai.training.resume import FILE
from support.training_cases import GRAPH, fresh

CONFIG = TrainConfig(epochs=7, validate_every=2)
NAMES = ("log.csv", "log.jsonl")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Rows of epochs, numbers as numbers."""
    if path.suffix == ".csv":
        with path.open(newline="") as file:
            found = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
        return [{k: v if k == "run" else float(v) for k, v in row.items()} for row in found]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if "end" not in row]


def training(tracker: Tracker | None, checkpoint: Path | None = None, every: int = 25) -> Any:
    model = fresh()
    return fit(
        model,
        VanillaRecipe(GRAPH),
        CONFIG,
        seed=3,
        progress=False,
        checkpoint=checkpoint,
        checkpoint_every=every,
        tracker=tracker,
    )


class KilledError(Exception):
    """The process ends here."""


def killing(path: Path, at: int, *, logged: bool) -> Tracker:
    """A log that raises at an epoch, before or after it has written it."""

    class Killing(LogFile):
        def on_epoch(self, run: str, epoch: int, values: Any) -> None:
            if epoch == at and not logged:
                raise KilledError
            super().on_epoch(run, epoch, values)
            if epoch == at:
                raise KilledError

    return Killing(path)


@pytest.mark.parametrize("name", NAMES)
class TestFiles:
    def test_every_epoch_and_score_is_there(self, name: str, tmp_path: Path) -> None:
        history = training(LogFile(tmp_path / name))
        rows = rows_of(tmp_path / name)
        assert [row["epoch"] for row in rows] == list(range(7))
        scores = dict(history.scores)
        for epoch, row in enumerate(rows):
            expected = {"run": "vanilla", "epoch": epoch, **history.terms[epoch]}
            assert row == expected | ({"score": scores[epoch]} if epoch in scores else {})
        assert sorted(scores) == [1, 3, 5, 6]

    @pytest.mark.parametrize("logged", [False, True])
    def test_a_callback_that_raises_loses_no_epoch(self, name: str, logged: bool, tmp_path: Path) -> None:
        path, state = tmp_path / name, tmp_path / "state"
        whole = training(None)
        with pytest.raises(KilledError):
            training(killing(path, 4, logged=logged), state)
        assert (state / FILE).is_file()
        resumed = training(LogFile(path), state)
        assert resumed.terms == whole.terms and resumed.scores == whole.scores
        assert [row["epoch"] for row in rows_of(path)] == list(range(7))

    def test_what_was_logged_after_the_last_save_is_not_repeated(self, name: str, tmp_path: Path) -> None:
        path, state = tmp_path / name, tmp_path / "state"
        with pytest.raises(KilledError):
            training(killing(path, 3, logged=True), state)
        kept = (state / FILE).read_bytes()
        with pytest.raises(KilledError):
            training(killing(path, 5, logged=True), state)
        (state / FILE).write_bytes(kept)  # as if the process had been killed before it could save
        assert [row["epoch"] for row in rows_of(path)] == list(range(6))
        path.write_text(path.read_text() + "vanil")  # and in the middle of a line
        training(LogFile(path), state)
        assert [row["epoch"] for row in rows_of(path)] == list(range(7))

    def test_runs_share_a_file_and_replace_their_own_rows(self, name: str, tmp_path: Path) -> None:
        path = tmp_path / name
        for run, count in (("one", 2), ("two", 3), ("one", 1)):
            tracker = LogFile(path)
            tracker.on_start(run, [])
            for epoch in range(count):
                tracker.on_epoch(run, epoch, {f"only {run}": 0.5})
        found = [(row["run"], row["epoch"]) for row in rows_of(path)]
        assert found == [("two", 0), ("two", 1), ("two", 2), ("one", 0)]

    @pytest.mark.parametrize("text", ["a,b\n1,2\n", "[1]\n", '{"epoch": 1}\n', "\0\n", "run,epoch\n1\n"])
    def test_another_file_is_left_alone(self, name: str, text: str, tmp_path: Path) -> None:
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(CheckpointError, match="name another file"):
            LogFile(path)
        assert path.read_text() == text

    def test_a_full_disk_is_told_and_the_training_kept(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, state, opened = tmp_path / name, tmp_path / "state", Path.open

        def full(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
            if mode == "a" and len(rows_of(path)) == 3:
                raise OSError(28, "No space left on device")
            return opened(self, mode, *args, **options)

        monkeypatch.setattr(Path, "open", full)
        with pytest.raises(FgaiError, match=r"cannot write .*No space left on device"):
            training(LogFile(path), state)
        monkeypatch.undo()
        training(LogFile(path), state)
        assert [row["epoch"] for row in rows_of(path)] == list(range(7))


def test_the_end_is_told_once(tmp_path: Path) -> None:
    for _ in range(2):  # the second goes on with a training that is over
        training(LogFile(tmp_path / "log.jsonl"), tmp_path / "state")
    ends = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines() if '"end"' in line]
    assert [end["end"]["epochs"] for end in ends] == [7] and ends[0]["end"]["stopped"] == "epochs"


class Heard(Tracker):
    """Remembers every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_start(self, run: str, past: Any) -> None:
        self.calls.append(("start", run, len(past)))

    def on_epoch(self, run: str, epoch: int, values: Any) -> None:
        self.calls.append(("epoch", run, epoch))

    def on_end(self, run: str, summary: Any) -> None:
        self.calls.append(("end", run, dict(summary)))


class TestWork:
    def test_training_and_faithful_training_tell_the_same_way(self) -> None:
        heard = Heard()
        model = fgai.train("GAT", GRAPH, epochs=2, progress=False, tracker=heard)
        fgai.make_faithful(model, GRAPH, epochs=2, nodes=2, edges=2, progress=False, tracker=heard)
        quick = {"epochs": 2, "nodes": 2, "edges": 2, "progress": False, "tracker": heard}
        fgai.harden(model, GRAPH, **quick)
        fgai.harden(model, GRAPH, limits=False, **quick)
        runs = ("vanilla", "fgai", "harden", "at")
        kinds = ("start", "epoch", "epoch", "end")
        assert [call[:2] for call in heard.calls] == [(kind, run) for run in runs for kind in kinds]

    def test_attacks_tell_every_value_judged(self) -> None:
        heard, model = Heard(), fresh()
        attack = PGDInjection(Budget(nodes=2, edges=3, steps=4, step_size=0.2))
        result = attack.run(model, GRAPH, tracker=heard)
        assert heard.calls[0] == ("start", "prediction attack", 0)
        assert [call[2] for call in heard.calls[1:-1]] == list(range(len(result.ledger.curve)))
        assert heard.calls[-1][2]["attacked"] == result.value

    def test_an_end_that_raises_keeps_the_training(self, tmp_path: Path) -> None:
        class Ends(Tracker):
            def on_end(self, run: str, summary: Any) -> None:
                raise KilledError

        with pytest.raises(KilledError):
            training(Ends(), tmp_path)
        assert len(training(None, tmp_path).terms) == 7

    def test_nothing_changes_for_the_training(self) -> None:
        assert training(Heard()).terms == training(None).terms


@pytest.mark.parametrize("text", ["log", "log.txt", "", "comet:x"])
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"`log` must be \*\.csv or \*\.jsonl"):
        LogFile(text)
