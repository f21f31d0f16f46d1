"""What the evaluation suites share: tiny threats and one whole record."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from fgai.attacks import FeaturePGD, PGDInjection, RandomEdges, RandomInjection, Threat
from fgai.evaluation import EvaluationRecord, evaluate
from support import attack_cases as cases

THREAT = Threat("tiny", PGDInjection, cases.INJECTION, "3 nodes × 4 edges")
KINDS = {"inject": PGDInjection, "random": RandomInjection, "edges": RandomEdges, "modify": FeaturePGD}


def tiny_threat(kind: str) -> Threat:
    return Threat(kind, KINDS[kind], cases.BUDGETS[KINDS[kind]], kind)


def record_of(model: nn.Module | str = "gat", threat: Threat = THREAT, **options: Any) -> EvaluationRecord:
    """A quiet evaluation on 30 nodes."""
    model = cases.trained(model, "vanilla") if isinstance(model, str) else model
    graph = options.pop("graph", None) or cases.tiny_graph()
    with cases.quiet():
        return evaluate(model, graph, threat, **{"k": cases.K, "curves": False, "nulls": False, **options})


@cache
def whole_record() -> EvaluationRecord:
    """One evaluation with everything in it; shared, so no test may change it."""
    vanilla, model = cases.trained("gat", "vanilla"), cases.trained("gat", "faithful")
    return record_of(model, vanilla=vanilla, curves=True, nulls=True, per_node=True, name="FGAI")
