"""Attention explanations of graph neural networks that stay put: train them, attack them, certify them.

`fgai.evaluation` and `fgai.certificates` are the functions. The packages of the same names are reached by
`from fgai.evaluation import EvaluationRecord`, not by `import fgai.evaluation as ...`.
"""

from fgai.certificates import certify
from fgai.datasets import load
from fgai.errors import (
    AttentionError,
    BudgetError,
    CheckpointError,
    DataError,
    DivergenceError,
    FgaiError,
    FgaiWarning,
    InputError,
    MissingExtraError,
    ReliabilityWarning,
)
from fgai.evaluation import compare, evaluate
from fgai.graph import Graph
from fgai.models import GAT, GCN, GT, GATv2
from fgai.training import load as load_model
from fgai.training import make_faithful, train
from fgai.training import save as save_model
from fgai.version import __version__

__all__ = [
    "GAT",
    "GCN",
    "GT",
    "AttentionError",
    "BudgetError",
    "CheckpointError",
    "DataError",
    "DivergenceError",
    "FgaiError",
    "FgaiWarning",
    "GATv2",
    "Graph",
    "InputError",
    "MissingExtraError",
    "ReliabilityWarning",
    "__version__",
    "certify",
    "compare",
    "evaluate",
    "load",
    "load_model",
    "make_faithful",
    "save_model",
    "train",
]
