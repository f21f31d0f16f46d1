"""Attacks on graphs: one budget, checked in one place; no attack judges its own success."""

from fgai.attacks.adaptive import AdaptiveInjection
from fgai.attacks.base import Attack, AttackResult, Judge, Ledger
from fgai.attacks.budget import Budget, check
from fgai.attacks.dice import DICE
from fgai.attacks.existing import FeaturePGD, RandomEdges
from fgai.attacks.injection import FGSMInjection, PGDInjection, RandomInjection, draw_endpoints, draw_features
from fgai.attacks.prbcd import PRBCD
from fgai.attacks.preserving import PreservingInjection
from fgai.attacks.tdgia import TDGIA
from fgai.attacks.threats import THREATS, Threat, make_attack
from fgai.objectives import (
    Clean,
    Objective,
    Preserving,
    explanation,
    margin,
    objective_named,
    prediction,
)

__all__ = [
    "DICE",
    "PRBCD",
    "TDGIA",
    "THREATS",
    "AdaptiveInjection",
    "Attack",
    "AttackResult",
    "Budget",
    "Clean",
    "FGSMInjection",
    "FeaturePGD",
    "Judge",
    "Ledger",
    "Objective",
    "PGDInjection",
    "Preserving",
    "PreservingInjection",
    "RandomEdges",
    "RandomInjection",
    "Threat",
    "check",
    "draw_endpoints",
    "draw_features",
    "explanation",
    "make_attack",
    "margin",
    "objective_named",
    "prediction",
]
