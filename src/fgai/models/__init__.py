"""Attention models: GAT, GATv2 and the graph transformer from one attention layer, and GCN."""

from fgai.models.base import AttentionModel, as_graph
from fgai.models.defences import GNNSVD, Defended, GNNGuard, ProGNN
from fgai.models.gat import GAT, GATv2
from fgai.models.gcn import GCN, GCNLayer
from fgai.models.gt import GT
from fgai.models.layer import AttentionLayer

__all__ = [
    "GAT",
    "GCN",
    "GNNSVD",
    "GT",
    "AttentionLayer",
    "AttentionModel",
    "Defended",
    "GATv2",
    "GCNLayer",
    "GNNGuard",
    "ProGNN",
    "as_graph",
]
