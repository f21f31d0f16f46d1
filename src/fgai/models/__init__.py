"""Attention models: GAT, GATv2 and the graph transformer from one attention layer, and GCN."""

from typing import TYPE_CHECKING, Any

from fgai.models.base import (
    MODELS,
    AttentionModel,
    Capabilities,
    as_graph,
    body_of,
    capabilities_of,
    register_model,
)
from fgai.models.gat import GAT, GATv2
from fgai.models.gcn import GCN, GCNLayer
from fgai.models.gt import GT
from fgai.models.layer import AttentionLayer

if TYPE_CHECKING:
    from fgai.models.accelerated import accelerate

__all__ = [
    "GAT",
    "GCN",
    "GT",
    "MODELS",
    "AttentionLayer",
    "AttentionModel",
    "Capabilities",
    "GATv2",
    "GCNLayer",
    "accelerate",
    "as_graph",
    "body_of",
    "capabilities_of",
    "register_model",
]


def __getattr__(name: str) -> Any:
    """Import PyG's layers, which takes seconds, when they are first asked for."""
    if name == "accelerate":
        from fgai.models.accelerated import accelerate

        return accelerate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
