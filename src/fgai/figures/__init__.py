"""Every figure as a function that takes models or records and returns a matplotlib figure."""

from fgai.explanations import GraphView, NodeView
from fgai.figures.cases import Case, before_after
from fgai.figures.curves import certified_curves, f_curves, loss_curves
from fgai.figures.explainers import ExplainerDot, explainer_dots
from fgai.figures.injected import InjectedCurve, injected_curves
from fgai.figures.node import node_attention, node_before_after
from fgai.figures.properties import four_properties
from fgai.figures.ranks import top_neighbours
from fgai.figures.style import save
from fgai.figures.subgraph import subgraph_attention

__all__ = [
    "Case",
    "ExplainerDot",
    "GraphView",
    "InjectedCurve",
    "NodeView",
    "before_after",
    "certified_curves",
    "explainer_dots",
    "f_curves",
    "four_properties",
    "injected_curves",
    "loss_curves",
    "node_attention",
    "node_before_after",
    "save",
    "subgraph_attention",
    "top_neighbours",
]
