"""The threats of the grids: the library's, with everything pinned that the stored records were made with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fgai.attacks import SHARED_RULES, Attack, Budget, EnsembleInjection, Threat, threat_of

BOX = (-1.0, 1.0)
"""Of new nodes' features, in attacks and in trainings: the features of the paper's graphs lie in [0, 1]."""
FROM_DATA = ("natural", "random")
"""Threats whose features come from the data."""
CLAIM, BESIDE = "ensemble", "ensemble-strong"
"""The threat of every claim, and the one beside it."""
EVERY_RULE = "ensemble-weakest"
"""`ensemble` at the endpoints of every rule; records of `ensemble` lack `weakest`."""


class SharedEndpoints(EnsembleInjection):
    """The ensemble without the rule that reads the attacked model."""

    def __init__(
        self, budget: Budget, *given: Any, rules: Sequence[str] = SHARED_RULES, **options: Any
    ) -> None:
        super().__init__(budget, *given, rules=rules, **options)


def grid_threat(name: str) -> Threat:
    """Return a threat as the grids run it."""
    threat = threat_of("ensemble" if name == EVERY_RULE else name)
    if name in FROM_DATA:
        return threat
    per_graph = None if threat.per_graph is None else replace(threat.per_graph, box=BOX)
    attack: type[Attack] = threat.attack
    if attack is EnsembleInjection and name != EVERY_RULE:
        attack = SharedEndpoints
    budget = replace(threat.budget, box=BOX)
    return replace(threat, name=name, attack=attack, budget=budget, per_graph=per_graph)
