"""Graphs larger than memory: stored graphs, mini-batches, exact passes block by block, several processes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fgai.large.convert import convert
from fgai.large.observation import StoredObservation
from fgai.large.processes import joined
from fgai.large.size import GraphSize, PassSize, graph_size, pass_size
from fgai.large.stored import StoredGraph, open_store
from fgai.large.write import write_store

if TYPE_CHECKING:
    from fgai.large.evaluate import StoredEvaluation, evaluate_store
    from fgai.large.sampling import Batches, MiniBatch, NeighbourSampler, Sample, mini_batch
    from fgai.large.streaming import check_streamed, measure_store, observe_store

__all__ = [
    "Batches",
    "GraphSize",
    "MiniBatch",
    "NeighbourSampler",
    "PassSize",
    "Sample",
    "StoredEvaluation",
    "StoredGraph",
    "StoredObservation",
    "check_streamed",
    "convert",
    "evaluate_store",
    "graph_size",
    "joined",
    "measure_store",
    "mini_batch",
    "observe_store",
    "open_store",
    "pass_size",
    "write_store",
]


def __getattr__(name: str) -> Any:
    """Import what needs PyG's samplers and layers, which takes seconds, when it is first asked for."""
    if name in __all__:
        for module in ("sampling", "streaming", "evaluate"):
            if hasattr(imported := import_module(f"{__name__}.{module}"), name):
                return getattr(imported, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
