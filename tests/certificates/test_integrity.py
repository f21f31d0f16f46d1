"""What makes a model familiar, what is computed again of its layers, and operations followed one by one."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fgai
from experiments.defences import GNNGuard
from fgai.attention import entry_limits, observe, prepared
from fgai.bounds.scores import check_two_layers
from fgai.certificates import certify_attention, certify_injection
from fgai.certificates.integrity import _layer_values, find_alteration
from fgai.certificates.linearity import _summaries_near as _same_summary
from fgai.certificates.linearity import _summary, _track_linearity
from fgai.errors import InputError, ReliabilityWarning
from fgai.explanations.pyg_models import _has_pyg_layers
from fgai.graph import Graph
from fgai.models import (
    GAT,
    GT,
    AttentionLayer,
    AttentionModel,
    Capabilities,
    GATv2,
    body_of,
    capabilities_of,
)
from support.altered_cases import own
from support.altered_parts import CASES


@pytest.mark.parametrize("kind", [GAT, GATv2, GT, GNNGuard])
def test_models_as_they_are_made_are_familiar(kind: type[nn.Module]) -> None:
    model, graph = own(kind)
    assert (
        find_alteration(model) is None and find_alteration(fgai.limit(model, graph, 0.0, shrink=0.0)) is None
    )


class Outside(AttentionModel):
    """A model from outside: GAT's layers, declared."""

    capabilities = Capabilities("layers")

    def __init__(self, in_channels: int, out_channels: int, **options: Any) -> None:
        super().__init__()
        self.config = {"in_channels": in_channels, "out_channels": out_channels, **options}
        inner = GAT(in_channels, out_channels, **options)
        self.convs = inner.convs

    def embed(self, graph: Graph) -> Tensor:
        return self.convolve(self.convs, graph, torch.nn.functional.elu, 0.0)


class Wrong(AttentionModel):
    """A model whose declaration is false: its activation is another one."""

    capabilities = Capabilities("layers")

    def __init__(self, in_channels: int, out_channels: int, **options: Any) -> None:
        super().__init__()
        self.config = {"in_channels": in_channels, "out_channels": out_channels, **options}
        self.convs = GAT(in_channels, out_channels, **options).convs

    def embed(self, graph: Graph) -> Tensor:
        return self.convolve(self.convs, graph, torch.tanh, 0.0)


class Undeclared(Outside):
    """A subclass, which declares nothing."""


class Squared(GAT):
    """A subclass that computes something else and declares nothing."""

    def embed(self, graph: Graph) -> Tensor:
        return super().embed(graph) ** 2


class Renamed(GAT):
    """A subclass that computes the same and declares it."""

    capabilities = GAT.capabilities


def test_a_model_from_outside_is_bounded_once_it_declares_its_layers() -> None:
    _, data = own()
    like, model = (kind.for_data(data).double().eval() for kind in (GAT, Outside))
    model.load_state_dict(like.state_dict())
    assert find_alteration(model) is None and find_alteration(Renamed.for_data(data).eval()) is None
    found, wanted = (certify_attention(one, data, radius=0.01) for one in (model, like))
    for mine, theirs in zip(found.layers, wanted.layers, strict=True):
        assert mine.prediction.class_status == theirs.prediction.class_status != "unknown"
        torch.testing.assert_close(mine.prediction.class_radius, theirs.prediction.class_radius)


def test_a_false_declaration_is_seen() -> None:
    _, data = own()
    model = Wrong.for_data(data).double().eval()
    assert find_alteration(model) is None
    assert "is not the ELU" in certify_attention(model, data, radius=0.01).layer(0).prediction.reason
    assert certify_injection(fgai.limit(model, data, 0.0, shrink=0.0), data, neighbours=0).share() == 0


@pytest.mark.parametrize("kind", [Undeclared, Squared])
def test_a_subclass_inherits_no_capability(kind: type[AttentionModel]) -> None:
    _, data = own()
    model = kind.for_data(data).double().eval()
    assert capabilities_of(kind) is None and body_of(model) == ""
    assert "forward pass is not known" in (find_alteration(model) or "")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReliabilityWarning)
        found = certify_attention(model, data, radius=0.01)
    assert found.layer(0).prediction.class_status == "unknown"
    with pytest.raises(InputError, match="GAT or GATv2"):
        check_two_layers(model)
    assert not _has_pyg_layers(model) and certify_injection(model, data).known is False


def test_replaced_methods_of_a_declared_class_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    _, data = own()
    model = Outside.for_data(data).double().eval()

    def embed(self: Any, graph: Graph) -> Tensor:
        return self.convolve(self.convs, graph, torch.tanh, 0.0)  # type: ignore[no-any-return]

    monkeypatch.setattr(Outside, "embed", embed)
    assert "`embed` was replaced" in (find_alteration(model) or "")
    monkeypatch.setattr(Outside, "embed", functools.wraps(Outside.embed)(lambda *given: embed(*given)))
    assert "`embed` was replaced" in (find_alteration(model) or "")


def test_the_base_of_models_is_abstract() -> None:
    with pytest.raises(TypeError, match="embed"):
        AttentionModel()  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("hook: tanh", "convs.1 has a hook"),
        ("hook_on_the_model", "the model has a hook"),
        ("method_replaced", "`join` replaced"),
        ("forward_replaced", "`forward` replaced"),
        ("layer_of_a_subclass", "_Squashed"),
        ("model_of_a_subclass", "_Bent"),
        ("weight_parametrised", "Parametrized"),
        ("compiled", "OptimizedModule"),
        ("compiled_in_place", "compiled"),
        ("GT: another activation", "Tanh"),
    ],
)
def test_what_makes_a_model_unfamiliar_is_named(name: str, word: str) -> None:
    assert word in (find_alteration(CASES[name].build()[0]) or "")


def test_a_hook_on_all_modules_is_seen() -> None:
    model, _ = own()
    with CASES["hook on all modules"].during():
        assert "all modules" in (find_alteration(model) or "")
    assert find_alteration(model) is None


def test_values_that_do_not_give_the_output_are_refused() -> None:
    model, data = own()
    graph = prepared(model, data)
    seen = observe(model, graph, inputs=True)
    run, attention = seen.runs[-1], seen.attention.last
    layer = run.layer
    assert isinstance(layer, AttentionLayer) and attention.adjacency is not None
    torch.testing.assert_close(_layer_values(run, attention), layer.attend(*run.inputs)[1].detach())
    with torch.no_grad():
        layer.value.weight.mul_(1.1)
    assert "something else" in str(_layer_values(run, attention))


def test_what_nodes_are_made_to_say_is_not_certified_by_what_they_would_have_said() -> None:
    model, data = own(num_layers=1, heads=1)
    limited = fgai.limit(model, data, 0.0, shrink=0.0)
    width = sum(limits.low.numel() for limits in entry_limits(limited))
    entry_values = torch.zeros(4, width, dtype=torch.float64)
    with pytest.warns(ReliabilityWarning, match="runs on its own"):
        found = certify_attention(
            limited, prepared(limited, data).replace(entry_values=entry_values), radius=0.01
        )
    assert found.layer().prediction.class_status == "unknown"


def test_limits_do_not_hide_numbers_that_are_not_finite() -> None:
    # Limits turn NaN into a number, so the logits are fine while a hidden state is not.
    model, data = own(num_layers=3)
    limited = fgai.limit(model, data, 0.0, shrink=0.0)
    with torch.no_grad():
        limited.convs[1].bias[0] = torch.nan  # type: ignore[union-attr,index]
    found = certify_attention(limited, data, radius=0.01)
    assert [layer.prediction.class_status for layer in found.layers] == ["unknown", "unknown", "exact"]
    assert "not finite" in found.layer(0).prediction.reason


def test_constants_without_entries_are_alike() -> None:
    none, one = (_summary(torch.zeros(size)) for size in (0, 1))
    assert _same_summary(none, none) and not _same_summary(none, one)


def violation(function: Callable[[Tensor], object]) -> str | None:
    given = torch.arange(6.0).view(3, 2) + 1
    with torch.no_grad(), _track_linearity() as seen:
        seen.track(given)
        result = function(given)
    assert not isinstance(result, Tensor) or seen.violation is not None or seen.tracks(result)
    return seen.violation


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x @ torch.ones(2, 5) + 1,
        lambda x: torch.nn.functional.linear(x, torch.ones(4, 2), torch.ones(4)) / 3,
        lambda x: torch.zeros(4, 2).index_add(0, torch.tensor([0, 1, 1]), x),
        lambda x: torch.zeros(4, 2).scatter_reduce(0, torch.zeros(3, 2).long(), x, "sum"),
        lambda x: torch.zeros(5, 2).index_put((torch.tensor([0, 2, 4]),), x),
        lambda x: torch.cat([x, 2 * x]).flip(0)[1:].t().reshape(-1),
        lambda x: torch.eye(3).to_sparse() @ x,
        lambda x: nn.BatchNorm1d(2).eval()(x),
        lambda x: torch.nn.functional.dropout(x, training=False),
        lambda x: x.data.double().mean(0),
    ],
)
def test_linear_operations_pass(function: Callable[[Tensor], object]) -> None:
    assert violation(function) is None


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x.tanh(), "tanh"),
        (lambda x: x * x, "mul"),
        (lambda x: 1 / x, "reciprocal"),
        (lambda x: x.div(2, rounding_mode="floor"), "div"),
        (lambda x: x.data.sign() + x, "sign"),
        (lambda x: x.int(), "_to_copy"),
        (lambda x: x.bfloat16(), "_to_copy"),
        (
            lambda x: x.new_zeros(4, 2).scatter_reduce(0, torch.zeros(3, 2).long(), x, "amax"),
            "scatter_reduce",
        ),
        (lambda x: torch.ones(3, 2).scatter_(0, torch.zeros(1, 2).long(), x, reduce="multiply"), "scatter"),
        (lambda x: torch.tanh(x, out=torch.zeros(3, 2)), "tanh"),
        (lambda x: nn.BatchNorm1d(2).train()(x), "native_batch_norm"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: float(x[0, 0]), "_local_scalar_dense"),
        (lambda x: torch.equal(x, x), "equal"),
        (lambda x: torch.rand(3), "rand"),
    ],
)
def test_everything_else_ends_the_proof(function: Callable[[Tensor], object], name: str) -> None:
    assert violation(function) == name
