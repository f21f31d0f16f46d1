"""Attention explanations of graph neural networks that stay put: train them, attack them, certify them."""

from importlib.metadata import version as _version

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
from fgai.graph import Graph
from fgai.models import GAT, GT, GATv2
from fgai.training import load as load_model
from fgai.training import make_faithful, train
from fgai.training import save as save_model

__version__ = _version("fgai")

__all__ = [
    "GAT",
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
    "load",
    "load_model",
    "make_faithful",
    "save_model",
    "train",
]
