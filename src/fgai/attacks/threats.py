"""The five threats of the evaluation protocol, by name; the same for every method."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fgai.attacks.base import Attack
from fgai.attacks.budget import Budget
from fgai.attacks.existing import FeaturePGD, RandomEdges
from fgai.attacks.injection import PGDInjection, RandomInjection
from fgai.attacks.objectives import Objective
from fgai.checks import one_of


@dataclass(frozen=True)
class Threat:
    """A named threat: which attack, with which budget, and what for."""

    name: str
    attack: type[Attack]
    budget: Budget
    about: str


THREATS: dict[str, Threat] = {
    threat.name: threat
    for threat in (
        Threat(
            "standard",
            PGDInjection,
            Budget(nodes=20, edges=20, box=(-1.0, 1.0), steps=10, step_size=0.1),
            "20 nodes × 20 edges, adversarial features: all the paper's tables",
        ),
        Threat(
            "strong",
            PGDInjection,
            Budget(nodes=60, edges=40, box=(-1.0, 1.0), steps=50, step_size=0.05, restarts=3),
            "60 nodes × 40 edges, 3 × 50 steps: the honesty check beside every table",
        ),
        Threat(
            "random",
            RandomInjection,
            Budget(nodes=20, edges=20, box=None),
            "20 nodes × 20 edges, random features in the data's range: the noise floor",
        ),
        Threat("edges", RandomEdges, Budget(edges=400), "400 random edges between existing nodes"),
        Threat(
            "modify",
            FeaturePGD,
            Budget(rows=0.05, radius=0.1, steps=10, step_size=0.01),
            "features of 5 % of the test nodes moved by at most 0.1",
        ),
    )
}


def make_attack(
    threat: str | Threat, objective: str | Objective = "prediction", *, targets: str = "test", k: int = 5
) -> Attack:
    """Return the attack of a threat.

    Args:
        threat: a name from `THREATS`, or a `Threat` of your own.
        objective: what the attacker maximises.
        targets: whose nodes are attacked: `test`, `val` or `fit`.
        k: size of the explanation, for the explanation objective.

    Raises:
        InputError: for an unknown name.
    """
    if isinstance(threat, str):
        threat = THREATS[one_of(threat, "threat", tuple(THREATS))]
    return threat.attack(replace(threat.budget, targets=targets), objective, k=k)
