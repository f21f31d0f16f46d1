"""`observe`: one contract for fgai's models and users' PyG models, by fused kernels and by recording."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.defences import GNNGuard
from fgai.attention import TappedLayer, call_model, find_layers, observe, prepared, record
from fgai.errors import AttentionError, InputError
from fgai.graph import Graph
from fgai.models import GAT, AttentionLayer
from support import attack_cases as cases
from support.attention_cases import assert_sums

MODELS = ("gat", "gatv2", "gt", "gcn", "pyg")


def pair(name: str) -> tuple[nn.Module, Graph]:
    model = cases.untrained(name).train()
    return model, prepared(model, cases.tiny_graph())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("heads", ["each", "mean"])
class TestContract:
    """What holds for every model and both kinds of heads."""

    def test_evaluation_mode_nothing_kept_and_the_model_as_it_was(self, heads: str, name: str) -> None:
        model, graph = pair(name)
        seen = observe(model, graph, heads=heads)
        again = observe(model, graph, heads=heads)
        assert model.training and seen.graph is graph
        assert torch.equal(seen.logits, again.logits)  # no dropout
        assert not seen.logits.requires_grad and seen.runs == () and not seen.ends_with_layer
        assert len(seen.attention) == 2
        for layer in seen.attention:
            assert not layer.values.requires_grad
            assert_sums(layer)
            assert layer.num_heads == 1 or heads == "each"
        for module in find_layers(model).values():
            assert not module._forward_hooks and not module._forward_pre_hooks
            assert not isinstance(module, TappedLayer) or module.tap is module.watch is None

    def test_gradients_in_the_mode_the_model_is_in(self, heads: str, name: str) -> None:
        model, graph = pair(name)
        found = []
        for _ in range(2):
            torch.manual_seed(0)
            seen = observe(model, graph, heads=heads, grad=True)
            torch.manual_seed(0)
            torch.testing.assert_close(seen.logits, call_model(model, graph))
            loss = seen.logits.square().sum() + sum((w.heads() ** 3).sum() for w in seen.attention)
            found.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
        assert any(g is not None and bool((g != 0).any()) for g in found[0])
        for one, two in zip(*found, strict=True):
            assert (one is None and two is None) or torch.equal(one, two)

    def test_averaged_heads_are_the_mean_of_each(self, heads: str, name: str) -> None:
        model, graph = pair(name)
        each, some = observe(model, graph), observe(model, graph, heads=heads)
        torch.testing.assert_close(some.logits, each.logits)
        for one, two in zip(some.averaged().attention, each.attention, strict=True):
            torch.testing.assert_close(one.values[:, 0], two.values.mean(1))
            assert one.name == two.name and torch.equal(one.keys, two.keys)

    def test_a_perturbation_is_used_and_seen(self, heads: str, name: str) -> None:
        model, graph = pair(name)

        def flat(index: int, attention: Tensor, source: Tensor, destination: Tensor) -> Tensor:
            return torch.full_like(attention, 0.25)

        seen = observe(model, graph, heads=heads, perturb=flat)
        assert all(bool((layer.values == 0.25).all()) for layer in seen.attention)
        assert not torch.allclose(seen.logits, observe(model, graph).logits)

    def test_inputs_are_noted_where_asked_for(self, heads: str, name: str) -> None:
        model, graph = pair(name)
        seen = observe(model, graph, heads=heads, inputs=True)
        assert [run.layer for run in seen.runs] == list(find_layers(model).values())
        assert seen.ends_with_layer == (name != "gt")
        assert seen.runs[-1].output is not None
        assert torch.equal(seen.runs[-1].output, seen.logits) == (name != "gt")


@pytest.mark.parametrize("name", ["gat", "gatv2", "gt", "gcn"])
def test_own_layers_are_watched_with_weights_and_taps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The averaged attention is that of the recorder, without a second pass and without recording."""
    model, graph = pair(name)
    weight = torch.linspace(0.2, 1.0, graph.num_edges)
    calls = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda *given: calls.append(1) or forward(*given))  # type: ignore[func-returns-value]

    def shrink(index: int, attention: Tensor, source: Tensor, destination: Tensor) -> Tensor:
        return 0.5 * attention

    for shown in (graph, graph.replace(edge_weight=weight)):
        wanted = observe(model, shown).averaged()
        with record(model, perturb=shrink):
            tapped = observe(model, shown, heads="mean")
            each = observe(model, shown).averaged()
        calls.clear()
        found = observe(model, shown, heads="mean")
        assert len(calls) == 1
        for pairs in ((found, wanted), (tapped, each)):
            torch.testing.assert_close(pairs[0].logits, pairs[1].logits)
            for one, two in zip(pairs[0].attention, pairs[1].attention, strict=True):
                torch.testing.assert_close(one.values, two.values)
        for one, two in zip(tapped.attention, found.attention, strict=True):
            assert float(one.values.sum()) < 0.75 * float(two.values.sum())


def test_a_defended_model_is_run_once() -> None:
    graph = cases.tiny_graph()
    model = GNNGuard.for_data(graph, base="GAT", hidden_channels=4, heads=3)
    ready, calls = prepared(model, graph), []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    seen = observe(model, ready, heads="mean")
    handle.remove()
    assert len(calls) == 1
    for one, two in zip(seen.attention, observe(model, ready).attention, strict=True):
        torch.testing.assert_close(one.values[:, 0], two.values.mean(1))


def test_a_layer_that_runs_twice_has_two_names() -> None:
    class Twice(GAT):
        def embed(self, graph: Graph) -> Tensor:
            layer: Any = self.convs[0]
            x = layer(graph.features, graph.adjacency)
            return torch.as_tensor(self.convs[1](layer(x, graph.adjacency), graph.adjacency))

    graph = cases.tiny_graph()
    model = Twice.for_data(graph, hidden_channels=3, heads=2).eval()
    ready = model.prepare(graph)
    for heads in ("each", "mean"):
        names = [layer.name for layer in observe(model, ready, heads=heads).attention]
        assert names == ["convs.0", "convs.0:2", "convs.1"]


def test_errors_leave_the_model_as_it_was() -> None:
    model, graph = pair("gat")
    for options in ({"heads": "mean"}, {"inputs": True}, {"grad": True}):
        with pytest.raises(InputError, match="features"):
            observe(model, graph.replace(features=None), **options)  # type: ignore[arg-type]
    for layer in find_layers(model).values():
        assert isinstance(layer, AttentionLayer) and layer.tap is layer.watch is None
        assert not layer._forward_hooks
    assert model.training
    with pytest.raises(InputError, match="heads"):
        observe(model, graph, heads="all")


def test_models_whose_attention_does_not_run_are_refused() -> None:
    class Idle(GAT):
        def embed(self, graph: Graph) -> Tensor:
            return torch.zeros(graph.num_nodes, 3)

    graph = cases.tiny_graph()
    model = Idle.for_data(graph)
    for heads in ("each", "mean"):
        with pytest.raises(AttentionError):
            observe(model, model.prepare(graph), heads=heads)
    with pytest.raises(AttentionError, match="no attention layer"):
        observe(nn.Linear(2, 3), graph)
