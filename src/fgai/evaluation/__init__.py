"""The evaluation protocol: attack a model, measure it, and keep the result as a record."""

from fgai.evaluation.breaking import BreakingPoint, breaking_point
from fgai.evaluation.definition import definition_shares, faithful_share
from fgai.evaluation.record import Comparison, EvaluationRecord
from fgai.evaluation.run import compare, damage_by_endpoints, describe, evaluate

__all__ = [
    "BreakingPoint",
    "Comparison",
    "EvaluationRecord",
    "breaking_point",
    "compare",
    "damage_by_endpoints",
    "definition_shares",
    "describe",
    "evaluate",
    "faithful_share",
]
