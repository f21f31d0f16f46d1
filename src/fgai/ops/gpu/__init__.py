"""GPU kernels in Triton: the same operations as on the CPU, the same interface."""

from fgai.ops.gpu.attend import attend
from fgai.ops.gpu.functions import aggregate, edge_softmax, score
from fgai.ops.gpu.nodes import dropout, mean_shift, node_scores
from fgai.ops.gpu.project import project_sparse

__all__ = [
    "aggregate",
    "attend",
    "dropout",
    "edge_softmax",
    "mean_shift",
    "node_scores",
    "project_sparse",
    "score",
]
