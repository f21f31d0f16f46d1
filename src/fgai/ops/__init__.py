"""Edge softmax, weighted aggregation, attention scores and sparse projection, on the fastest kernel at hand."""

from fgai.ops.adjacency import Adjacency, edge_keys
from fgai.ops.features import Features, SparseRows
from fgai.ops.functional import (
    aggregate,
    edge_softmax,
    project,
    score_additive,
    score_dot,
    score_dynamic,
    use_backend,
)

__all__ = [
    "Adjacency",
    "Features",
    "SparseRows",
    "aggregate",
    "edge_keys",
    "edge_softmax",
    "project",
    "score_additive",
    "score_dot",
    "score_dynamic",
    "use_backend",
]
