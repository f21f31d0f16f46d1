"""GPU kernels in Triton: the same operations as on the CPU, the same interface."""

from fgai.ops.gpu.attend import attend_additive, attend_dot, attend_dynamic
from fgai.ops.gpu.functions import (
    aggregate,
    edge_softmax,
    score_additive,
    score_dot,
    score_dynamic,
)
from fgai.ops.gpu.nodes import dropout, mean_shift, node_scores
from fgai.ops.gpu.project import project_sparse

AVERAGES = True
"""The fused operations can average the attention over the heads themselves."""

__all__ = [
    "AVERAGES",
    "aggregate",
    "attend_additive",
    "attend_dot",
    "attend_dynamic",
    "dropout",
    "edge_softmax",
    "mean_shift",
    "node_scores",
    "project_sparse",
    "score_additive",
    "score_dot",
    "score_dynamic",
]
