"""Trackers: callbacks for every epoch of a training or an attack; files, TensorBoard, W&B and MLflow."""

from __future__ import annotations

import csv
import io
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fgai.errors import CheckpointError, FgaiError, InputError, extra
from fgai.files import regular, write_atomic
from fgai.typed import typed

__all__ = ["CsvTracker", "JsonlTracker", "Tracker", "tracker_named"]

Values = Mapping[str, float]
"""Numbers by name: the terms of a loss, a validation score, the value of an attack."""
Summary = Mapping[str, float | str]  # what a run came to


class Tracker:
    """Base of callbacks for runs: `train`, `make_faithful` (a run per attempt) and attacks take a `tracker`.

    Override what you need. Calls come in order and from the thread that trains. An exception stops the run,
    whose state is saved first where it has a checkpoint; the same call resumes it.

    Example:
        >>> import fgai
        >>> class Losses(Tracker):
        ...     def on_epoch(self, run, epoch, values):
        ...         losses.append(values["total"])
        >>> losses = []
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train("GAT", data, epochs=3, progress=False, tracker=Losses())
        >>> len(losses)
        3
    """

    def on_start(self, run: str, past: Sequence[Values]) -> None:
        """A run `run`, e.g. `vanilla`, begins; `past` holds the values of earlier epochs where it is resumed.

        A log that went further before the run was killed is cut back to these.
        """

    def on_epoch(self, run: str, epoch: int, values: Values) -> None:
        """An epoch is done, counted from 0; of an attack a value was judged."""

    def on_end(self, run: str, summary: Summary) -> None:
        """A run has ended by itself."""


_Row = dict[str, Any]


class _FileTracker(Tracker):
    """A log of rows in one file, written as they come; a run that starts again replaces its rows."""

    def __init__(self, path: Path | str, *, name: str = "") -> None:
        self.path, self.name = Path(path), name
        self._rows: list[_Row] = self._parse() if self.path.exists() else []
        self._write()

    def on_start(self, run: str, past: Sequence[Values]) -> None:
        """Keep the rows of other runs, and of this one what is known."""
        run = self._named(run)
        kept = [row for row in self._rows if row["run"] != run]
        self._rows = kept + [{"run": run, "epoch": epoch, **values} for epoch, values in enumerate(past)]
        self._write()

    def on_epoch(self, run: str, epoch: int, values: Values) -> None:
        self._add({"run": self._named(run), "epoch": epoch, **values})

    def _named(self, run: str) -> str:
        return f"{self.name}/{run}" if self.name else run

    def _write(self) -> None:
        write_atomic(self.path, self._text(self._rows))

    def _add(self, row: _Row) -> None:
        self._rows.append(row)
        try:
            with self.path.open("a", encoding="utf-8", newline="") as file:
                file.write(self._text([row]))
        except OSError as error:
            raise FgaiError(f"cannot write {self.path}: {error.strerror or error}") from error

    def _parse(self) -> list[_Row]:
        """Rows of the file; a last line that a killed process left half-written is dropped."""
        try:
            text = regular(self.path).read_text(encoding="utf-8")
            rows = self._read(text[: text.rfind("\n") + 1])
            if any(not isinstance(row, dict) or not isinstance(row.get("run"), str) for row in rows):
                raise ValueError("a line has no run")
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.path} is no log of this kind ({error}); name another file"
            ) from error
        return rows

    @abstractmethod
    def _read(self, text: str) -> list[_Row]:
        """The rows of whole lines; raises ValueError where they are none."""

    @abstractmethod
    def _text(self, rows: Sequence[_Row]) -> str:
        """The lines of some rows."""


class JsonlTracker(_FileTracker):
    r"""One JSON object in a line for every epoch, and one with `end` for the summary of a run.

    Args:
        path: of the file, created if missing.
        name: prefix of the names of runs, for files that several trainings share.

    Raises:
        CheckpointError: there is a file, and it is no such log.

    Example:
        >>> tracker = JsonlTracker("log.jsonl")
        >>> tracker.on_start("vanilla", [])
        >>> tracker.on_epoch("vanilla", 0, {"total": 0.5})
        >>> tracker.path.read_text()
        '{"run": "vanilla", "epoch": 0, "total": 0.5}\n'
    """

    def on_end(self, run: str, summary: Summary) -> None:
        """Add a line with what the run came to."""
        self._add({"run": self._named(run), "end": dict(summary)})

    def _read(self, text: str) -> list[_Row]:
        return [json.loads(line) for line in text.splitlines()]

    def _text(self, rows: Sequence[_Row]) -> str:
        return "".join(json.dumps(row) + "\n" for row in rows)


class CsvTracker(_FileTracker):
    r"""One row for every epoch and one column for every name; arguments as of `JsonlTracker`.

    Example:
        >>> tracker = CsvTracker("log.csv")
        >>> tracker.on_start("vanilla", [])
        >>> tracker.on_epoch("vanilla", 0, {"total": 0.5})
        >>> tracker.path.read_text()
        'run,epoch,total\nvanilla,0,0.5\n'
    """

    def __init__(self, path: Path | str, *, name: str = "") -> None:
        self._columns = ["run", "epoch"]
        super().__init__(path, name=name)

    def _add(self, row: _Row) -> None:
        if new := [name for name in row if name not in self._columns]:
            self._rows.append(row)
            self._columns += new
            self._write()
        else:
            super()._add(row)

    def _read(self, text: str) -> list[_Row]:
        reader = csv.DictReader(io.StringIO(text), strict=True)
        rows = list(reader)
        columns = list(reader.fieldnames or self._columns)
        if columns[:2] != self._columns or any(None in row or None in row.values() for row in rows):
            raise ValueError("it has other columns")
        self._columns = columns
        return [{name: value for name, value in row.items() if value != ""} for row in rows]

    def _write(self) -> None:
        self._columns += sorted({name for row in self._rows for name in row} - set(self._columns))
        heading = dict(zip(self._columns, self._columns, strict=True))
        write_atomic(self.path, self._text([heading, *self._rows]))

    def _text(self, rows: Sequence[_Row]) -> str:
        out = io.StringIO()
        csv.DictWriter(out, self._columns, restval="", lineterminator="\n").writerows(rows)
        return out.getvalue()


class _ServiceTracker(Tracker):
    """A tracking service: a run there for every run here."""

    def __init__(
        self,
        start: Callable[[str, int], Any],
        log: Callable[[Any, Values, int], None],
        end: Callable[[Any, Summary], None],
        *,
        replays: bool = True,
    ) -> None:
        self._start, self._log, self._end, self._replays = start, log, end, replays
        self._runs: dict[str, Any] = {}

    def on_start(self, run: str, past: Sequence[Values]) -> None:
        self._runs[run] = self._start(run, len(past))
        for epoch, values in enumerate(past if self._replays else ()):
            self.on_epoch(run, epoch, values)

    def on_epoch(self, run: str, epoch: int, values: Values) -> None:
        self._log(self._runs[run], values, epoch)

    def on_end(self, run: str, summary: Summary) -> None:
        self._end(self._runs.pop(run), summary)


def _tensorboard(folder: str) -> Tracker:
    extra("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    def log(writer: Any, values: Values, epoch: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, epoch)

    def end(writer: Any, summary: Summary) -> None:
        writer.add_text("end", ", ".join(f"{name} {value}" for name, value in summary.items()))
        writer.close()

    def start(run: str, done: int) -> Any:
        return SummaryWriter(str(Path(folder or "runs") / run), purge_step=done)

    return _ServiceTracker(start, log, end, replays=False)


def _wandb(project: str) -> Tracker:
    wandb = extra("wandb")

    def end(run: Any, summary: Summary) -> None:
        run.summary.update(dict(summary))
        run.finish()

    return _ServiceTracker(
        lambda run, _: wandb.init(name=run, reinit="create_new", project=project or None),
        lambda run, values, epoch: run.log(dict(values), step=epoch),
        end,
    )


def _mlflow(experiment: str) -> Tracker:
    mlflow, name = extra("mlflow"), experiment or "Default"
    try:
        client = mlflow.MlflowClient()
        record = client.get_experiment_by_name(name)
        identity = client.create_experiment(name) if record is None else record.experiment_id
    except Exception as error:  # MLflow's own errors, and those of the server
        raise InputError(
            f"MLflow cannot log to experiment {name!r}: {str(error)[:300]}; see MLFLOW_TRACKING_URI"
        ) from error

    def log(run: Any, values: Values, epoch: int) -> None:
        for key, value in values.items():
            client.log_metric(run, key, value, step=epoch)

    def end(run: Any, summary: Summary) -> None:
        for key, value in summary.items():
            client.set_tag(run, key, str(value))
        client.set_terminated(run)

    return _ServiceTracker(lambda run, _: client.create_run(identity, run_name=run).info.run_id, log, end)


_SERVICES = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
_FILES: dict[str, Callable[[str], Tracker]] = {".csv": CsvTracker, ".jsonl": JsonlTracker}


@typed
def tracker_named(text: str) -> Tracker:
    """Return a tracker by name: a file by its suffix, or a service with its folder, project or experiment.

    Args:
        text: `log.csv`, `log.jsonl`, `tensorboard:FOLDER`, `wandb:PROJECT` or `mlflow:EXPERIMENT`.

    Raises:
        InputError: it is none of these.
        MissingExtraError: the service's package is not installed.
        CheckpointError: there is a file, and it is no such log.

    Example:
        >>> type(tracker_named("log.jsonl")).__name__
        'JsonlTracker'
    """
    service, _, rest = text.partition(":")
    if service in _SERVICES:
        return _SERVICES[service](rest)
    suffix = Path(text).suffix.lower()
    if suffix not in _FILES:
        options = [*(f"*{name}" for name in _FILES), *(f"{name}:NAME" for name in _SERVICES)]
        raise InputError(f"`log` must be {', '.join(options[:-1])} or {options[-1]}, got {text!r}")
    return _FILES[suffix](text)
