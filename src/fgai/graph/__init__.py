"""Graphs whose edges are identified by their ends, links to predict, and changes of a graph."""

from fgai.graph.change import GraphChange
from fgai.graph.fields import Links
from fgai.graph.graph import Graph
from fgai.graph.saved import ChangeRecord, InjectedNode

__all__ = ["ChangeRecord", "Graph", "GraphChange", "InjectedNode", "Links"]
