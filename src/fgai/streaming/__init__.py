"""Exact passes over stored graphs, into files: block by block, or on a GPU that has room for all of it."""

from fgai.streaming.infer import check_streamed, measure_store, observe_store
from fgai.streaming.result import StoredObservation, open_observation
from fgai.streaming.size import PassSize, pass_size

__all__ = [
    "PassSize",
    "StoredObservation",
    "check_streamed",
    "measure_store",
    "observe_store",
    "open_observation",
    "pass_size",
]
