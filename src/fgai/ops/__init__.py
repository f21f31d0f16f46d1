"""Attention operations and sparse projection, by the fastest kernel available."""

from fgai.ops.backend import use_backend
from fgai.ops.clip import clip, range_norm
from fgai.ops.functional import (
    aggregate,
    attend_additive,
    attend_dot,
    attend_dynamic,
    dropout,
    edge_softmax,
    node_scores,
    project,
    score_additive,
    score_dot,
    score_dynamic,
    weighted_softmax,
)
from fgai.ops.segments import row_sum

__all__ = [
    "aggregate",
    "attend_additive",
    "attend_dot",
    "attend_dynamic",
    "clip",
    "dropout",
    "edge_softmax",
    "node_scores",
    "project",
    "range_norm",
    "row_sum",
    "score_additive",
    "score_dot",
    "score_dynamic",
    "use_backend",
    "weighted_softmax",
]
