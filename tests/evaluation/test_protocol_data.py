"""The protocol on real data: what must come out on Photo with a vanilla GAT, seed 0."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fgai.attacks import THREATS, make_attack
from fgai.attention import call_model, evaluating, prepared
from fgai.datasets import load_dataset
from fgai.evaluation import evaluate
from fgai.graph import Graph
from fgai.models import GAT
from fgai.training import train

pytestmark = pytest.mark.data
PAPER = THREATS["standard"].sized(box=(-1.0, 1.0))


@cache
def photo_and_gat(root: Path) -> tuple[Graph, nn.Module]:
    graph = load_dataset("amazon-photo", root=root, seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh = GAT.for_data(graph)
    return graph, train(fresh, graph, seed=0, epochs=40, validate_every=10, progress=False)


def plain_sign_gradient(model: nn.Module, graph: Graph, endpoints: Tensor) -> float:
    """Ten signed steps of 0.1 in [-1, 1] from zero features, with nothing of the attack package in it.

    New nodes are joined in both directions and get a loop; the loss is the cross-entropy of the test nodes
    against the clean prediction.
    """
    nodes, count = graph.num_nodes, endpoints.shape[0]
    new = nodes + torch.arange(count)[:, None].expand_as(endpoints)
    ends = torch.stack([new.flatten(), endpoints.flatten()])
    loops = torch.arange(nodes + count).expand(2, -1)
    edges = torch.cat([graph.edge_index, ends, ends.flip(0), loops], dim=1)
    assert graph.features is not None and graph.test_mask is not None
    x = graph.features.to_dense()
    loss = torch.tensor(0.0)
    with evaluating(model):
        with torch.no_grad():
            label = call_model(model, prepared(model, graph))[graph.test_mask].argmax(1)
        added = torch.zeros(count, x.shape[1])
        for step in range(11):
            added.requires_grad_()
            attacked = Graph.from_edges(edges, nodes + count, torch.cat([x, added]))
            loss = cross_entropy(call_model(model, attacked)[:nodes][graph.test_mask], label)
            if step < 10:
                (gradient,) = torch.autograd.grad(loss, added)
                added = (added.detach() + 0.1 * gradient.sign()).clamp(-1, 1)
    return float(loss.detach())


def test_the_standard_threat_breaks_a_vanilla_gat(data_root: Path) -> None:
    graph, model = photo_and_gat(data_root)
    record = evaluate(model, graph, PAPER, explanation_attack=False, curves=False, nulls=False)
    assert record.value("f1.clean") > 0.85
    assert record.value("f1.attacked") < 0.60
    assert record.value("g_jsd.all") > 0
    assert record.value("overlap_touched.prediction.all") < record.value("overlap.prediction.all")
    assert record.warnings == []


def test_pgd_is_at_least_as_strong_as_a_plain_attack(data_root: Path) -> None:
    graph, model = photo_and_gat(data_root)
    result = make_attack(PAPER).run(model, graph, seed=0)
    assert result.change.endpoints is not None
    plain = plain_sign_gradient(model, graph, result.change.endpoints)
    assert plain > result.start
    assert result.value >= plain * (1 - 1e-4)
