"""Attention models: GAT, GATv2 and the graph transformer from one attention layer, and GCN."""

from fgai.models.base import (
    MODELS,
    AttentionModel,
    Capabilities,
    as_graph,
    body_of,
    capabilities_of,
    register_model,
)
from fgai.models.defences import DEFENCES, GNNSVD, Defended, GNNGuard, ProGNN, register_defence
from fgai.models.gat import GAT, GATv2
from fgai.models.gcn import GCN, GCNLayer
from fgai.models.gt import GT
from fgai.models.layer import AttentionLayer

__all__ = [
    "DEFENCES",
    "GAT",
    "GCN",
    "GNNSVD",
    "GT",
    "MODELS",
    "AttentionLayer",
    "AttentionModel",
    "Capabilities",
    "Defended",
    "GATv2",
    "GCNLayer",
    "GNNGuard",
    "ProGNN",
    "as_graph",
    "body_of",
    "capabilities_of",
    "register_defence",
    "register_model",
]
