"""Stable attention explanations for graph neural networks: train them, attack them, measure what holds.

    data = fgai.load_dataset("planted")
    model = fgai.train("GAT", data)
    faithful = fgai.make_faithful(model, data)
    fgai.compare({"GAT": model, "FGAI": faithful}, data).show()

Verbs are functions here; nouns are subpackages (`fgai.training`, `fgai.attacks`, `fgai.metrics`, ...). Both
are loaded when they are first asked for, so `import fgai` itself takes no time.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

from fgai.version import __version__

if TYPE_CHECKING:
    from fgai.attention.calls import wrap
    from fgai.attention.hooks import record
    from fgai.certificates import certify_attention, certify_budget, certify_injection, vote
    from fgai.datasets import load_dataset, load_graph
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
    from fgai.evaluation.run import compare, evaluate
    from fgai.explanations import explain
    from fgai.graph import Graph
    from fgai.hub import from_pretrained, save_pretrained
    from fgai.models import GAT, GCN, GT, GATv2
    from fgai.models.accelerated import accelerate
    from fgai.reports import card, explore, report
    from fgai.training import harden, limit, load_model, make_faithful, save_model, train

__all__ = [
    "GAT", "GCN", "GT", "AttentionError", "BudgetError", "CheckpointError", "DataError", "DivergenceError",
    "FgaiError", "FgaiWarning", "GATv2", "Graph", "InputError", "MissingExtraError", "ReliabilityWarning",
    "__version__", "accelerate", "card", "certify_attention", "certify_budget", "certify_injection",
    "compare", "evaluate", "explain", "explore", "from_pretrained", "harden", "limit", "load_dataset",
    "load_graph", "load_model", "make_faithful", "record", "report", "save_model", "save_pretrained", "train",
    "vote", "wrap",
]  # fmt: skip

_NAMES = {
    "attention": ("record", "wrap"),
    "certificates": ("certify_attention", "certify_budget", "certify_injection", "vote"),
    "datasets": ("load_dataset", "load_graph"),
    "errors": tuple(name for name in __all__ if name.endswith(("Error", "Warning"))),
    "evaluation": ("compare", "evaluate"),
    "explanations": ("explain",),
    "graph": ("Graph",),
    "hub": ("from_pretrained", "save_pretrained"),
    "models": ("GAT", "GCN", "GT", "GATv2"),
    "models.accelerated": ("accelerate",),
    "reports": ("card", "explore", "report"),
    "training": ("harden", "limit", "load_model", "make_faithful", "save_model", "train"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
_PACKAGES = (
    *(home for home in _NAMES if "." not in home),
    *("attacks", "bounds", "divergence", "files", "hetero", "large", "metrics", "objectives", "ops"),
    *("recompute", "records", "sparse", "tasks", "topk", "trackers"),
)


def __getattr__(name: str) -> _Any:
    """Load a function, a class or a subpackage when it is first asked for."""
    if name in _HOMES:
        value = getattr(_import_module(f"fgai.{_HOMES[name]}"), name)
    elif name in _PACKAGES:
        value = _import_module(f"fgai.{name}")
    elif name == "certify":
        raise AttributeError("there is no `fgai.certify`; use `certify_attention`, or `certify_injection`")
    else:
        raise AttributeError(f"module 'fgai' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES})
