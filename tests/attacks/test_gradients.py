"""Whose gradient a search climbs: straight through limits, or that of a softer softmax."""

from __future__ import annotations

import copy

import pytest
import torch

from fgai.attacks import Budget, EnsembleInjection
from fgai.attacks.search.members import (
    GRADIENTS,
    PREDICTION_MEMBERS,
    Member,
    _saturated_layer,
    _with_temperature,
)
from fgai.attention import find_layers, observe, prepared
from fgai.errors import InputError
from fgai.training import limit
from support import attack_cases as cases

BUDGET = Budget(nodes=3, edges=5, steps=30)


def sharpened(name: str, factor: float):
    """A model whose scores are so large that attention is all or nothing."""
    model = copy.deepcopy(cases.trained(name, "vanilla")).eval()
    with torch.no_grad():
        for layer in find_layers(model).values():
            for kind, parameter in layer.named_parameters(recurse=False):
                if kind in ("source_weight", "destination_weight", "score_weight", "att_src", "att_dst"):
                    parameter.mul_(factor)
            if hasattr(layer, "query"):
                for parameter in layer.query.parameters():
                    parameter.mul_(factor)
    return model


@pytest.mark.parametrize("name", ["gat", "gatv2", "gt", "pyg"])
def test_a_softer_copy_is_not_saturated(name: str) -> None:
    graph, model = cases.tiny_graph(), sharpened(name, 1e5)
    graph = prepared(model, graph)
    assert _saturated_layer(observe(model, graph, heads="mean").attention) is not None
    soft = _with_temperature(model, graph)
    assert soft is not None and soft is not model
    assert _saturated_layer(observe(soft, graph, heads="mean").attention) is None
    limited = limit(model, graph, 0.0, shrink=0.0)
    cooled = _with_temperature(limited, graph)
    assert cooled is not None and _saturated_layer(observe(cooled, graph, heads="mean").attention) is None


def test_members_serve_where_their_gradient_does() -> None:
    graph = prepared(cases.trained("gat", "vanilla"), cases.tiny_graph())
    plain, sharp = cases.trained("gat", "vanilla"), sharpened("gat", 1e5)
    for model, kinds in (
        (plain, {"true"}),
        (limit(plain, graph, 0.0, shrink=0.0), {"true", "straight"}),
        (sharp, {"true", "smooth"}),
    ):
        attention = observe(model, graph).attention
        assert {name for name, serves in GRADIENTS.items() if serves(model, attention)} == kinds
        with cases.quiet():
            result = EnsembleInjection(BUDGET, rules=("random",)).run(model, graph, seed=0)
        ran = {row["member"] for row in result.ledger.members}
        for member in PREDICTION_MEMBERS:
            assert (member.name in ran) == (member.gradient in kinds)


def test_a_saturated_model_is_broken_through_a_softer_one() -> None:
    graph, model = cases.tiny_graph(), sharpened("gat", 1e4)
    members = [
        Member(name="true", start="small", rate=0.03, steps=60),
        Member(name="smooth", start="small", rate=0.03, steps=60, gradient="smooth"),
    ]
    with cases.quiet():
        budget = Budget(nodes=6, edges=8)
        result = EnsembleInjection(budget, members=members, rules=("random",), baselines=()).run(model, graph)
    damage = {row["member"]: row["damage"] for row in result.ledger.members}
    assert damage["smooth"] >= damage["true"]
    assert max(result.ledger.damages) >= damage["smooth"] - 1e-6  # judged on the model itself


def test_unknown_gradients_are_refused() -> None:
    with pytest.raises(InputError, match="gradient"):
        Member(name="odd", start="small", gradient="numeric")
