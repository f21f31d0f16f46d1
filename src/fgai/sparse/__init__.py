"""Inputs of the kernels: edges in compressed rows with their identities, and sparse features."""

from fgai.sparse.adjacency import Adjacency, EdgeMap, edge_keys, edge_name, key_ends, match_edges
from fgai.sparse.features import Features, SparseRows

__all__ = [
    "Adjacency",
    "EdgeMap",
    "Features",
    "SparseRows",
    "edge_keys",
    "edge_name",
    "key_ends",
    "match_edges",
]
