"""`tracker_named`: a tracker from one word, as the command line takes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fgai.errors import InputError
from fgai.trackers.base import Tracker
from fgai.trackers.files import CsvTracker, JsonlTracker
from fgai.trackers.services import MlflowTracker, TensorBoardTracker, WandbTracker
from fgai.typed import typed

_SERVICES: dict[str, Callable[[str], Tracker]] = {
    "tensorboard": lambda folder: TensorBoardTracker(folder or "runs"),
    "wandb": lambda project: WandbTracker(project or None),
    "mlflow": lambda experiment: MlflowTracker(experiment or None),
}
_FILES: dict[str, Callable[[str], Tracker]] = {".csv": CsvTracker, ".jsonl": JsonlTracker}


@typed
def tracker_named(text: str) -> Tracker:
    """Return the tracker a word stands for: a file by its suffix, or a service with what it needs.

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
        known = [*(f"*{name}" for name in _FILES), *(f"{name}:NAME" for name in _SERVICES)]
        raise InputError(f"`log` must be {', '.join(known[:-1])} or {known[-1]}, got {text!r}")
    return _FILES[suffix](text)
