"""GPU kernels in Triton: the same operations and arguments as on the CPU."""

from fgai.ops.gpu.attend import attend as attend
from fgai.ops.gpu.functions import aggregate as aggregate
from fgai.ops.gpu.functions import clip_rows as clip_rows
from fgai.ops.gpu.functions import clip_rows_back as clip_rows_back
from fgai.ops.gpu.functions import dropout as dropout
from fgai.ops.gpu.functions import edge_softmax as edge_softmax
from fgai.ops.gpu.functions import node_scores as node_scores
from fgai.ops.gpu.functions import score as score
from fgai.ops.gpu.project import project_sparse as project_sparse
