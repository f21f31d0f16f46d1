"""Trackers: what a training or an attack came to, epoch by epoch, written where it is wanted."""

from fgai.trackers.base import Tracker
from fgai.trackers.files import CsvTracker, JsonlTracker
from fgai.trackers.named import tracker_named
from fgai.trackers.services import MlflowTracker, TensorBoardTracker, WandbTracker

__all__ = [
    "CsvTracker",
    "JsonlTracker",
    "MlflowTracker",
    "TensorBoardTracker",
    "Tracker",
    "WandbTracker",
    "tracker_named",
]
