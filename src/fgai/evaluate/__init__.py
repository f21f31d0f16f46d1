"""The evaluation protocol: attack a model, measure it, and keep the result as a record."""

from fgai.evaluate.breaking import BreakingPoint, breaking_point
from fgai.evaluate.compare import Comparison, compare
from fgai.evaluate.protocol import evaluate
from fgai.evaluate.reach import touched_rows
from fgai.evaluate.record import EvaluationRecord
from fgai.evaluate.table import Column, Table

__all__ = [
    "BreakingPoint",
    "Column",
    "Comparison",
    "EvaluationRecord",
    "Table",
    "breaking_point",
    "compare",
    "evaluate",
    "touched_rows",
]
