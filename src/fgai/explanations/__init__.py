"""One node's explanation as a record, and attention as an explainer inside PyG."""

from typing import TYPE_CHECKING, Any

from fgai.explanations.node import explain
from fgai.explanations.record import NodeExplanation

if TYPE_CHECKING:
    from fgai.explanations.pyg import AsPyG, FaithfulAttention

__all__ = ["AsPyG", "FaithfulAttention", "NodeExplanation", "explain"]


def __getattr__(name: str) -> Any:
    # Importing PyG's explainers takes seconds, which the command line need not spend.
    if name in ("AsPyG", "FaithfulAttention"):
        from fgai.explanations import pyg

        return getattr(pyg, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
