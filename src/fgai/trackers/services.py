"""TensorBoard, Weights & Biases and MLflow: thin adapters, whose packages are asked for at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fgai.errors import InputError, extra
from fgai.trackers.base import Summary, Tracker, Values


class TensorBoardTracker(Tracker):
    """Scalars for TensorBoard, a folder for every run.

    Args:
        folder: to write to.

    Raises:
        MissingExtraError: tensorboard is not installed.
    """

    def __init__(self, folder: Path | str) -> None:
        extra("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self.folder = Path(folder)
        self._writers: dict[str, Any] = {}

    def on_start(self, run: str, past: Sequence[Values]) -> None:
        """Open the run's folder; what was written of epochs that will come again is not shown."""
        self._writers[run] = self._make(str(self.folder / run), purge_step=len(past))

    def on_epoch(self, run: str, epoch: int, values: Values) -> None:
        """Write the values."""
        for name, value in values.items():
            self._writers[run].add_scalar(name, value, epoch)

    def on_end(self, run: str, summary: Summary) -> None:
        """Write what the run came to, and close its file."""
        writer = self._writers.pop(run)
        writer.add_text("end", ", ".join(f"{name} {value}" for name, value in summary.items()))
        writer.close()


class WandbTracker(Tracker):
    """A run of Weights & Biases for every run here.

    Args:
        project: as wandb knows it; its default when None.
        **options: further arguments of `wandb.init`, e.g. `mode="offline"`.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(self, project: str | None = None, **options: Any) -> None:
        self._wandb = extra("wandb")
        self._options = {"project": project, **options}
        self._runs: dict[str, Any] = {}

    def on_start(self, run: str, past: Sequence[Values]) -> None:
        """Begin a run, with the epochs that were done before."""
        self._runs[run] = self._wandb.init(name=run, reinit="create_new", **self._options)
        for epoch, values in enumerate(past):
            self.on_epoch(run, epoch, values)

    def on_epoch(self, run: str, epoch: int, values: Values) -> None:
        """Log the values."""
        self._runs[run].log(dict(values), step=epoch)

    def on_end(self, run: str, summary: Summary) -> None:
        """Note what the run came to, and finish it."""
        ended = self._runs.pop(run)
        ended.summary.update(dict(summary))
        ended.finish()


class MlflowTracker(Tracker):
    """A run of MLflow for every run here, through a client: no global run is opened or closed.

    Args:
        experiment: its name; MLflow's default when None.
        uri: of the tracking server or database; MLflow's own choice when None.

    Raises:
        MissingExtraError: mlflow is not installed.
        InputError: MLflow cannot log there.
    """

    def __init__(self, experiment: str | None = None, *, uri: str | None = None) -> None:
        mlflow, name = extra("mlflow"), experiment or "Default"
        try:
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            held = self._client.get_experiment_by_name(name)
            self._experiment = self._client.create_experiment(name) if held is None else held.experiment_id
        except Exception as error:  # MLflow's own errors, and those of whatever lies behind the address
            raise InputError(f"MLflow cannot log to `uri` {uri!r}: {str(error)[:300]}") from error
        self._ids: dict[str, str] = {}

    def on_start(self, run: str, past: Sequence[Values]) -> None:
        """Begin a run, with the epochs that were done before."""
        self._ids[run] = self._client.create_run(self._experiment, run_name=run).info.run_id
        for epoch, values in enumerate(past):
            self.on_epoch(run, epoch, values)

    def on_epoch(self, run: str, epoch: int, values: Values) -> None:
        """Log the values."""
        for name, value in values.items():
            self._client.log_metric(self._ids[run], name, value, step=epoch)

    def on_end(self, run: str, summary: Summary) -> None:
        """Note what the run came to, and end it."""
        ended = self._ids.pop(run)
        for name, value in summary.items():
            self._client.set_tag(ended, name, str(value))
        self._client.set_terminated(ended)
