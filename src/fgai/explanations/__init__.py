"""One node's explanation as a record, attention as an explainer inside PyG, and explainers side by side."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fgai.explanations.node import GraphView, NodeView, explain
from fgai.explanations.record import NodeExplanation

if TYPE_CHECKING:
    from fgai.explanations.as_pyg import AsPyG, GATConvs
    from fgai.explanations.posthoc import EDGE_EXPLAINERS, edge_explainer
    from fgai.explanations.pyg import FaithfulAttention, PropagatedAttention
    from fgai.explanations.scores import EdgeExplainer, EdgeScores

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

_LATE = {
    "AsPyG": "as_pyg",
    "EDGE_EXPLAINERS": "posthoc",
    "EdgeExplainer": "scores",
    "EdgeScores": "scores",
    "FaithfulAttention": "pyg",
    "GATConvs": "as_pyg",
    "PropagatedAttention": "pyg",
    "edge_explainer": "posthoc",
}
"""Importing PyG's explainers takes seconds, which the command line need not spend."""


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
