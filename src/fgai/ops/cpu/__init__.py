"""The operations as numba kernels over compressed rows and columns, with hand-written gradients."""

from fgai.ops.cpu.attend import attend
from fgai.ops.cpu.scores import score
from fgai.ops.cpu.unfused import (
    aggregate,
    clip_rows,
    clip_rows_back,
    dropout,
    edge_softmax,
    node_scores,
    project_sparse,
)

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
