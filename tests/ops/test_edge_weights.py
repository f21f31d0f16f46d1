"""Weights on edges: the softmax, what the models make of them, and how edits carry them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from fgai import GAT, GT, GATv2, Graph
from fgai.attention import call_model
from fgai.errors import InputError
from fgai.models import AttentionModel
from fgai.ops import edge_softmax, weighted_softmax
from fgai.sparse import Adjacency
from support.forward import seen_by
from support.ops_cases import adjacencies, skewed

MODELS: dict[str, type[AttentionModel]] = {"GAT": GAT, "GATv2": GATv2, "GT": GT}


def plain(scores: Tensor, weight: Tensor, adjacency: Adjacency) -> Tensor:
    """Node by node; written so that weight 0 has a gradient."""
    out = torch.zeros_like(scores)
    for i in range(adjacency.num_nodes):
        first, last = int(adjacency.rowptr[i]), int(adjacency.rowptr[i + 1])
        row = weight[first:last, None] * torch.exp(scores[first:last])
        if last > first and float(row.detach().sum()) > 0:
            out = out.index_copy(0, torch.arange(first, last), row / row.sum(0))
    return out


def drawn(adjacency: Adjacency, heads: int, zeros: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(adjacency.num_edges + heads)
    scores = torch.randn(adjacency.num_edges, heads, generator=generator, dtype=torch.float64)
    weight = torch.rand(adjacency.num_edges, generator=generator, dtype=torch.float64) + 0.1
    if zeros:
        weight = weight * (torch.rand(adjacency.num_edges, generator=generator) > 0.4)
    return scores.requires_grad_(), weight.requires_grad_()


@given(adjacencies())
def test_equals_the_formula_and_its_gradients(adjacency: Adjacency) -> None:
    for zeros in (False, True):
        scores, weight = drawn(adjacency, 3, zeros)
        ours, theirs = weighted_softmax(scores, weight, adjacency), plain(scores, weight, adjacency)
        torch.testing.assert_close(ours, theirs)
        pull = torch.randn(ours.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        got = torch.autograd.grad((ours * pull).sum(), [scores, weight])
        expected = torch.autograd.grad(
            (theirs * pull).sum() + 0 * (scores.sum() + weight.sum()), [scores, weight]
        )
        torch.testing.assert_close(got, expected)


def test_gradcheck() -> None:
    adjacency = skewed()
    scores, weight = drawn(adjacency, 2, zeros=False)
    few, _ = Adjacency.build(
        torch.stack([adjacency.source[:25], adjacency.destination[:25]]), adjacency.num_nodes
    )
    assert torch.autograd.gradcheck(
        lambda s, w: weighted_softmax(s, w, few), (scores[:25].detach().requires_grad_(), weight[:25])
    )


def test_equal_weights_change_nothing() -> None:
    adjacency = skewed()
    scores, _ = drawn(adjacency, 3, zeros=False)
    weight = torch.full((adjacency.num_edges,), 0.3, dtype=torch.float64)
    torch.testing.assert_close(weighted_softmax(scores, weight, adjacency), edge_softmax(scores, adjacency))


def test_extreme_scores_of_absent_edges_do_not_matter() -> None:
    adjacency, _ = Adjacency.build(torch.tensor([[0, 1, 2, 0], [2, 2, 2, 3]]), 4)
    scores = torch.tensor([[0.0], [0.5], [4000.0], [7.0]], requires_grad=True)
    weight = torch.tensor([1.0, 1e-30, 0.0, 0.0], requires_grad=True)
    out = weighted_softmax(scores, weight, adjacency)
    torch.testing.assert_close(out.flatten(), torch.tensor([1.0, 0.0, 0.0, 0.0]), atol=1e-6, rtol=0)
    (out[:3] * torch.tensor([[1.0], [2.0], [5.0]])).sum().backward()
    assert scores.grad is not None and weight.grad is not None
    assert bool(torch.isfinite(scores.grad).all()) and bool(torch.isfinite(weight.grad).all())
    assert float(scores.grad[2]) == 0.0 and float(weight.grad[2]) > 0


def graph_with(weight: Tensor | None) -> Graph:
    generator = torch.Generator().manual_seed(3)
    edges = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 3, 5]])
    features = torch.randn(6, 4, generator=generator)
    graph = Graph.from_edges(edges, 6, features, undirected=True, y=torch.tensor([0, 1, 2, 0, 1, 2]))
    graph = graph.add_self_loops()[0]
    return graph if weight is None else graph.replace(edge_weight=weight)


@pytest.mark.parametrize("name", MODELS)
class TestModels:
    def model(self, name: str) -> nn.Module:
        torch.manual_seed(1)
        options = {"encodings": 0} if name == "GT" else {}
        return MODELS[name].for_data(graph_with(None), **options).eval()

    def test_weight_one_is_no_weight(self, name: str) -> None:
        model, bare = self.model(name), graph_with(None)
        weighted = graph_with(torch.ones(bare.num_edges))
        torch.testing.assert_close(model(weighted), model(bare), atol=1e-5, rtol=1e-5)

    def test_weight_zero_is_no_edge(self, name: str) -> None:
        model, bare = self.model(name), graph_with(None)
        gone = (bare.adjacency.source != bare.adjacency.destination).nonzero().flatten()[::3]
        weight = torch.ones(bare.num_edges).index_fill(0, gone, 0.0)
        without, kept = bare.remove(gone)
        torch.testing.assert_close(model(graph_with(weight)), model(without), atol=1e-5, rtol=1e-5)
        seen = seen_by(model, model.prepare(graph_with(weight)))[1].last.values
        alone = seen_by(model, model.prepare(without))[1].last.values
        torch.testing.assert_close(seen[kept.before], alone, atol=1e-5, rtol=1e-5)

    def test_gradients_reach_the_weights(self, name: str) -> None:
        weight = torch.full((graph_with(None).num_edges,), 0.7, requires_grad=True)
        self.model(name)(graph_with(weight)).square().sum().backward()
        assert weight.grad is not None and float(weight.grad.abs().max()) > 0

    def test_one_number_per_edge(self, name: str) -> None:
        with pytest.raises(InputError, match="one per edge"):
            self.model(name)(graph_with(torch.ones(5)))


def test_edits_carry_the_weights() -> None:
    bare = graph_with(None)
    weight = torch.rand(bare.num_edges, generator=torch.Generator().manual_seed(0)).requires_grad_()
    graph = bare.replace(edge_weight=weight)
    for edited, kept in (
        graph.inject(torch.tensor([[0, 2], [3, 1]])),
        graph.inject_edges(torch.tensor([[0, 5], [2, 1]])),
        graph.remove(torch.tensor([1, 4])),
    ):
        assert edited.edge_weight is not None and edited.edge_weight.shape == (edited.num_edges,)
        assert torch.equal(edited.edge_weight[kept.after], weight[kept.before])
        fresh = torch.ones(edited.num_edges, dtype=torch.bool).index_fill(0, kept.after, False)
        assert bool((edited.edge_weight[fresh] == 1).all())
        assert edited.edge_weight.requires_grad
    assert graph.to("cpu").edge_weight is not None


def test_a_model_that_would_not_see_the_weights_is_refused() -> None:
    class Mine(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return x

    graph = graph_with(torch.ones(graph_with(None).num_edges))
    with pytest.raises(InputError, match="is no argument of"):
        call_model(Mine(), graph)
