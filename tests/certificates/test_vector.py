"""One vector is shown, ranked and certified: the normalised geometric mean of the heads."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv

import fgai
from fgai.attention import LayerAttention, observe, prepared
from fgai.certificates import CertificateRecord, certify_attention
from fgai.errors import CheckpointError
from fgai.graph import Graph
from fgai.topk import swap_costs, topk_mask
from support.certify_cases import NORMS, cheapest_swap

K = 5
ORDER = {"l1": 1.0, "l2": 2.0, "linf": math.inf}


class PyG(nn.Module):
    """Two layers, the first with eight heads."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = GATConv(features, 4, heads=8), GATConv(32, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


@functools.cache
def trained(kind: str) -> tuple[nn.Module, Graph]:
    torch.manual_seed(0)
    data = fgai.load_dataset("planted")
    model = PyG(data.num_features, data.num_classes) if kind == "pyg" else fgai.GAT.for_data(data, heads=8)
    return fgai.train(model, data, epochs=25, progress=False).eval(), data


@functools.cache
def certified(kind: str, norm: str) -> CertificateRecord:
    return certify_attention(*trained(kind), radius=0.0, k1=K, k2=K, norm=norm)


@functools.cache
def shown(kind: str, node: int, layer: int) -> tuple[tuple[int, ...], Tensor]:
    """The neighbours that `explain` lists, and their weights."""
    found = fgai.explain(*trained(kind), node, k=K, layer=layer, threat=None, certificate=False)
    weights = torch.tensor([entry["attention"] for entry in found.neighbours], dtype=torch.float64)
    return tuple(entry["node"] for entry in found.neighbours), weights


def some_nodes(kind: str, layer: int) -> list[int]:
    """Thirty nodes with more neighbours than an explanation lists."""
    degree = certified(kind, "l1").layer(layer).degree
    return (degree > K).nonzero().flatten()[:30].tolist()


def aimed(count: int, norm: str) -> Tensor:
    """The cheapest change that lets the last member and the first outsider meet, of size one in `norm`."""
    delta = torch.zeros(count, dtype=torch.float64)
    delta[K - 1], delta[K] = -1.0, 1.0
    return delta / torch.linalg.vector_norm(delta, ORDER[norm])


def top(weights: Tensor) -> set[int]:
    return set(torch.argsort(weights, descending=True, stable=True)[:K].tolist())


@pytest.mark.many
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", ["gat", "pyg"])
def test_nothing_inside_the_certified_radius_changes_the_shown_set(kind: str, layer: int, norm: str) -> None:
    radii = certified(kind, norm).layer(layer).topk_radius
    generator = torch.Generator().manual_seed(0)
    for node in some_nodes(kind, layer):
        _, weights = shown(kind, node, layer)
        radius, members = float(radii[node]), set(range(K))
        random = torch.randn(100, len(weights), generator=generator, dtype=torch.float64)
        size = torch.linalg.vector_norm(random, ORDER[norm], dim=1, keepdim=True)
        direct = aimed(len(weights), norm)[None]
        for delta in 0.99 * radius * torch.cat([random / size, direct]):
            assert top(weights + delta) == members, node
        if radius > 0:  # and the radius is attained
            assert top(weights + 1.01 * radius * direct[0]) != members, node


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", ["gat", "pyg"])
def test_swap_costs_are_the_cheapest_swaps_of_the_shown_vector(kind: str, norm: str) -> None:
    costs = certified(kind, norm).layer(0).costs
    few = [node for node in some_nodes(kind, 0) if len(shown(kind, node, 0)[1]) <= 9][:4]
    assert few
    for node in few:
        weights = shown(kind, node, 0)[1].numpy()
        for m in range(1, min(K, len(weights) - K) + 1):
            assert float(costs[node, m - 1]) == pytest.approx(cheapest_swap(weights, K, m, norm), abs=1e-7)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", ["gat", "pyg"])
def test_the_shown_weights_are_the_normalised_geometric_mean(kind: str, layer: int) -> None:
    model, data = trained(kind)
    heads = observe(model, prepared(model, data)).attention[layer]
    ranks = heads.ranking()
    for node in some_nodes(kind, layer):
        nodes, weights = shown(kind, node, layer)
        assert float(weights.sum()) == pytest.approx(1.0, abs=1e-12)
        row = slice(*heads.rowptr[node : node + 2].tolist())
        product = heads.values[row].double().log().mean(1).exp()
        expected = dict(zip(heads.source[row].tolist(), (product / product.sum()).tolist(), strict=True))
        torch.testing.assert_close(
            weights, torch.tensor([expected[n] for n in nodes], dtype=torch.float64), atol=1e-6, rtol=1e-5
        )
        order = torch.argsort(ranks[row], descending=True, stable=True)
        assert nodes == tuple(heads.source[row][order].tolist())  # the order that metrics use


@pytest.mark.many
@pytest.mark.parametrize("kind", ["gat", "pyg"])
def test_one_explanation_shows_and_certifies_the_same_set(kind: str) -> None:
    model, data = trained(kind)
    for node in some_nodes(kind, 0)[:2]:
        for layer in (0, 1):
            found = fgai.explain(model, data, node, k=K, layer=layer, threat=None)
            assert found.certified is not None
            entry = found.certified["layers"][layer]
            assert set(entry["topk"]) == {one["node"] for one in found.neighbours[:K]}
            assert entry["topk_radius"] == found.certified["shown_radius"]
            assert entry["topk_radius"] == float(certified(kind, "l1").layer(layer).topk_radius[node])
        found = fgai.explain(model, data, node, k=K, threat=None)  # the mean over layers has its own radius
        weights = [one["attention"] for one in found.neighbours]
        assert found.certified is not None
        assert found.certified["shown_radius"] == pytest.approx(weights[K - 1] - weights[K], abs=1e-12)
        assert fgai.explain(model, data, node, layer="max", threat=None).certified["shown_radius"] is None


def layer_of(values: list[list[float]], scores: list[float] | None = None) -> LayerAttention:
    """Attention of node 0 on as many neighbours as rows."""
    count, w = len(values), torch.tensor(values)
    layer = LayerAttention.from_edges(w, list(range(count)), [0] * count, count)
    return layer if scores is None else layer.with_values(layer.values, torch.tensor(scores))


class TestExplanationVector:
    def test_a_head_without_attention_leaves_nothing(self) -> None:
        w = layer_of([[0.9, 0.0], [0.05, 0.6], [0.05, 0.4]])
        expected = torch.tensor([0.0, 0.03**0.5, 0.02**0.5], dtype=torch.float64)
        torch.testing.assert_close(w.explanation(), expected / expected.sum(), atol=1e-7, rtol=1e-6)
        assert w.ranking().argsort().tolist() == [0, 2, 1]

    def test_where_every_neighbour_lacks_a_head_the_fewest_zeros_count(self) -> None:
        w = layer_of([[1.0, 0.0], [0.0, 0.75], [0.0, 0.25], [0.0, 0.0]])
        expected = torch.tensor([1.0, 0.75**0.5, 0.25**0.5, 0.0], dtype=torch.float64)
        torch.testing.assert_close(w.explanation(), expected / expected.sum())
        assert w.ranking().argsort().tolist() == [3, 2, 1, 0]

    def test_what_cannot_be_told_apart_ties(self) -> None:
        w = layer_of([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]])
        assert swap_costs(w.explanation(), w.rowptr, 2).flatten()[0] == 0.0

    def test_one_head_is_the_attention_itself(self) -> None:
        w = layer_of([[0.2], [0.8]])
        assert torch.equal(w.explanation(), w.values[:, 0].double())

    def test_scores_that_differ_by_little_do_not_tie(self) -> None:
        scores = [1.0, 1.0 + 2**-22, 1.0 - 2**-22]
        w = layer_of([[0.3, 0.3]] * 3, scores)
        assert w.explanation().argsort().tolist() == [2, 0, 1]
        assert float(w.explanation().sum()) == pytest.approx(1.0, abs=1e-15)
        torch.testing.assert_close(w.heads("log").double(), w.explanation(), atol=1e-7, rtol=0)

    def test_gradients_are_finite_at_zeros(self) -> None:
        values = torch.tensor([[0.9, 0.0], [0.1, 1.0]], requires_grad=True)
        w = LayerAttention.from_edges(values, [0, 1], [0, 0], 2)
        (slope,) = torch.autograd.grad(w.heads("log")[0], values)
        assert bool(slope.isfinite().all())

    def test_equal_scores_cost_nothing_whatever_rounding_does(self) -> None:
        model, data = trained("gat")
        seen = observe(model, prepared(model, data)).attention[0]
        costs = certified("gat", "l1").layer(0).costs
        gaps = swap_costs(seen.ranking().double(), seen.rowptr, K, "linf")
        assert bool((costs[gaps <= 0] == 0).all())
        assert torch.equal(
            topk_mask(seen.ranking(), seen.rowptr, K), topk_mask(seen.explanation(), seen.rowptr, K)
        )


def test_records_say_which_vector_they_are_about(tmp_path: Path) -> None:
    record = certified("gat", "l1")
    assert record.explanation == "normalised geometric mean of the heads"
    again = CertificateRecord.load(record.save(tmp_path / "certificate.json"))
    assert again.explanation == record.explanation and torch.equal(
        again.layer(0).costs, record.layer(0).costs
    )
    assert again.layer(0).sharpness == record.layer(0).sharpness
    assert record.summary()["explanation"] == record.explanation
    assert record.explanation in record.to_markdown()
    older = record.to_dict()
    del older["explanation"]
    with pytest.raises(CheckpointError, match="lacks `explanation`"):
        CertificateRecord.from_dict(older)
    older["promise"] = "each head moved by at most R"
    told = CertificateRecord.from_dict(older)
    assert told.explanation == "arithmetic mean of the heads" and told.explanation in told.to_markdown()


def test_similarity_to_vanilla_is_that_of_the_shown_sets() -> None:
    model, data = trained("gat")
    torch.manual_seed(1)
    other = fgai.train(fgai.GAT.for_data(data, heads=8), data, epochs=3, seed=1, progress=False).eval()
    record = certify_attention(model, data, vanilla=other, radius=0.0, k1=K, k2=K)
    beta = record.layer(0).beta1
    assert beta is not None
    for node in some_nodes("gat", 0)[:10]:
        mine = set(shown("gat", node, 0)[0][:K])
        theirs = fgai.explain(other, data, node, k=K, layer=0, threat=None, certificate=False)
        both = mine & {entry["node"] for entry in theirs.neighbours[:K]}
        assert float(beta[node]) == pytest.approx(len(both) / K)
