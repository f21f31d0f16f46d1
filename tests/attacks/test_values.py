"""The threat `values`: an upper bound on attacks by features, for models with limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fgai.attacks import THREATS, Budget, EnsembleInjection, PGDInjection, ValueInjection
from fgai.attention import call_model
from fgai.errors import InputError
from fgai.evaluation import evaluate
from fgai.training import limit
from support import attack_cases as cases

BUDGET = Budget(nodes=2, edges=3, box=(-1.0, 1.0), steps=6)


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        *((name, "prediction") for name in ("gat", "gatv2", "pyg")),
        ("gat", "explanation"),
        pytest.param("gt", "prediction", marks=pytest.mark.slow),
        *(pytest.param(name, "explanation", marks=pytest.mark.slow) for name in ("gatv2", "gt", "pyg")),
    ],
)
def test_never_weaker_than_the_attack_by_features_it_contains(name: str, objective: str) -> None:
    graph = cases.tiny_graph()
    model = limit(cases.trained(name, "vanilla"), graph)
    inner = EnsembleInjection(BUDGET, objective, k=cases.K, rules=("random",))
    with cases.quiet():
        features = inner.run(model, graph, seed=2)
        found = ValueInjection(BUDGET, objective, k=cases.K, contained=inner).run(model, graph, seed=2)
        again = ValueInjection(BUDGET, objective, k=cases.K, contained=inner).run(model, graph, seed=2)
    assert max(found.ledger.damages) >= max(features.ledger.damages) - 1e-9
    assert found.ledger.damages == again.ledger.damages
    allowed = ValueInjection(BUDGET, objective, k=cases.K, contained=inner).allowed_steps
    assert 0 < found.ledger.steps <= allowed
    voices = found.change.voices
    assert voices is None or bool(((voices >= 0) & (voices <= 1)).all())


def test_what_is_reported_is_what_the_model_says() -> None:
    graph = cases.tiny_graph()
    model = limit(cases.trained("gatv2", "vanilla"), graph)
    plain = PGDInjection(replace(BUDGET, steps=2, step_size=0.1))
    with cases.quiet():
        found = ValueInjection(BUDGET, contained=plain).run(model, graph, seed=0)
    assert graph.y is not None and graph.test_mask is not None
    logits = call_model(model, found.graph)[: graph.num_nodes]
    wrong = float((logits.argmax(1) != graph.y)[graph.test_mask].double().mean())
    assert max(found.ledger.damages) == pytest.approx(wrong)


def test_a_voice_beats_features_in_a_tight_box() -> None:
    graph = cases.tiny_graph()
    model = limit(cases.trained("gat", "vanilla"), graph)
    tight = replace(BUDGET, nodes=4, edges=6, box=(-1e-3, 1e-3), steps=20)
    inner = EnsembleInjection(tight, rules=("random",))
    with cases.quiet():
        found = ValueInjection(tight, contained=inner).run(model, graph, seed=1)
    assert found.change.voices is not None
    assert max(found.ledger.damages) > found.ledger.damages[1]


def test_models_without_limits_are_refused() -> None:
    graph = cases.tiny_graph()
    with pytest.raises(InputError, match="models with limits"):
        ValueInjection(BUDGET).run(cases.trained("gat", "vanilla"), graph)


def test_evaluate_knows_it() -> None:
    graph = cases.tiny_graph()
    model = limit(cases.trained("gat", "vanilla"), graph)
    threat = replace(THREATS["values"], name="few values", budget=BUDGET)
    with cases.quiet():
        record = evaluate(model, graph, threat, curves=False, nulls=False)
    assert 0 <= record.metrics["f1"]["attacked"] <= record.metrics["f1"]["clean"] + 1e-9
