"""The adaptive injection: where it joins its nodes, what they wear, and that it beats the plain one."""

from __future__ import annotations

import pytest
import torch
from scipy.sparse import csr_matrix

from fgai.attacks import THREATS, AdaptiveInjection, PGDInjection
from fgai.attacks.endpoints import _near_endpoints
from fgai.attacks.injection import _mean_of_endpoints
from fgai.sparse.features import as_features
from support import attack_cases as cases


def test_endpoints_come_from_one_neighbourhood_each() -> None:
    graph = cases.tiny_graph()
    assert graph.test_mask is not None
    nodes = graph.test_mask.nonzero().flatten()
    found = _near_endpoints(graph, nodes, 5, 4, torch.Generator().manual_seed(0))
    assert found.shape == (5, 4) and bool(torch.isin(found, nodes).all())
    dense = torch.zeros(30, 30)
    dense[graph.adjacency.destination, graph.adjacency.source] = 1
    paths = dense + dense @ dense
    centre = nodes[torch.randint(nodes.numel(), (5,), generator=torch.Generator().manual_seed(0))]
    for start, row in zip(centre.tolist(), found, strict=True):
        assert row.unique().numel() == 4
        best = paths[nodes, start].sort(descending=True).values[:4]
        assert torch.equal(paths[row, start].sort(descending=True).values, best)


def test_disguise_is_the_average_of_the_endpoints() -> None:
    graph = cases.tiny_graph()
    assert graph.features is not None
    ends = torch.tensor([[3, 7, 9], [7, 1, 2]])
    x = graph.features.to_dense()
    expected = x[ends].mean(1)
    torch.testing.assert_close(_mean_of_endpoints(graph, ends), expected)
    sparse = graph.replace(features=as_features(csr_matrix(x.numpy())))
    torch.testing.assert_close(_mean_of_endpoints(sparse, ends), expected)


@pytest.mark.parametrize("recipe", cases.first(2, ["vanilla", "gnnguard", "gnn-svd"]))
def test_never_weaker_than_its_first_climb(recipe: str) -> None:
    model, graph = cases.trained("gat", recipe), cases.tiny_graph()
    with cases.quiet():
        plain = cases.attack(PGDInjection, steps=3, step_size=0.3, restarts=1).run(model, graph, seed=2)
        whole = cases.attack(AdaptiveInjection).run(model, graph, seed=2)
    assert whole.value >= plain.value - 1e-6
    assert whole.ledger.steps == 4 * plain.ledger.steps


def test_the_budget_of_standard_with_more_steps() -> None:
    standard, adaptive = (THREATS[name].budget for name in ("standard", "adaptive"))
    assert (adaptive.nodes, adaptive.edges, adaptive.box) == (standard.nodes, standard.edges, standard.box)
    assert adaptive.restarts == 4 and adaptive.steps > standard.steps
