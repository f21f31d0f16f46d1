"""Limits: nothing changes on the graph they were measured on, and nothing leaves them elsewhere."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, SuperGATConv, TransformerConv

from fgai import GAT, GCN, GT, GATv2
from fgai.attention import (
    Limits,
    TappedLayer,
    add_limits,
    call_model,
    can_be_limited,
    counting,
    entry_limits,
    limits_of,
    measuring,
    observe,
    overriding,
    register_limits,
    replacing_values,
    straight_through,
)
from fgai.attention.limits import ranges
from fgai.errors import AttentionError, InputError
from fgai.models import AttentionModel
from fgai.ops import clip, range_norm, use_backend
from support.graph_cases import small_data

MODELS = (GAT, GATv2, GT, GCN)
CONVS = (GATConv, GATv2Conv, TransformerConv, SuperGATConv)
DRAWN = torch.Generator().manual_seed(0)
X, EDGES = torch.randn(12, 5, generator=DRAWN), torch.randint(0, 12, (2, 40), generator=DRAWN)


@contextmanager
def recording_values(entry: Sequence[Limits]) -> Iterator[dict[Limits, list[Tensor]]]:
    """Record what layers use, as points of the unit box, for each of some limits and every pass."""
    records: dict[Limits, list[Tensor]] = {limits: [] for limits in entry}

    def step(limits: Limits, clip_rows: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        out = clip_rows(x)
        records[limits].append(limits.to_unit_box(out.detach().view(-1, *limits.low.shape)))
        return out

    with overriding(entry, step):
        yield records


def made(kind: type[AttentionModel]) -> tuple[AttentionModel, AttentionModel]:
    """A model and a limited copy, ranges from its own graph."""
    torch.manual_seed(1)
    model = kind.for_data(small_data()).eval()
    limited = copy.deepcopy(model)
    add_limits(limited)
    with measuring(limited), torch.no_grad():
        limited(limited.prepare(small_data()))
    return model, limited


def loud(graph, scale: float):
    """The graph with a new node that shouts."""
    features = scale * torch.sign(
        torch.randn(2, graph.num_features, generator=torch.Generator().manual_seed(3))
    )
    return graph.inject(torch.tensor([[0, 1, 2], [3, 4, 5]]), features)[0]


@pytest.mark.parametrize("kind", MODELS)
def test_no_bit_changes_on_the_graph_they_were_measured_on(kind) -> None:
    model, limited = made(kind)
    graph = model.prepare(small_data())
    one, two = observe(model, graph), observe(limited, graph)
    assert torch.equal(one.logits, two.logits)
    for before, after in zip(one.attention, two.attention, strict=True):
        assert torch.equal(before.values, after.values)
    with counting(limited) as count, torch.no_grad():
        limited(graph)
    assert count[0] == 0 and count[1] > 0


@pytest.mark.parametrize("kind", MODELS)
def test_infinite_until_they_are_measured(kind) -> None:
    model = kind.for_data(small_data()).eval()
    limited = copy.deepcopy(model)
    add_limits(limited)
    attacked = loud(model.prepare(small_data()), 1e3)
    with torch.no_grad():
        assert torch.equal(model(attacked), limited(attacked))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("scale", [10.0, 1e30])
def test_what_layers_hear_stays_inside_for_any_input(kind, scale: float) -> None:
    _, limited = made(kind)
    found = limits_of(limited)
    with recording_values(found) as heard, counting(limited) as count, torch.no_grad():
        out = limited(loud(limited.prepare(small_data()), scale))
    assert bool(out[: small_data().num_nodes].isfinite().all())
    assert count[0] > 0
    for said in heard.values():
        assert all(bool(((part >= 0) & (part <= 1)).all()) for part in said)


@pytest.mark.parametrize("backend", ["reference", pytest.param("auto", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [GAT, GATv2, GT])
def test_true_gradients_of_a_limited_model_equal_differences(kind, backend: str) -> None:
    with use_backend(backend):
        compare_gradients(made(kind)[1].double())


def compare_gradients(limited: AttentionModel) -> None:
    graph = limited.prepare(small_data())
    graph = graph.replace(features=type(graph.features).dense(graph.features.to_dense().double()))
    if graph.positional is not None:
        graph = graph.replace(positional=graph.positional.double(), positional_values=graph.positional_values)
    ends = torch.tensor([[0, 1, 2]])
    start = 0.3 * torch.randn(
        1, graph.num_features, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )

    def out(rows: Tensor) -> Tensor:
        return limited(graph.inject(ends, rows)[0])[:10].square().sum()

    rows = start.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(out(rows), rows)
    for column in (0, 3):
        step = torch.zeros_like(start)
        step[0, column] = 1e-6
        slope = (out(start + step) - out(start - step)) / 2e-6
        assert gradient[0, column].item() == pytest.approx(float(slope), rel=1e-3, abs=1e-6)
    with straight_through(limited):
        (other,) = torch.autograd.grad(out(rows), rows)
    assert other.shape == gradient.shape and all(not limits.straight for limits in limits_of(limited))


@given(st.integers(2, 60), st.floats(0, 0.49), st.floats(0, 0.49), st.integers(0, 5))
def test_a_larger_cut_is_never_wider(rows: int, one: float, two: float, seed: int) -> None:
    x = torch.randn(rows, 2, 3, generator=torch.Generator().manual_seed(seed))
    small, large = ranges(x, min(one, two)), ranges(x, max(one, two))
    assert bool((large[0] >= small[0]).all() & (large[1] <= small[1]).all() & (large[0] <= large[1]).all())
    outside = ((x < large[0]) | (x > large[1])).double().mean((0,))
    assert float(outside.max()) <= 2 * max(one, two) + 1e-9


@given(st.integers(5, 60), st.floats(0, 0.95), st.floats(0, 0.95), st.floats(0, 0.2), st.integers(0, 5))
def test_no_more_than_asked_are_softened_and_a_larger_share_is_never_louder(
    rows: int, one: float, two: float, clip_share: float, seed: int
) -> None:
    x = torch.randn(rows, 2, 3, generator=torch.Generator().manual_seed(seed))
    soft, softer = Limits(2, 3), Limits(2, 3)
    soft.measure(x, clip_share, min(one, two))
    softer.measure(x, clip_share, max(one, two))
    assert torch.equal(soft.low, softer.low) and float(softer.radius) <= float(soft.radius)
    inside = clip(x, softer.low, softer.high)
    moved = (softer(x.clone()) != inside).flatten(1).any(1)
    assert int(moved.sum()) <= max(one, two) * rows
    assert bool((range_norm(softer(x.clone()), softer.low, softer.high) <= softer.radius * (1 + 1e-5)).all())


def test_what_is_derived_has_no_range_norm_and_a_layer_that_ran_twice_that_of_both_runs() -> None:
    derived, own = Limits(2, derived=True), Limits(2)
    rows = torch.randn(9, 2)
    derived.measure(rows, shrink=0.3)
    assert torch.isinf(derived.radius)
    own.measure(rows, shrink=0.3)
    assert torch.isfinite(own.radius)
    own.measure(rows)
    own.measure(3 * rows + 1, earlier=[rows])
    derived.measure(3 * rows, earlier=[rows])
    assert torch.isfinite(own.radius) and torch.isinf(derived.radius)
    assert torch.equal(own(3 * rows + 1), 3 * rows + 1) and torch.equal(own(rows.clone()), rows)
    constant = Limits(2)
    for earlier in ([], [torch.ones(3, 2)]):
        constant.measure(torch.ones(3, 2), earlier=earlier)
    assert torch.equal(constant(torch.zeros(1, 2)), torch.ones(1, 2))


@given(st.integers(3, 30), st.floats(0.01, 50), st.floats(-50, 50), st.floats(0, 0.4), st.integers(0, 9))
def test_ranges_of_two_runs_hold_the_rows_of_both(
    rows: int, size: float, away: float, shrink: float, seed: int
) -> None:
    one, two = torch.randn(2, rows, 4, generator=torch.Generator().manual_seed(seed))
    two = size * two + away
    limits = Limits(4)
    limits.measure(one, shrink=shrink)
    said = limits(one.clone())
    limits.measure(two, shrink=shrink, earlier=[said])
    assert torch.equal(limits(said.clone()), said) and float(limits.radius) <= 2.01
    assert int((limits(two.clone()) != two).any(1).sum()) <= shrink * rows


@pytest.mark.many
@pytest.mark.parametrize("kind", CONVS)
def test_layers_of_pyg(kind) -> None:
    torch.manual_seed(0)
    conv = kind(5, 4, heads=2).eval()
    plain = conv(X, EDGES)
    limited = copy.deepcopy(conv)
    add_limits(limited)
    with measuring(limited):
        limited(X, EDGES)
    assert any("limits" in name for name in limited.state_dict())
    for other in (limited, copy.deepcopy(limited), pickle.loads(pickle.dumps(limited))):
        assert torch.equal(plain, other(X, EDGES))
        with counting(other) as count:
            other(torch.cat([X[:-1], 100 * X[-1:]]), EDGES)
        assert count[0] > 0
    fresh = copy.deepcopy(conv)
    add_limits(fresh)
    fresh.load_state_dict(limited.state_dict())
    far = torch.cat([X[:-1], 1e4 * X[-1:]])
    assert torch.equal(fresh(far, EDGES), limited(far, EDGES))
    compiled = torch.compile(limited, backend="eager")
    assert torch.allclose(compiled(far, EDGES), limited(far, EDGES), atol=1e-6)


def test_a_copy_has_limits_of_its_own() -> None:
    conv = GATConv(5, 4).eval()
    add_limits(conv)
    with measuring(conv):
        conv(X, EDGES)
    other = copy.deepcopy(conv)
    with measuring(other):
        other(10 * X, EDGES)
    assert not torch.equal(conv.limits["value"].high, other.limits["value"].high)
    far = 10 * X
    assert not torch.equal(conv(far, EDGES), other(far, EDGES))


def test_points_of_the_unit_box() -> None:
    _, limited = made(GATv2)
    entry = entry_limits(limited)
    assert len(entry) == 2 and not any(limits.derived for limits in entry)
    graph = loud(limited.prepare(small_data()), 0.1)
    before = call_model(limited, graph)
    points = {limits: torch.rand(2, *limits.low.shape, requires_grad=True) for limits in entry}
    with replacing_values(points, torch.tensor([True, False])), recording_values(entry) as heard:
        out = call_model(limited, graph)
    for limits, said in heard.items():
        assert torch.allclose(said[0][-2], points[limits][0], atol=1e-5)
    gradients = torch.autograd.grad(out[:6].sum(), list(points.values()))
    assert all(float(g[0].abs().sum()) > 0 and float(g[1].abs().sum()) == 0 for g in gradients)
    assert not torch.equal(out, before) and torch.equal(call_model(limited, graph), before)


def test_what_features_say_can_be_said_by_a_voice() -> None:
    for kind in (GAT, GATv2):
        _, limited = made(kind)
        attacked = loud(limited.prepare(small_data()), 3.0)
        entry = entry_limits(limited)
        with recording_values(entry) as heard, torch.no_grad():
            before = call_model(limited, attacked)
            entry_values = torch.cat([heard[limits][0][-2:].flatten(1) for limits in entry], 1)
            after = call_model(limited, attacked.replace(entry_values=entry_values))
        assert torch.allclose(before, after, atol=1e-4)


def test_bad_voices_and_models_without_limits() -> None:
    model, limited = made(GAT)
    graph = loud(model.prepare(small_data()), 1.0)
    with pytest.raises(InputError, match="has `entry_values`"):
        call_model(model, graph.replace(entry_values=torch.zeros(2, 64)))
    with pytest.raises(InputError, match=r"must have shape \[nodes, 64\]"):
        call_model(limited, graph.replace(entry_values=torch.zeros(2, 3)))


def test_layers_that_cannot_be_limited_say_so() -> None:
    class Silent(TappedLayer):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Silent()

    with pytest.raises(AttentionError, match="cannot be limited"):
        add_limits(Wrapped())
    assert not can_be_limited(Wrapped()) and can_be_limited(GAT.for_data(small_data()))
    with pytest.raises(AttentionError, match="no attention layer"):
        add_limits(nn.Linear(2, 2))
    with pytest.raises(InputError, match="class of modules"):
        register_limits(3, print)  # type: ignore[arg-type]


def test_the_repr_shows_them() -> None:
    _, limited = made(GAT)
    assert "Limits((8, 8), mean width" in repr(limited)
    assert "Limits" not in repr(GAT.for_data(small_data()))


def test_a_layer_that_runs_twice_has_one_range_for_both() -> None:
    limits = Limits(2)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.limits = limits

        def forward(self, x: Tensor) -> Tensor:
            return self.limits(3 * self.limits(x))

    model = Twice()
    x = torch.tensor([[-1.0, 0.0], [2.0, 1.0]])
    with measuring(model):
        model(x)
    assert limits.low.tolist() == pytest.approx([-3.0, 0.0], abs=1e-3)
    assert limits.high.tolist() == pytest.approx([6.0, 3.0], abs=1e-3)
