"""Every figure as a function that takes models or records and returns a matplotlib figure."""

from fgai.reports.figures.attention import (
    node_attention,
    node_before_after,
    subgraph_attention,
    top_neighbours,
)
from fgai.reports.figures.curves import (
    ExplainerDot,
    InjectedCurve,
    certified_curves,
    explainer_dots,
    f_curves,
    four_properties,
    injected_curves,
    loss_curves,
)
from fgai.reports.figures.style import save
from fgai.reports.nodes import Case, before_after

__all__ = [
    "Case", "ExplainerDot", "InjectedCurve", "before_after", "certified_curves", "explainer_dots", "f_curves",
    "four_properties", "injected_curves", "loss_curves", "node_attention", "node_before_after", "save",
    "subgraph_attention", "top_neighbours",
]  # fmt: skip
