"""The threats of the grids: the library's, with everything pinned that the stored records were made with."""

from __future__ import annotations

from dataclasses import replace

from fgai.attacks import Threat, threat_of

BOX = (-1.0, 1.0)
"""Of new nodes' features, in attacks and in trainings: the features of the paper's graphs lie in [0, 1]."""
FROM_DATA = ("natural", "random")
"""Threats whose features come from the data."""


def grid_threat(name: str) -> Threat:
    """Return a threat as the grids run it.

    Args:
        name: of one of the library's threats.

    Raises:
        InputError: for an unknown name.
    """
    threat = threat_of(name)
    if name in FROM_DATA:
        return threat
    per_graph = None if threat.per_graph is None else replace(threat.per_graph, box=BOX)
    return replace(threat, budget=replace(threat.budget, box=BOX), per_graph=per_graph)
