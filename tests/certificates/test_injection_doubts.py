"""What injection certificates refuse: limits, activations and layers that the proof does not speak of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fgai
from fgai.attention import Limits, call_model, limits_of, prepared, replacing_values
from fgai.attention.limits import overriding
from fgai.certificates import certify_injection
from fgai.certificates.injection import _differ
from fgai.certificates.integrity import find_alteration
from fgai.datasets import planted
from fgai.errors import CheckpointError, InputError
from fgai.graph import Graph
from fgai.models import GAT, AttentionLayer, GATv2
from fgai.sparse import Features


@functools.cache
def graph() -> Graph:
    return planted(seed=3, num_nodes=48, num_classes=3)


def limited(kind: type[Any] = GAT) -> Any:
    torch.manual_seed(2)
    model = kind.for_data(graph(), hidden_channels=3, heads=2)
    with torch.no_grad():
        model.convs[-1].bias.copy_(torch.tensor([2.0, 0.0, -0.2]))
    return fgai.limit(model.eval(), graph(), 0.05, shrink=0.0)


def refused(model: nn.Module, word: str) -> None:
    certificate = fgai.certify_injection(model, graph(), neighbours=1, where="direct")
    assert not certificate.known and not certificate.certified.any() and (certificate.classes == -1).all()
    assert word in certificate.reason


def test_the_model_as_it_is_made_is_certified() -> None:
    for kind in (GAT, GATv2):
        certificate = fgai.certify_injection(limited(kind), graph(), neighbours=1, where="direct")
        assert certificate.known and certificate.certified.any()


def _negative(limits: Limits) -> None:
    limits.radius.neg_()


def _crossed(limits: Limits) -> None:
    low = limits.low.clone()
    limits.low.copy_(limits.high)
    limits.high.copy_(low)


def _nothing(limits: Limits) -> None:
    limits.radius.fill_(torch.nan)


@pytest.mark.parametrize(
    ("change", "word"),
    [(_negative, "radius"), (_crossed, "low"), (_nothing, "radius")],
    ids=["negative radius", "low above high", "radius not a number"],
)
def test_limits_that_are_no_range_are_refused(
    change: Callable[[Limits], None], word: str, tmp_path: Path
) -> None:
    model = limited()
    for limits in limits_of(model):
        if not limits.derived:
            change(limits)
    refused(model, word)
    path = fgai.save_model(model, tmp_path / "model")
    with pytest.raises(CheckpointError, match=word):
        fgai.load_model(path)


def test_limits_not_measured_yet_are_loaded(tmp_path: Path) -> None:
    model = fgai.limit(GAT.for_data(graph()), graph(), 0.0, shrink=0.0)
    for limits in limits_of(model):
        limits.low.fill_(-torch.inf)
        limits.high.fill_(torch.inf)
        limits.radius.fill_(torch.inf)
    again = fgai.load_model(fgai.save_model(model, tmp_path / "model"))
    assert len(limits_of(again)) == len(limits_of(model))


@pytest.mark.parametrize("slope", [-4.0, -0.01, 1.5])
@pytest.mark.parametrize("kind", [GAT, GATv2])
def test_activations_that_fall_or_rise_faster_than_the_identity_are_refused(
    kind: type[Any], slope: float
) -> None:
    model = limited(kind)
    for layer in model.convs:
        layer.slope = slope
    refused(model, "slope")
    with pytest.raises(InputError, match="`slope`"):
        AttentionLayer(3, 2, slope=slope)


def test_the_ends_of_the_slopes_are_certified() -> None:
    for slope in (0.0, 1.0):
        model = limited()
        for layer in model.convs:
            layer.slope = slope
        assert fgai.certify_injection(model, graph(), neighbours=1, where="direct").known


@contextmanager
def patched(owner: type[Any], name: str, member: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, member)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Descriptor:
    """Stands for a method and is no function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)

    def __get__(self, module: Any, owner: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: x


class _Callable:
    def __call__(self, x: Tensor) -> Tensor:
        return x


def _wrapped(before: Callable[..., Any]) -> Any:
    @functools.wraps(before)
    def forward(self: Any, x: Tensor) -> Tensor:
        return x

    return forward


def _unmarked(before: Callable[..., Any]) -> Any:
    forward = _wrapped(before)
    del forward.__wrapped__
    return forward


def _in_a_decorator_of_torch(before: Callable[..., Any]) -> Any:
    return torch.no_grad()(_wrapped(before))


@pytest.mark.parametrize(
    "patch",
    [
        _wrapped,
        _unmarked,
        _in_a_decorator_of_torch,
        _Descriptor,
        lambda before: _Callable(),
        lambda before: _Callable().__call__,
        lambda before: property(lambda self: lambda x: x),
        lambda before: staticmethod(lambda x: x),
        lambda before: functools.partialmethod(_wrapped(before)),
    ],
    ids=["wraps", "unmarked", "torch", "descriptor", "callable", "bound", "property", "static", "partial"],
)
def test_classes_patched_in_any_way_are_refused(patch: Callable[..., Any]) -> None:
    model = limited()
    with patched(Limits, "forward", patch(Limits.forward)):
        assert "`forward` was replaced" in (find_alteration(model) or "")
        refused(model, "`forward` was replaced")
    assert find_alteration(model) is None


@pytest.mark.parametrize("name", ["tap", "watch"])
def test_layers_whose_attention_is_tapped_are_refused(name: str) -> None:
    model = limited()
    setattr(model.convs[1], name, lambda attention, adjacency, scores: attention)
    refused(model, f"`{name}`")


def test_limits_in_use_elsewhere_are_refused() -> None:
    model = limited()
    entry = limits_of(model)[0]
    points = torch.full((2, *entry.low.shape), 0.5)
    with replacing_values({entry: points}, torch.ones(2, dtype=torch.bool)):
        refused(model, "limits")
    with overriding(limits_of(model), lambda limits, clip, x: x):
        refused(model, "limits")
    assert fgai.certify_injection(model, graph(), neighbours=1, where="direct").known


@pytest.mark.many
@pytest.mark.parametrize("offset", [1e3, 1e5, 1e6, 1e7])
@pytest.mark.parametrize("kind", [GAT, GATv2])
def test_certified_classes_are_those_of_the_model_itself(kind: type[Any], offset: float) -> None:
    # A common offset of the features that the weights cancel: float32 rounds what float64 does not.
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        shift = offset * torch.rand(graph().num_features, generator=generator)
        assert graph().features is not None
        moved = graph().replace(features=Features.dense(graph().features.to_dense() + shift))
        torch.manual_seed(seed)
        model = kind.for_data(moved, hidden_channels=3, heads=2).eval()
        with torch.no_grad():
            for projection in [model.convs[0].value] + ([model.convs[0].right] if kind is GATv2 else []):
                along = shift.double() @ projection.weight.double() / shift.double().square().sum()
                projection.weight.sub_((shift.double()[:, None] * along).float())
        model = fgai.limit(model, moved, 0.0, shrink=0.0)
        own = call_model(model, prepared(model, moved)).argmax(1)
        for neighbours in (0, 1):
            certificate = certify_injection(model, moved, neighbours=neighbours, where="direct")
            assert torch.equal(certificate.classes, own)


@pytest.mark.parametrize("outlier", [0.0, 1e12])
def test_nodes_whose_values_are_lost_in_rounding_are_not_certified(outlier: float) -> None:
    """Neither their class nor the order of a later layer; a large number of another node changes nothing."""
    assert graph().features is not None
    features = graph().features.to_dense() + 1e6
    features[0, 0] += outlier
    moved = graph().replace(features=Features.dense(features))
    torch.manual_seed(0)
    model = GAT.for_data(moved, hidden_channels=3, heads=2).eval()
    with torch.no_grad():
        model.convs[0].value.weight.sub_(model.convs[0].value.weight.double().mean(0).float())
    certificate = certify_injection(fgai.limit(model, moved, 0.0, shrink=0.0), moved, neighbours=0)
    far = torch.ones(48, dtype=torch.bool)
    far[moved.adjacency.destination[moved.adjacency.source == 0]] = outlier == 0
    assert certificate.known and not certificate.certified[far].any() and far.sum() > 20
    assert certificate.layers[1].certified is not None and not certificate.layers[1].certified[far].any()


def test_numbers_that_overflow_in_the_model_differ() -> None:
    own = torch.tensor([[torch.nan, 1.0], [torch.inf, 1.0], [2.0, 1.0], [2.0, 1.1]])
    exact = torch.tensor([[2.0, 1.0]], dtype=torch.float64).expand(4, 2)
    assert _differ(own, exact).tolist() == [True, True, False, True]


def test_logits_with_a_large_common_offset_are_rounded_by_more_than_their_lead() -> None:
    """Float32 has steps of 1/128 at 100,000: a smaller lead, proved in float64, may be a tie in the model."""
    generator = torch.Generator().manual_seed(0)
    features, ring = torch.randn(6, 2, generator=generator), torch.arange(6)
    edges = torch.cat([torch.stack([ring, ring]), torch.stack([ring, (ring + 1) % 6])], 1)
    data = Graph.from_edges(torch.unique(torch.cat([edges, edges.flip(0)], 1), dim=1), 6, features)
    torch.manual_seed(0)
    model: Any = GAT(2, 2, hidden_channels=2, heads=1, num_layers=1).eval()
    layer = model.convs[0]
    with torch.no_grad():  # the mean of the neighbours: the bound is attained
        layer.source_weight.zero_()
        layer.destination_weight.zero_()
    model = fgai.limit(model, data, 0.0, shrink=0.0)
    limits = model.convs[0].limits["value"]
    angle = torch.linspace(0, 6.2832, 400)[:, None]
    points = (limits.radius * torch.cat([angle.cos(), angle.sin()], 1)).clamp(-1, 1)
    values = (limits.low + limits.high) / 2 + points * (limits.high - limits.low) / 2
    worst = values[(values[:, 1] - values[:, 0]).argmin()]
    new = torch.linalg.solve(model.convs[0].value.weight.detach().t(), worst)[None]
    attacked, _ = data.inject(torch.tensor([[0]]), new)
    changed = 0
    for step in range(118, 128):
        with torch.no_grad():
            model.convs[0].bias.copy_(1e5 + torch.tensor([0.0, step / 128]))
            before, after = (int(model(one)[0].argmax()) for one in (data, attacked))
        changed += before != after
        certificate = fgai.certify_injection(model, data, neighbours=1, where="direct")
        budget = fgai.certify_budget(model, data, budgets=[(1, 1)], nodes=torch.arange(6) == 0)
        assert before == after or not (certificate.certified[0] or budget.edge_radius[0] > 0)
    assert 0 < changed < 10
