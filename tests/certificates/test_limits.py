"""Hidden bounds behind limits: nothing moves further than they say, and inactive limits cost nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fgai import GAT, GATv2, certify_attention, limit
from fgai.attention import Limits, limits_of, prepared
from fgai.bounds.intervals import Range
from fgai.certificates.hidden import _Change, _CleanLayer, _ValueChange
from fgai.datasets import planted
from fgai.models import AttentionLayer
from fgai.sparse import Features


@given(st.integers(0, 10_000), st.floats(0.0, 0.8), st.floats(0.0, 0.2), st.floats(1e-3, 3.0))
def test_nothing_moves_further_than_said(seed: int, shrink: float, clip_share: float, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(30, 2, 3, generator=generator, dtype=torch.float64)
    limits = Limits(2, 3).double()
    limits.measure(x, clip_share, shrink)
    moved = size * torch.rand(30, 2, 3, generator=generator, dtype=torch.float64)
    said = limits(x.clone())
    known = Range.from_limits(limits).max_change(said, moved)
    for step in steps(moved, seed, generator):
        change = (limits(x + step) - said).abs()
        assert bool((change <= known * (1 + 1e-9) + 1e-12).all())


def steps(radius: Tensor, seed: int, generator: torch.Generator) -> list[Tensor]:
    """Movements inside a box, of every other seed its corners."""
    drawn = [2 * torch.rand(radius.shape, generator=generator, dtype=radius.dtype) - 1 for _ in range(20)]
    return [radius * (step.sign() if seed % 2 else step) for step in drawn]


@given(
    st.sampled_from(("additive", "dynamic")),
    st.integers(0, 10_000),
    st.floats(0.0, 0.8),
    st.floats(0.0, 0.2),
    st.floats(1e-3, 1.0),
)
def test_readings_of_a_layer_move_no_further(
    score: str, seed: int, shrink: float, clip_share: float, size: float
) -> None:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    layer = AttentionLayer(4, 3, 2, score=score, concat=False).double().eval()
    x, radius = torch.randn(25, 4, dtype=torch.float64), size * torch.rand(25, 4, dtype=torch.float64)
    layer.limits = torch.nn.ModuleDict(layer.new_limits()).double()
    with torch.no_grad():
        values = layer.value(x).view(-1, 2, 3)
        layer.limits["value"].measure(values, clip_share, shrink)
        if score == "additive":
            clean = layer.limits["value"](values.clone())
            for name in ("source", "destination"):
                weight = getattr(layer, f"{name}_weight")
                layer.limits[name].measure((clean * weight).sum(2), clip_share)
        else:
            layer.limits["right"].measure(layer.right(x).view(-1, 2, 3), clip_share, shrink)
        nothing = torch.zeros(0)
        stage = _CleanLayer(layer, nothing, nothing, nothing, None, x)  # type: ignore[arg-type]
        moving = _ValueChange(stage, "value", _Change(radius))
        source, destination, now = (part.clone() for part in layer.sides(x))
        assert torch.allclose(moving.clean, now)
        apart = moving.differences()
        for step in steps(radius, seed, generator):
            left, right, after = layer.sides(x + step)
            assert bool(((after - now).abs() <= moving.channels() * (1 + 1e-9) + 1e-12).all())
            change = after - now
            gained = (change[..., :, None] - change[..., None, :]).abs()
            assert bool((gained <= (apart[..., :, None] + apart[..., None, :]) * (1 + 1e-9) + 1e-12).all())
            if score == "additive":
                for name, was, is_now in (("source", source, left), ("destination", destination, right)):
                    span = Range.from_limits(layer.limits[name])
                    most = moving.score(getattr(layer, f"{name}_weight"), span)
                    assert bool(((is_now - was).abs() <= most * (1 + 1e-9) + 1e-12).all())


@pytest.mark.parametrize("kind", [GAT, GATv2])
def test_inactive_limits_cost_nothing(kind: type[GAT]) -> None:
    torch.manual_seed(0)
    graph = planted(seed=1, num_nodes=90, num_classes=4)
    model = kind.for_data(graph, hidden_channels=3, heads=2).double().eval()
    assert graph.features is not None
    graph = graph.replace(features=Features.dense(graph.features.to_dense().double()))
    wide = limit(model, prepared(model, graph), 0.0, shrink=0.0)
    for limits in limits_of(wide):
        limits.low.sub_(100.0)
        limits.high.add_(100.0)
    one, two = (certify_attention(which, graph, radius=0.01).layers[0].prediction for which in (model, wide))
    assert one.class_radius is not None and float(one.class_radius.max()) > 0
    for name in ("class_radius", "alpha2_logits", "alpha2_probabilities"):
        assert torch.allclose(getattr(one, name), getattr(two, name), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [GAT, GATv2])
def test_limits_that_clip_lose_little(kind: type[GAT]) -> None:
    """A clip shrinks intervals; only where channels stop cancelling each other may a radius fall."""
    torch.manual_seed(0)
    graph = planted(seed=1, num_nodes=200, num_classes=4)
    model = kind.for_data(graph, hidden_channels=4, heads=2).eval()
    limited = limit(model, graph, 0.02, shrink=0.0)
    shares = [
        certify_attention(which, graph, radius=0.01).layers[0].share("class", 0.01)
        for which in (model, limited)
    ]
    assert shares[0] is not None and shares[1] is not None and shares[1] >= shares[0] - 0.05
