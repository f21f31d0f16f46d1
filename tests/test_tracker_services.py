"""TensorBoard, W&B and MLflow: what they are told, through stand-ins and where installed for real."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fgai.errors import InputError
from fgai.trackers import Tracker, tracker_named


def told(tracker: Tracker) -> None:
    """A run that goes on at its third epoch, and ends."""
    tracker.on_start("fgai", [{"total": 0.5}, {"total": 0.25}])
    tracker.on_epoch("fgai", 2, {"total": 0.125, "score": 1.0})
    tracker.on_end("fgai", {"epochs": 3, "stopped": "epochs"})


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = tracker_named(f"tensorboard:{tmp_path}")
    tracker.on_start("fgai", [])
    for epoch in range(4):  # two more than were saved
        tracker.on_epoch("fgai", epoch, {"total": float(epoch)})
    tracker.on_end("fgai", {})
    told(tracker_named(f"tensorboard:{tmp_path}"))
    found = EventAccumulator(str(tmp_path / "fgai"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("total")] == [(0, 0.0), (1, 1.0), (2, 0.125)]
    assert [e.step for e in found.Scalars("score")] == [2]


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Run:
        def __init__(self) -> None:
            self.summary: dict[str, Any] = {}

        def log(self, values: dict[str, float], step: int) -> None:
            calls.append((step, values))

        def finish(self) -> None:
            calls.append(("finish", self.summary))

    def init(**options: Any) -> Run:
        calls.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    told(tracker_named("wandb:project"))
    assert calls == [
        {"name": "fgai", "reinit": "create_new", "project": "project"},
        (0, {"total": 0.5}),
        (1, {"total": 0.25}),
        (2, {"total": 0.125, "score": 1.0}),
        ("finish", {"epochs": 3, "stopped": "epochs"}),
    ]


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Client:
        def get_experiment_by_name(self, name: str) -> Any:
            return None

        def create_experiment(self, name: str) -> str:
            return f"id of {name}"

        def create_run(self, experiment: str, run_name: str) -> Any:
            calls.append((experiment, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="r"))

        def log_metric(self, run: str, name: str, value: float, step: int) -> None:
            calls.append((run, name, value, step))

        def set_tag(self, run: str, name: str, value: str) -> None:
            calls.append((run, name, value))

        def set_terminated(self, run: str) -> None:
            calls.append(("ended", run))

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    told(tracker_named("mlflow:mine"))
    assert calls[0] == ("id of mine", "fgai") and calls[-1] == ("ended", "r")
    logged = [call[1:] for call in calls if len(call) == 4 and call[0] == "r"]
    assert logged == [("total", 0.5, 0), ("total", 0.25, 1), ("total", 0.125, 2), ("score", 1.0, 2)]
    assert ("r", "stopped", "epochs") in calls


def test_mlflow_that_cannot_be_reached_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def __init__(self) -> None:
            raise RuntimeError("no such store")

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Refusing))
    with pytest.raises(InputError, match="MLflow cannot log to experiment 'mine': no such store"):
        tracker_named("mlflow:mine")


def test_mlflow_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    uri = (tmp_path / "runs").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    told(tracker_named("mlflow:mine"))
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.status == "FINISHED" and run.data.tags["stopped"] == "epochs"
    assert [point.step for point in client.get_metric_history(run.info.run_id, "total")] == [0, 1, 2]
