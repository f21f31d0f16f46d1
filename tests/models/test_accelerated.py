"""`accelerate` against PyG's own layers."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch_geometric.nn import GAT, GATConv, GATv2Conv, TransformerConv

import fgai
from fgai.datasets.planted import planted
from fgai.errors import FgaiWarning, InputError

LAYERS = {
    "additive": lambda: GATConv(5, 3, heads=2),
    "averaged, residual": lambda: GATConv(5, 3, heads=2, concat=False, residual=True),
    "no loops": lambda: GATConv(5, 3, heads=2, add_self_loops=False),
    "dynamic": lambda: GATv2Conv(5, 3, heads=2, negative_slope=0.1),
    "dynamic, one map": lambda: GATv2Conv(5, 3, heads=2, share_weights=True, residual=True),
    "dot": lambda: TransformerConv(5, 3, heads=2),
    "dot, gated": lambda: TransformerConv(5, 3, heads=2, beta=True, concat=False),
}


def outcomes(layer, x, edge_index):
    """Output, edges, attention, and the gradients of both at features and weights."""
    x = x.clone().requires_grad_()
    out = layer(x, edge_index)
    again, (edges, attention) = layer(x, edge_index, return_attention_weights=True)
    places = [x, *layer.parameters()]
    gradients = torch.autograd.grad(out.square().sum(), places, allow_unused=True)
    on_attention = torch.autograd.grad(attention.square().sum(), places, allow_unused=True)
    return [out, again, edges, attention, *gradients, *on_attention]


@pytest.mark.many
@pytest.mark.parametrize("name", LAYERS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 60), hub=st.booleans())
def test_outputs_attention_and_gradients_equal_those_of_pyg(name, seed, count, hub):
    """Self-loops, isolated nodes, repeated edges and hubs included: 17 nodes, edges among 12 of them."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(0, 12, (2, count), generator=generator)
    if hub:
        edge_index[1, : count // 2] = 3
    torch.manual_seed(seed)
    layer = LAYERS[name]().double()
    x = torch.randn(17, 5, dtype=torch.float64)
    for ours, theirs in zip(
        outcomes(fgai.accelerate(layer), x, edge_index), outcomes(layer, x, edge_index), strict=True
    ):
        if ours is None or theirs is None:  # a weight that the number does not depend on
            assert (ours if theirs is None else theirs) in (None,) or not bool(
                (ours if theirs is None else theirs).any()
            )
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.fixture
def data():
    return planted(num_nodes=150, num_classes=4).to_data()


@pytest.fixture
def model(data):
    torch.manual_seed(0)
    return GAT(data.num_features, 8, num_layers=3, out_channels=4, heads=2, v2=True).eval()


def test_a_copy_with_the_same_weights_is_returned(model, data):
    fast = fgai.accelerate(model)
    assert type(model.convs[0]) is GATv2Conv
    assert fast.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(fast(data.x, data.edge_index), model(data.x, data.edge_index))
    with torch.no_grad():
        for weight in fast.parameters():
            weight.mul_(1.1)
    assert not torch.allclose(fast(data.x, data.edge_index), model(data.x, data.edge_index))
    model.load_state_dict(fast.state_dict())  # the way back
    torch.testing.assert_close(fast(data.x, data.edge_index), model(data.x, data.edge_index))


def test_the_kernels_run_and_not_the_code_of_pyg(model, data, monkeypatch):
    fast = fgai.accelerate(model)

    def refuse(*_, **__):
        raise AssertionError("PyG's code ran")

    monkeypatch.setattr(GATv2Conv, "edge_update", refuse)
    fast(data.x, data.edge_index)
    with pytest.raises(AssertionError, match="ran"):
        model(data.x, data.edge_index)


def test_edges_are_sorted_once_and_again_when_they_change(model, data, monkeypatch):
    from fgai.models import accelerated

    calls = []
    build = accelerated._sorted_edges
    monkeypatch.setattr(accelerated, "_sorted_edges", lambda *args: calls.append(1) or build(*args))
    fast, edge_index = fgai.accelerate(model), data.edge_index.clone()
    fast(data.x, edge_index)
    fast(data.x, edge_index)
    assert len(calls) == 1
    edge_index[:, 0] = torch.tensor([5, 9])
    torch.testing.assert_close(fast(data.x, edge_index), model(data.x, edge_index))
    assert len(calls) == 2


def test_calls_without_kernels_run_the_code_of_pyg(data):
    layer = GATConv((5, 4), 3, heads=2, add_self_loops=False)
    sides = torch.randn(7, 5), torch.randn(9, 4)
    edge_index = torch.stack([torch.randint(0, 7, (20,)), torch.randint(0, 9, (20,))])
    torch.testing.assert_close(fgai.accelerate(layer)(sides, edge_index), layer(sides, edge_index))
    matrix = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2], [2, 0, 1]]), torch.ones(3), (3, 3)).coalesce()
    layer = TransformerConv(5, 3)
    x = torch.randn(3, 5)
    torch.testing.assert_close(fgai.accelerate(layer)(x, matrix), layer(x, matrix))
    layer, edge_index = GATConv(5, 3), torch.empty(2, 0, dtype=torch.long)
    torch.testing.assert_close(fgai.accelerate(layer)(x, edge_index), layer(x, edge_index))


@pytest.mark.parametrize("kind", [GATConv, GATv2Conv, TransformerConv])
def test_types_are_those_of_pyg_under_autocast_and_in_half_precision(kind):
    torch.manual_seed(0)
    layer, x, edge_index = kind(5, 3, heads=2), torch.randn(9, 5), torch.randint(0, 9, (2, 30))
    fast = fgai.accelerate(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = fast(x, edge_index), layer(x, edge_index)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours.float(), theirs.float(), atol=0.05, rtol=0.05)
    narrow, x = layer.bfloat16(), x.bfloat16()
    ours, theirs = fgai.accelerate(narrow)(x, edge_index), narrow(x, edge_index)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)


def test_dropout_thins_the_attention_of_training_alone(data):
    torch.manual_seed(0)
    layer = GATConv(data.num_features, 4, heads=2, dropout=0.5)
    fast = fgai.accelerate(layer)
    _, (_, attention) = fast(data.x, data.edge_index, return_attention_weights=True)
    assert 0.4 < (attention == 0).double().mean() < 0.6
    fast.eval(), layer.eval()
    torch.testing.assert_close(fast(data.x, data.edge_index), layer(data.x, data.edge_index))


def test_recorded_attention_explanations_and_limits_are_those_of_the_model(model, data):
    fast = fgai.accelerate(model)
    with fgai.record(fast) as ours, fgai.record(model) as theirs:
        fast(data.x, data.edge_index), model(data.x, data.edge_index)
    for one, other in zip(ours.attention, theirs.attention, strict=True):
        torch.testing.assert_close(one.values, other.values)
    limited = fgai.limit(fast, data)
    torch.testing.assert_close(
        limited(data.x, data.edge_index), fgai.limit(model, data)(data.x, data.edge_index)
    )
    again = copy.deepcopy(fast)
    torch.testing.assert_close(again(data.x, data.edge_index), model(data.x, data.edge_index))


class Own(GATConv):
    pass


def test_layers_that_stay_are_named_once():
    model = nn.Sequential(GATConv(4, 4), GATConv(4, 4, edge_dim=2), Own(4, 4), GATv2Conv(4, 4, aggr="max"))
    with pytest.warns(FgaiWarning, match=r"1 \(GATConv\) has edge features; 2 \(Own\).*aggr='max'") as seen:
        fast = fgai.accelerate(model)
    assert len(seen) == 1
    assert [type(layer).__name__ for layer in fast] == ["AcceleratedGATConv", "GATConv", "Own", "GATv2Conv"]


def test_models_without_such_layers_are_refused():
    with pytest.raises(InputError, match="needs PyG's GATConv, GATv2Conv or TransformerConv"):
        fgai.accelerate(nn.Linear(3, 3))
    with pytest.raises(InputError, match="edge features"):
        fgai.accelerate(GATConv(4, 4, edge_dim=2))
