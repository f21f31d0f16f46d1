"""GCN against PyG's layer, its shares as attention, its gates."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from scipy.sparse import csr_matrix
from torch import Tensor
from torch_geometric.nn import GCNConv

from fgai import Graph
from fgai.attention import record
from fgai.models import GCN, GCNLayer
from fgai.models.gcn import _shares
from fgai.training import make_faithful, train
from support.attention_cases import assert_sums
from support.forward import adding, seen_by
from support.graph_cases import small_data


def graph(sparse: bool = False, loops: bool = True) -> Graph:
    generator = torch.Generator().manual_seed(3)
    edges = torch.randint(9, (2, 22), generator=generator)
    edges = edges[:, edges[0] != edges[1]]
    features = torch.rand(11, 5, generator=generator)
    features = features * (features > 0.5)
    made = Graph.from_edges(
        edges,
        11,
        csr_matrix(features.numpy()) if sparse else features,
        undirected=True,
        y=torch.arange(11) % 3,
    )
    return made.add_self_loops()[0] if loops else made


def weights(of: Graph) -> Tensor:
    return torch.rand(of.num_edges, generator=torch.Generator().manual_seed(1)) + 0.05


@pytest.mark.parametrize(("weighted", "sparse"), list(product([False, True], repeat=2)))
def test_layer_equals_pyg(weighted: bool, sparse: bool) -> None:
    torch.manual_seed(0)
    data = graph(sparse)
    assert data.features is not None
    weight = weights(data) if weighted else None
    ours, theirs = GCNLayer(5, 4), GCNConv(5, 4, add_self_loops=False)
    with torch.no_grad():
        ours.value.weight.copy_(theirs.lin.weight.T)
        ours.bias.copy_(theirs.bias.uniform_())
    expected = theirs(data.features.to_dense(), data.edge_index, weight)
    torch.testing.assert_close(ours(data.features, data.adjacency, weight), expected)


def test_gradients_of_weights_equal_a_dense_formula() -> None:
    data = graph()
    one, two = (weights(data).double().requires_grad_() for _ in range(2))
    pull = torch.randn(data.num_edges, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    dense = torch.zeros(11, 11, dtype=torch.float64).index_put(
        (data.adjacency.destination, data.adjacency.source), two
    )
    scale = dense.sum(1).rsqrt()
    expected = (scale[:, None] * dense * scale)[data.adjacency.destination, data.adjacency.source]
    shares, sizes = _shares(data.adjacency, one, torch.float64)
    ours = shares[:, 0] * sizes[data.adjacency.destination]
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(
        torch.autograd.grad((ours * pull).sum(), one), torch.autograd.grad((expected * pull).sum(), two)
    )


def test_nodes_without_weight_give_the_bias() -> None:
    data = graph(loops=False)
    assert int(data.adjacency.degree[-1]) == 0
    layer = GCNLayer(5, 4)
    weight = torch.zeros(data.num_edges, requires_grad=True)
    out = layer(data.features, data.adjacency, weight)
    torch.testing.assert_close(out, torch.zeros(11, 4))
    out.sum().backward()
    assert weight.grad is not None and bool(torch.isfinite(weight.grad).all())


@pytest.mark.parametrize("gated", [False, True])
def test_shares_sum_to_one_and_can_be_perturbed(gated: bool) -> None:
    torch.manual_seed(0)
    data, model = graph(loops=False), GCN.for_data(graph(), gated=gated, hidden_channels=6).eval()
    logits, attention = seen_by(model, model.prepare(data))
    assert logits.shape == (11, 3) and len(attention) == 2
    assert_sums(attention)
    torch.testing.assert_close(logits, model(data))
    with record(model, perturb=adding({1: torch.full((attention.last.num_edges, 1), 0.1)})):
        assert not torch.allclose(model(data), logits)


def test_gates_start_shut_and_learn() -> None:
    torch.manual_seed(0)
    plain = GCN.for_data(graph(), hidden_channels=6)
    gated = GCN(**{**plain.config, "gated": True})
    gated.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(gated.eval()(graph()), plain.eval()(graph()))
    gated(graph()).square().sum().backward()
    assert all(float(conv.source_weight.grad.abs().max()) > 0 for conv in gated.convs)


def test_weight_zero_is_no_edge() -> None:
    torch.manual_seed(0)
    data, model = graph(), GCN.for_data(graph(), hidden_channels=6).eval()
    gone = (data.adjacency.source != data.adjacency.destination).nonzero().flatten()[::3]
    weight = torch.ones(data.num_edges).index_fill(0, gone, 0.0)
    torch.testing.assert_close(model(data.replace(edge_weight=weight)), model(data.remove(gone)[0]))


@pytest.mark.parametrize("gated", [True, False])
def test_a_faithful_one_is_a_gcn_of_the_same_kind(gated: bool) -> None:
    data = small_data()
    vanilla = train(
        GCN.for_data(data, hidden_channels=6, gated=gated), data, epochs=15, lr=0.05, progress=False
    )
    faithful = make_faithful(vanilla, data, nodes=3, edges=4, epochs=3, progress=False)
    assert type(faithful) is GCN and faithful.config == vanilla.config
    learned = [
        name
        for name, value in faithful.named_parameters()
        if not torch.equal(value, vanilla.get_parameter(name))
    ]
    assert any(name.endswith("source_weight") for name in learned) == gated
    before, after = (seen_by(model, model.prepare(data))[1].last.values for model in (vanilla, faithful))
    assert torch.equal(before, after) == (not gated)
