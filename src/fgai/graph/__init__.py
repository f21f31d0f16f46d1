"""Graphs whose edges keep their identity, links to predict, and what an edit changes."""

from fgai.graph.change import GraphChange
from fgai.graph.fields import Links
from fgai.graph.graph import Graph
from fgai.graph.saved import ChangeRecord, InjectedNode

__all__ = ["ChangeRecord", "Graph", "GraphChange", "InjectedNode", "Links"]
