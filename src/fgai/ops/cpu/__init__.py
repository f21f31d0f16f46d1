"""The operations as numba kernels over compressed rows and columns, with hand-written gradients."""

from fgai.ops.cpu.attend import attend
from fgai.ops.cpu.project import project_sparse
from fgai.ops.cpu.scores import score
from fgai.ops.cpu.unfused import aggregate, dropout, edge_softmax, node_scores

__all__ = ["aggregate", "attend", "dropout", "edge_softmax", "node_scores", "project_sparse", "score"]
