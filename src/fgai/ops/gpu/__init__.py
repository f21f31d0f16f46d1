"""GPU kernels in Triton: the same operations as on the CPU, the same interface."""

from fgai.ops.gpu.attend import attend
from fgai.ops.gpu.functions import (
    aggregate,
    clip_rows,
    clip_rows_back,
    dropout,
    edge_softmax,
    node_scores,
    score,
)
from fgai.ops.gpu.project import project_sparse

__all__ = [
    "aggregate",
    "attend",
    "clip_rows",
    "clip_rows_back",
    "dropout",
    "edge_softmax",
    "node_scores",
    "project_sparse",
    "score",
]
