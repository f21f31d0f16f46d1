"""Heterogeneous graphs: attention by type of edges, explained, attacked and made faithful within a type.

Everything takes PyG's `HeteroData` and a model called as `model(x_dict, edge_index_dict)`: made by
`to_hetero` or `HeteroConv` from GATConv, GATv2Conv or TransformerConv, or with HANConv or HGTConv in it.
`HeteroView` is the way to the rest of fgai.
"""

from fgai.attention.hetero import HeteroModel
from fgai.attention.layout import HeteroLayout
from fgai.hetero.attacked import HeteroAttack, attack
from fgai.hetero.explanation import HeteroExplanation, explain
from fgai.hetero.faithful import make_faithful
from fgai.hetero.recorded import HeteroAttention, TypeAttention, attend
from fgai.hetero.view import HeteroView

__all__ = [
    "HeteroAttack",
    "HeteroAttention",
    "HeteroExplanation",
    "HeteroLayout",
    "HeteroModel",
    "HeteroView",
    "TypeAttention",
    "attack",
    "attend",
    "explain",
    "make_faithful",
]
