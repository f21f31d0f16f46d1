"""Attacks on graphs: one budget, checked in one place; no attack judges its own success."""

from fgai.attacks.base import Attack, AttackResult, Judge, Ledger
from fgai.attacks.budget import Budget, check_budget
from fgai.attacks.endpoints import SHARED_RULES, draw_endpoints
from fgai.attacks.ensemble import EnsembleInjection, ShortEnsemble
from fgai.attacks.existing import DICE, PRBCD, FeaturePGD, RandomEdges
from fgai.attacks.injection import (
    TDGIA,
    AdaptiveInjection,
    NaturalInjection,
    PGDInjection,
    RandomInjection,
    draw_features,
)
from fgai.attacks.search.climb import SearchSpec
from fgai.attacks.search.members import EXPLANATION_MEMBERS, PREDICTION_MEMBERS, Member
from fgai.attacks.threats import (
    DEFAULT,
    THREATS,
    Threat,
    make_attack,
    register_threat,
    threat_of,
    weak_search_note,
)
from fgai.attacks.values import ValueInjection
from fgai.objectives import Objective

__all__ = [
    "DEFAULT",
    "DICE",
    "EXPLANATION_MEMBERS",
    "PRBCD",
    "PREDICTION_MEMBERS",
    "SHARED_RULES",
    "TDGIA",
    "THREATS",
    "AdaptiveInjection",
    "Attack",
    "AttackResult",
    "Budget",
    "EnsembleInjection",
    "FeaturePGD",
    "Judge",
    "Ledger",
    "Member",
    "NaturalInjection",
    "Objective",
    "PGDInjection",
    "RandomEdges",
    "RandomInjection",
    "SearchSpec",
    "ShortEnsemble",
    "Threat",
    "ValueInjection",
    "check_budget",
    "draw_endpoints",
    "draw_features",
    "make_attack",
    "register_threat",
    "threat_of",
    "weak_search_note",
]
