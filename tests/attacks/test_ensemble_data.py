"""The ensemble on real graphs: never weaker than the plain attack; chosen endpoints are worse than random."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import fgai
from fgai.attacks import Budget, EnsembleInjection, make_attack
from fgai.attention import call_model, evaluating
from fgai.graph import Graph
from fgai.metrics import f1
from support import attack_cases as cases

pytestmark = pytest.mark.data
FEW = Budget(nodes=20, edges=20, steps=25)


@cache
def case(name: str, root: Path) -> tuple[Graph, nn.Module]:
    graph = fgai.load_dataset(name, root=root, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh = fgai.GAT.for_data(graph)
    return graph, fgai.train(fresh, graph, epochs=30, validate_every=10, progress=False)


def score(model: nn.Module, graph: Graph, attacked: Graph) -> float:
    assert graph.y is not None and graph.test_mask is not None
    with evaluating(model), torch.no_grad():
        logits = call_model(model, attacked)[: graph.num_nodes]
    return f1(logits[graph.test_mask], graph.y[graph.test_mask])


@pytest.mark.parametrize("name", ["cora", pytest.param("amazon-photo", marks=pytest.mark.slow)])
def test_never_weaker_than_the_plain_attack(name: str, data_root: Path) -> None:
    graph, model = case(name, data_root)
    plain = make_attack("standard").run(model, graph, seed=0)
    attack = EnsembleInjection(FEW, rules=("random", "cover"))
    with cases.quiet():
        found = attack.run(model, graph, seed=0)
    assert score(model, graph, found.graph) <= score(model, graph, plain.graph) + 1e-6
    best = {
        rule: max(row["damage"] for row in found.ledger.members if row["endpoints"] == rule)
        for rule in attack.rules
    }
    assert best["cover"] > best["random"]
