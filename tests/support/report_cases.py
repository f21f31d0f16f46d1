"""What the report suites share: two tiny models, attacked and compared, as one document."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

from fgai.attacks import AttackResult, Budget, PGDInjection, Threat
from fgai.certificates import (
    BudgetCertificate,
    CertificateRecord,
    InjectionCertificate,
    VotingCertificate,
    certify_attention,
    certify_budget,
    certify_injection,
    vote,
)
from fgai.errors import FgaiWarning
from fgai.evaluation import Comparison, compare
from fgai.models import AttentionModel
from fgai.reports import Report, make_report, render
from fgai.training import limit, train, untrained_model
from support.graph_cases import small_data

GRAPH = small_data()
K = 3
THREAT = Threat("few", PGDInjection, Budget(nodes=3, edges=5, steps=2, step_size=0.5), "for a tiny graph")
EVIL = "<script>document.title='broken'</script>"
NAMES = {n: f"paper {n}" for n in range(GRAPH.num_nodes)} | {7: EVIL, 8: '"&<b>bold</b>%{x}'}
CLASSES = ["<i>first</i>", "second", "third"]


@cache
def models() -> dict[str, AttentionModel]:
    return {
        name: train(untrained_model(kind, GRAPH, hidden_channels=2, heads=2), GRAPH, epochs=8, progress=False)
        for name, kind in (("GAT", "GAT"), ("FGAI", "GATv2"))
    }


@cache
def attacks() -> dict[str, AttackResult]:
    return {
        name: THREAT.attack(THREAT.budget, "prediction", k=K).run(m, GRAPH) for name, m in models().items()
    }


@cache
def comparison() -> Comparison:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FgaiWarning)  # numbers on so small a graph are rightly doubted
        return compare(models(), GRAPH, THREAT, k=K, per_node=True)


@cache
def certificates() -> dict[str, CertificateRecord]:
    return {name: certify_attention(m, GRAPH, radius=0.01, k1=K, k2=K) for name, m in models().items()}


@cache
def injection_certificate() -> InjectionCertificate:
    return certify_injection(limit(models()["GAT"], GRAPH, 0.0, shrink=0.0), GRAPH, k=K)


@cache
def budget_certificate() -> BudgetCertificate:
    return certify_budget(limit(models()["GAT"], GRAPH, 0.0, shrink=0.0), GRAPH, budgets=[(1, 2)])


@cache
def voting_certificate() -> VotingCertificate:
    return vote(models()["GAT"], GRAPH, groups=3)


def report(**options: Any) -> Report:
    """A report with everything in it; `options` change what is given."""
    given: dict[str, Any] = {
        "models": models(), "data": GRAPH, "attacks": attacks(), "certificates": certificates(),
        "node_names": NAMES, "class_names": CLASSES, **options,
    }  # fmt: skip
    return make_report(comparison(), **given)


@cache
def whole_report() -> Report:
    return report()


def cards_of(report: Report) -> str:
    """The cards on the page of a report."""
    return render(report, "").partition('<div class="cards">')[2].partition("</section>")[0]
