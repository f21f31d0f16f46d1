"""An objective owns its loss and its damage: every search climbs the one and is judged by the other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from fgai import evaluate, limit, train
from fgai.attacks import (
    Budget,
    EnsembleInjection,
    NaturalInjection,
    Objective,
    PGDInjection,
    Threat,
    ValueInjection,
)
from fgai.attacks.search.members import EXPLANATION_MEMBERS
from fgai.attention import AttentionMap, LayerAttention, evaluating, observe, prepared
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.metrics.ranking import kept_by_layer
from fgai.objectives import Clean, TopKMargin
from support import attack_cases as cases
from support.graph_cases import small_data

SMALL = Budget(nodes=5, edges=5, box=(-1.0, 1.0), steps=6, step_size=0.3)
NATURAL = Budget(nodes=5, edges=5, box=None, steps=6, step_size=0.1)


def attack_of(kind: type, objective: Any, **options: Any) -> Any:
    budget = NATURAL if kind is NaturalInjection else SMALL
    if kind is EnsembleInjection:
        options = {"rules": ("random", "cover"), "baselines": ((2, 0.2, 1),), **options}
    return kind(budget, objective, k=cases.K, **options)


def outputs(model: torch.nn.Module, graph: Graph) -> tuple[Tensor, AttentionMap]:
    with evaluating(model), torch.no_grad():
        output = observe(model, prepared(model, graph))
    return output.logits, output.attention


@pytest.mark.parametrize("seed", cases.first(1, [0, 1]))
def test_the_ensemble_preserves_predictions_when_asked_to(seed: int) -> None:
    graph = small_data(seed=1, nodes=200)
    model = train("GAT", graph, epochs=30, progress=False)
    attack = EnsembleInjection(SMALL, "preserving", rules=("random",), baselines=())
    with cases.quiet():
        result = attack.run(model, graph, seed=seed)
    rows = graph.test_mask.nonzero().flatten()
    before, after = (outputs(model, view)[0][rows].argmax(1) for view in (graph, result.graph))
    assert float((before == after).float().mean()) >= 0.995
    assert max(result.ledger.damages) > 0


class FirstClass:
    """A user's objective: a large logit of the first class."""

    def __init__(self) -> None:
        self.climbed = 0

    def __call__(self, logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
        self.climbed += logits.requires_grad
        return logits[clean.nodes, 0].mean()


KINDS = (EnsembleInjection, ValueInjection, NaturalInjection, PGDInjection)


@pytest.mark.many
@pytest.mark.parametrize(("kind", "reads"), cases.first(4, cases.rotated(KINDS, ("logits", "heads"))))
def test_a_users_objective_is_climbed_and_judged(kind: type, reads: str) -> None:
    graph, model = cases.tiny_graph(), cases.trained("gat", "vanilla")
    if kind is ValueInjection:
        model = limit(model, graph, 0.0, shrink=0.0)
    loss = FirstClass()
    with cases.quiet():
        result = attack_of(kind, Objective("first class", loss, reads)).run(model, graph, seed=0)
    assert loss.climbed > 4
    assert result.value > max(result.start, result.noise)
    if kind is not ValueInjection:  # its change holds values, which no graph of features gives
        value = float(outputs(model, result.graph)[0][graph.test_mask.nonzero().flatten(), 0].mean())
        assert result.value == pytest.approx(value, abs=1e-5)
    if kind is not PGDInjection:
        assert max(result.ledger.damages) == pytest.approx(result.value, abs=1e-5)


def test_the_damage_chooses_and_the_loss_is_climbed() -> None:
    graph, model = cases.tiny_graph(), cases.trained("gat", "vanilla")

    def second_class(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
        return logits[clean.nodes, 1].mean()

    loss = FirstClass()
    objective = Objective("two", loss, "logits", damage=second_class)
    with cases.quiet():
        result = attack_of(EnsembleInjection, objective).run(model, graph, seed=0)
    logits = outputs(model, result.graph)[0][graph.test_mask.nonzero().flatten()]
    assert loss.climbed and max(result.ledger.damages) == pytest.approx(float(logits[:, 1].mean()), abs=1e-5)


@pytest.mark.parametrize("value", [torch.ones(3), torch.tensor(1), 0.5, None])
def test_an_objective_returns_one_number(value: Any) -> None:
    graph, model = cases.tiny_graph(), cases.trained("gat", "vanilla")
    with cases.quiet(), pytest.raises(InputError, match="'odd' must return a floating-point scalar"):
        attack_of(PGDInjection, Objective("odd", lambda *_: value)).run(model, graph)


@pytest.mark.parametrize("name", cases.first(1, ["gt", "gat", "pyg"]))
def test_the_judge_and_the_tables_use_one_function(name: str) -> None:
    graph, model = cases.tiny_graph(), cases.trained(name, "vanilla")
    attack = Threat("small", cases.SmallEnsemble, Budget(nodes=3, edges=4, box=(-1.0, 1.0), steps=2), "small")
    with cases.quiet():
        record = evaluate(model, graph, threat=attack, k=cases.K)
    damages = record.ledgers["explanation"]["damages"]
    kept = [record.value(f"endpoints.{rule}.explanation.overlap.all") for rule in ("random", "cover")]
    assert 1 - max(damages) == pytest.approx(min(kept), abs=1e-9)


def star(leaves: int, loose: int) -> LayerAttention:
    """Node 0 with `leaves` neighbours; node `leaves + 1` has `loose` of them as its own neighbours."""
    ends = [(leaf, 0) for leaf in range(1, leaves + 1)] + [(leaf, leaves + 1) for leaf in range(1, loose + 1)]
    source, destination = zip(*ends, strict=True)
    values = torch.arange(len(ends), 0, -1).float()[:, None]
    return LayerAttention.from_edges(values, list(source), list(destination), num_nodes=leaves + 2)


def test_a_layer_without_nodes_has_no_value() -> None:
    before = AttentionMap((star(6, 2), star(6, 6)))
    flipped = [dataclasses.replace(layer, values=layer.values.flip(0)) for layer in before.layers]
    near = torch.zeros(8, dtype=torch.bool)
    near[7] = True  # two neighbours in the first layer, six in the second
    clean = Clean(torch.zeros(8, 2), before, torch.arange(8))
    explanation = TopKMargin(3)
    kept = kept_by_layer(before, AttentionMap(tuple(flipped)), 3, [near, near])
    assert kept[0] != kept[0] and kept[1] == 0.0
    assert float(explanation.shares(AttentionMap(tuple(flipped)), clean, [near, near])[1]) == 1.0


def test_members_follow_what_the_objective_reads() -> None:
    assert EnsembleInjection(SMALL, "intruders").members[0].name == EXPLANATION_MEMBERS[0].name
