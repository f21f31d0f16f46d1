"""Heterogeneous graphs: attention by type of edges, explained, attacked and made faithful within a type.

Everything takes PyG's `HeteroData` and a model called as `model(x_dict, edge_index_dict)`: made by
`to_hetero` or `HeteroConv` from GATConv, GATv2Conv or TransformerConv, or with HANConv or HGTConv in it.
`HeteroView` is the way to the rest of fgai.
"""

from fgai.hetero.attention import HeteroAttention, HeteroExplanation, TypeAttention, attend, explain_node
from fgai.hetero.injection import HeteroAttack, attack, make_hetero_faithful
from fgai.hetero.model import HeteroLayout, HeteroModel
from fgai.hetero.view import HeteroView

__all__ = [
    "HeteroAttack", "HeteroAttention", "HeteroExplanation", "HeteroLayout", "HeteroModel", "HeteroView",
    "TypeAttention", "attack", "attend", "explain_node", "make_hetero_faithful",
]  # fmt: skip
