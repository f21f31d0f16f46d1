"""The threat `values`: an upper bound on attacks by features, for model with limits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fgai.attacks import THREATS, Budget, EnsembleInjection, PGDInjection, ValueInjection
from fgai.attacks.search.site import _InjectionSite
from fgai.attention import call_model, entry_limits, evaluating, observe, prepared
from fgai.errors import InputError
from fgai.evaluation import evaluate
from fgai.graph import GraphChange
from fgai.objectives import Clean
from fgai.recompute import Recompute
from fgai.training import limit
from support import attack_cases as cases

BUDGET = Budget(nodes=2, edges=3, steps=6)


@pytest.mark.many
@pytest.mark.parametrize(
    ("name", "objective"),
    cases.first(
        2,
        [
            *(("pyg", "prediction"), ("gat", "explanation")),
            *((name, "prediction") for name in ("gat", "gatv2", "gt")),
            *((name, "explanation") for name in ("gatv2", "gt", "pyg")),
        ],
    ),
)
def test_never_weaker_than_the_attack_by_features_it_contains(name: str, objective: str) -> None:
    graph = cases.tiny_graph()
    model = limit(cases.trained(name, "vanilla"), graph, 0.0, shrink=0.0)
    inner = EnsembleInjection(BUDGET, objective, k=cases.K, rules=("random",), baselines=((4, 0.1, 1),))
    with cases.quiet():
        features = inner.run(model, graph, seed=2)
        found = ValueInjection(BUDGET, objective, k=cases.K, feature_attack=inner).run(model, graph, seed=2)
        again = ValueInjection(BUDGET, objective, k=cases.K, feature_attack=inner).run(model, graph, seed=2)
    assert max(found.ledger.damages) >= max(features.ledger.damages) - 1e-9
    assert found.ledger.damages == again.ledger.damages
    allowed = ValueInjection(BUDGET, objective, k=cases.K, feature_attack=inner).max_steps
    assert 0 < found.ledger.steps <= allowed
    entry_values = found.change.entry_values
    assert entry_values is None or bool(((entry_values >= 0) & (entry_values <= 1)).all())


def test_what_is_reported_is_what_the_model_says() -> None:
    graph = cases.tiny_graph()
    model = limit(cases.trained("gatv2", "vanilla"), graph, 0.0, shrink=0.0)
    plain = PGDInjection(replace(BUDGET, steps=2, step_size=0.1))
    with cases.quiet():
        found = ValueInjection(BUDGET, feature_attack=plain).run(model, graph, seed=0)
    assert graph.y is not None and graph.test_mask is not None
    logits = call_model(model, found.graph)[: graph.num_nodes]
    wrong = float((logits.argmax(1) != graph.y)[graph.test_mask].double().mean())
    assert max(found.ledger.damages) == pytest.approx(wrong)


def test_a_voice_beats_features_in_a_tight_box() -> None:
    graph = cases.tiny_graph()
    model = limit(cases.trained("gat", "vanilla"), graph, 0.0, shrink=0.0)
    tight = replace(BUDGET, nodes=4, edges=6, box=(-1e-3, 1e-3), steps=20)
    inner = EnsembleInjection(tight, rules=("random",))
    with cases.quiet():
        found = ValueInjection(tight, feature_attack=inner).run(model, graph, seed=1)
    assert found.change.entry_values is not None
    assert max(found.ledger.damages) > found.ledger.damages[1]


@pytest.mark.parametrize("name", ["gat", "gatv2", "gt"])
def test_rows_in_reach_say_what_the_whole_graph_says(name: str) -> None:
    graph = cases.tiny_graph()
    model = limit(cases.trained(name, "vanilla"), graph, 0.0, shrink=0.0)
    ready, draws = prepared(model, graph), torch.Generator().manual_seed(3)
    features = torch.randn(2, ready.features.num_columns, generator=draws)  # type: ignore[union-attr]
    with evaluating(model, freeze=True):
        recompute, seen = Recompute(model, ready), observe(model, ready, heads="mean")
        rows = ready.test_mask.nonzero().flatten()  # type: ignore[union-attr]
        clean, endpoints = Clean(seen.logits, seen.attention, rows), rows[:6].view(2, 3)
        size = sum(limits.low.numel() for limits in entry_limits(model))
        entry_values = torch.rand(3, 2, size, generator=draws).requires_grad_()
        change = GraphChange(endpoints=endpoints, features=features)
        part, whole = (
            _InjectionSite(model, ready, change, clean, one, reads="logits", variable="entry_values")
            for one in (recompute, None)
        )
        if part.plan is None:  # a tiny graph is all in reach
            part._set_plan(recompute.plan(change, rows, limit=float("inf")))
        made, truth = part.run(entry_values), whole.run(entry_values)
        joined = [
            GraphChange(endpoints=endpoints, features=features, entry_values=one) for one in entry_values
        ]
        judged = torch.stack([call_model(model, one.apply(ready)[0])[rows] for one in joined])
    torch.testing.assert_close(truth.logits, judged)
    at = torch.searchsorted(rows, part.rows)
    torch.testing.assert_close(made.logits, truth.logits[:, at], atol=1e-5, rtol=1e-5)
    slopes = [
        torch.autograd.grad(x.square().sum(), entry_values)[0] for x in (made.logits, truth.logits[:, at])
    ]
    torch.testing.assert_close(*slopes, atol=1e-5, rtol=1e-4)


def test_models_without_limits_are_refused() -> None:
    graph = cases.tiny_graph()
    with pytest.raises(InputError, match="model with limits"):
        ValueInjection(BUDGET).run(cases.trained("gat", "vanilla"), graph)


def test_evaluate_knows_it() -> None:
    graph = cases.tiny_graph()
    model = limit(cases.trained("gat", "vanilla"), graph, 0.0, shrink=0.0)
    threat = replace(THREATS["values"], name="few values", budget=BUDGET)
    with cases.quiet():
        record = evaluate(model, graph, threat, curves=False, nulls=False, explanation_attack=False)
    assert 0 <= record.metrics["f1"]["attacked"] <= record.metrics["f1"]["clean"] + 1e-9
