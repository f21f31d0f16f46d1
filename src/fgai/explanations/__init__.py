"""The explanation of one node as a record, PyG explainers that return attention, and explainers by name."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fgai.explanations.node import GraphView, NodeView, explain
from fgai.explanations.record import NodeExplanation

if TYPE_CHECKING:
    from fgai.explanations.attention_explainers import FaithfulAttention, PropagatedAttention
    from fgai.explanations.posthoc import EDGE_EXPLAINERS, EdgeExplainer, EdgeScores, edge_explainer
    from fgai.explanations.pyg_models import AsPyG, GATConvs

__all__ = [
    "EDGE_EXPLAINERS",
    "AsPyG",
    "EdgeExplainer",
    "EdgeScores",
    "FaithfulAttention",
    "GATConvs",
    "GraphView",
    "NodeExplanation",
    "NodeView",
    "PropagatedAttention",
    "edge_explainer",
    "explain",
]


def __getattr__(name: str) -> Any:
    """Import PyG's explainers, which takes seconds, when they are first used."""
    if name in __all__:
        for module in ("attention_explainers", "pyg_models", "posthoc"):
            if hasattr(imported := import_module(f"{__name__}.{module}"), name):
                return getattr(imported, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
