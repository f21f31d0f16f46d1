"""Graphs larger than memory: stored graphs, mini-batches, exact passes by blocks, several processes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fgai.large.convert import convert
from fgai.large.observation import StoredObservation
from fgai.large.processes import process_group
from fgai.large.stored import StoredGraph
from fgai.large.write import write_store

if TYPE_CHECKING:
    from fgai.large.evaluate import StoredEvaluation, evaluate_store
    from fgai.large.sampling import Batches, MiniBatch, NeighbourSampler
    from fgai.large.streaming import GraphSize, PassSize, graph_size, observe_store, pass_size

__all__ = [
    "Batches", "GraphSize", "MiniBatch", "NeighbourSampler", "PassSize", "StoredEvaluation", "StoredGraph",
    "StoredObservation", "convert", "evaluate_store", "graph_size", "observe_store", "pass_size",
    "process_group", "write_store",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import modules that need PyG's samplers and layers, which takes seconds, on first use."""
    if name in __all__:
        for module in ("sampling", "streaming", "evaluate"):
            if hasattr(imported := import_module(f"{__name__}.{module}"), name):
                return getattr(imported, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
