"""Leads that training raises are those that the certificate proves."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import fgai
from fgai.attention import prepared
from fgai.bounds.scores import check_two_layers, worst_margins
from fgai.certificates import certify_injection
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import GAT, GT, GATv2


@pytest.fixture(scope="module")
def planted() -> Graph:
    return fgai.load_dataset("planted")


@cache
def trained(kind: type) -> torch.nn.Module:
    return fgai.train(kind.__name__, fgai.load_dataset("planted"), epochs=15, progress=False)


def limited(kind: type, graph: Graph, clip_share: float, shrink: float) -> torch.nn.Module:
    return fgai.limit(trained(kind), graph, clip_share, shrink=shrink)


def precise(model: torch.nn.Module, graph: Graph) -> Graph:
    assert graph.features is not None
    return prepared(model, graph.replace(features=graph.features.to("cpu", torch.float64)))


@pytest.mark.many
@pytest.mark.parametrize("kind", [GAT, GATv2])
@pytest.mark.parametrize(("clip_share", "shrink"), [(0.0, 0.0), (0.05, 0.4), (0.3, 0.9)])
def test_what_is_certified_leads(kind: type, clip_share: float, shrink: float, planted: Graph) -> None:
    model = limited(kind, planted, clip_share, shrink)
    proof = certify_injection(model, planted, neighbours=1)
    assert bool(proof.certified.any()) or shrink < 0.9
    exact = model.double()
    graph = precise(exact, planted)
    with torch.no_grad():
        leads = worst_margins(exact, graph, proof.classes, neighbours=1, clip_share=clip_share, shrink=shrink)
    ahead = leads.amin(1) > 0
    assert bool(ahead[proof.certified].all())
    assert bool((leads.gather(1, proof.classes[:, None]) == torch.inf).all())


def test_more_neighbours_lead_less(planted: Graph) -> None:
    model = limited(GAT, planted, 0.05, 0.4)
    graph = prepared(model, planted)
    with torch.no_grad():
        classes = model(graph).argmax(1)
        one, two = (
            worst_margins(model, graph, classes, neighbours=t, clip_share=0.05, shrink=0.4).amin(1)
            for t in (1, 4)
        )
    assert bool((two <= one + 1e-4).all())


@pytest.mark.parametrize("kind", [GAT, GATv2])
def test_gradients_are_those_of_differences(kind: type, planted: Graph) -> None:
    model = limited(kind, planted, 0.0, 0.0).double()
    graph = precise(model, planted)
    classes = torch.zeros(graph.num_nodes, dtype=torch.long)
    weight = model.convs[-1].value.weight
    direction = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def value() -> torch.Tensor:
        leads = worst_margins(model, graph, classes, neighbours=1, clip_share=0.0, shrink=0.0)
        return leads[:, 1:].clamp(-50, 50).mean()

    value().backward()
    assert weight.grad is not None
    slope = float((weight.grad * direction).sum())
    found = []
    with torch.no_grad():
        for step in (1e-6, -1e-6):
            weight.add_(step * direction)
            found.append(float(value()))
            weight.sub_(step * direction)
    assert slope == pytest.approx((found[0] - found[1]) / 2e-6, rel=1e-3)


def test_others_are_refused() -> None:
    with pytest.raises(InputError, match="GAT or GATv2"):
        check_two_layers(GT(4, 3))
    with pytest.raises(InputError, match="two attention layers"):
        check_two_layers(GAT(4, 3, num_layers=3))
