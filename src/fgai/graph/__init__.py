"""Graphs whose edges keep their identity, links to predict, and what an edit changes."""

from fgai.graph.change import GraphChange
from fgai.graph.graph import Graph
from fgai.graph.links import Links

__all__ = ["Graph", "GraphChange", "Links"]
