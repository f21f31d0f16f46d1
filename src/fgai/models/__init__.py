"""fgai's models: `GAT`, `GATv2`, `GT` (graph transformer), `GCN`, and their base `AttentionModel`."""

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

__all__ = [
    "GAT", "GCN", "GT", "MODELS", "AttentionLayer", "AttentionModel", "Capabilities", "GATv2", "GCNLayer",
    "as_graph", "body_of", "capabilities_of", "register_model",
]  # fmt: skip
