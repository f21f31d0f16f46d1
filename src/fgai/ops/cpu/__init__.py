"""The operations as numba kernels over compressed rows and columns, with hand-written gradients."""

from fgai.ops.cpu.attend import attend as attend
from fgai.ops.cpu.attend import score as score
from fgai.ops.cpu.unfused import aggregate as aggregate
from fgai.ops.cpu.unfused import clip_rows as clip_rows
from fgai.ops.cpu.unfused import clip_rows_back as clip_rows_back
from fgai.ops.cpu.unfused import dropout as dropout
from fgai.ops.cpu.unfused import edge_softmax as edge_softmax
from fgai.ops.cpu.unfused import node_scores as node_scores
from fgai.ops.cpu.unfused import project_sparse as project_sparse
