"""The trackers of docs/extend.md: through stand-ins, and where installed for real."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fgai
from fgai.trackers import Tracker

PAGE = Path(__file__).parent.parent / "docs" / "extend.md"


def documented(name: str) -> Tracker:
    """A tracker of the page, by the name of its class."""
    (block,) = [part for part in PAGE.read_text().split("```python\n") if f"class {name}(" in part]
    names: dict[str, Any] = {"fgai": fgai}
    exec(block.partition("```")[0], names)
    tracker: Tracker = names[name]()
    return tracker


def told(tracker: Tracker) -> None:
    """A run that goes on at its third epoch, and ends."""
    tracker.on_start("fgai", [{"total": 0.5}, {"total": 0.25}])
    tracker.on_epoch("fgai", 2, {"total": 0.125, "score": 1.0})
    tracker.on_end("fgai", {"epochs": 3, "stopped": "epochs"})


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = documented("TensorBoard")
    tracker.on_start("fgai", [])
    for epoch in range(4):  # two more than were saved
        tracker.on_epoch("fgai", epoch, {"total": float(epoch)})
    tracker.on_end("fgai", {})
    told(documented("TensorBoard"))
    found = EventAccumulator(str(tmp_path / "runs" / "fgai"))
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
    told(documented("Wandb"))
    assert calls == [
        {"name": "fgai", "reinit": "create_new"},
        (0, {"total": 0.5}),
        (1, {"total": 0.25}),
        (2, {"total": 0.125, "score": 1.0}),
        ("finish", {"epochs": 3, "stopped": "epochs"}),
    ]


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Client:
        def create_run(self, experiment: str, run_name: str) -> Any:
            calls.append((experiment, run_name))
            return SimpleNamespace(info=SimpleNamespace(run_id="r"))

        def log_metric(self, run: str, name: str, value: float, step: int) -> None:
            calls.append((run, name, value, step))

        def set_terminated(self, run: str) -> None:
            calls.append(("ended", run))

    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=Client))
    told(documented("MLflow"))
    assert calls[0] == ("0", "fgai") and calls[-1] == ("ended", "r")
    logged = [call[1:] for call in calls if len(call) == 4 and call[0] == "r"]
    assert logged == [("total", 0.5, 0), ("total", 0.25, 1), ("total", 0.125, 2), ("score", 1.0, 2)]


def test_mlflow_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    uri = (tmp_path / "runs").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    told(documented("MLflow"))
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs(["0"])
    assert run.info.status == "FINISHED"
    assert [point.step for point in client.get_metric_history(run.info.run_id, "total")] == [0, 1, 2]
