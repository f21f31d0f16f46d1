"""The operations as numba kernels over compressed rows and columns, with hand-written gradients."""

from fgai.ops.cpu.aggregate import aggregate
from fgai.ops.cpu.project import project_sparse
from fgai.ops.cpu.scores import score_additive, score_dot, score_dynamic
from fgai.ops.cpu.softmax import edge_softmax

__all__ = ["aggregate", "edge_softmax", "project_sparse", "score_additive", "score_dot", "score_dynamic"]
