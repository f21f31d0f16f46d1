"""The operations as numba kernels over compressed rows and columns, with hand-written gradients."""

from fgai.ops.cpu.aggregate import aggregate
from fgai.ops.cpu.attend import attend_additive, attend_dot, attend_dynamic
from fgai.ops.cpu.draws import dropout
from fgai.ops.cpu.nodes import node_scores
from fgai.ops.cpu.project import project_sparse
from fgai.ops.cpu.scores import score_additive, score_dot, score_dynamic
from fgai.ops.cpu.softmax import edge_softmax

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
    "node_scores",
    "project_sparse",
    "score_additive",
    "score_dot",
    "score_dynamic",
]
