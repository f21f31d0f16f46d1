"""The box of new nodes' features: from the data or given, feature by feature."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import fgai
from fgai.attacks import (
    THREATS,
    Budget,
    FeaturePGD,
    PGDInjection,
    RandomInjection,
    check_budget,
    draw_features,
)
from fgai.attacks.budget import BEYOND, Box, data_range
from fgai.errors import BudgetError, InputError, ReliabilityWarning
from fgai.graph import Graph, GraphChange
from fgai.sparse import Features
from fgai.training.adversary import InjectionAdversary
from support import attack_cases as cases

SMALL = Budget(nodes=2, edges=3, steps=3, step_size=0.3)


def with_features(x: Tensor) -> Graph:
    """The tiny graph with other features."""
    return cases.tiny_graph().replace(features=Features.dense(x))


def test_the_box_of_the_data_is_a_tenth_wider_than_each_range() -> None:
    x = torch.tensor([[0.0, 1000.0, -1.0], [1.0, 3000.0, -1.0], [0.0, 2000.0, 3.0]])
    graph = Graph.from_edges(torch.tensor([[0], [1]]), 3, x)
    low, high = Budget().feature_box(graph)
    torch.testing.assert_close(low, torch.tensor([-0.1, 800.0, -1.4]))
    torch.testing.assert_close(high, torch.tensor([1.1, 3200.0, 3.4]))
    noise = Budget().noise_box(graph)
    assert torch.equal(noise.low, x.amin(0)) and torch.equal(noise.high, x.amax(0))


def test_one_interval_may_be_given_for_all() -> None:
    budget = Budget(box=(-1.0, 2.0))
    for box in (budget.feature_box(cases.tiny_graph()), budget.noise_box(cases.tiny_graph())):
        assert box.low.tolist() == [-1.0] * 6 and box.high.tolist() == [2.0] * 6


@given(
    st.lists(st.floats(-50, 50), min_size=2, max_size=6),
    st.floats(0.01, 1e4) | st.floats(-1e4, -0.01),
    st.floats(-1e4, 1e4),
)
def test_the_box_goes_along_with_affine_changes(values: list[float], scale: float, shift: float) -> None:
    x = torch.tensor(values, dtype=torch.float64)
    moved = scale * x + shift
    one, two = Box.around(x.min(), x.max()), Box.around(moved.min(), moved.max())
    ends = torch.stack([scale * one.low + shift, scale * one.high + shift]).sort().values
    torch.testing.assert_close(torch.stack(list(two)), ends, rtol=1e-9, atol=1e-7)


@example(1023.0, 2.4000000953674316, 0)
@given(st.floats(-1e6, 1e6, width=32), st.floats(0, 1e6, width=32), st.integers(0, 1000))
def test_points_stay_inside_whatever_rounding_does(low: float, width: float, seed: int) -> None:
    ends = torch.tensor([low]), torch.tensor([low]) + torch.tensor([width])
    box = Box(*ends)
    draws = torch.Generator().manual_seed(seed)
    points = torch.cat([torch.tensor([[-1.0], [1.0], [0.0]]), 2 * torch.rand(20, 1, generator=draws) - 1])
    features = box.features(points)
    assert bool(((features >= box.low) & (features <= box.high)).all())
    if width > 1e-3 * abs(low) + 1e-3:
        torch.testing.assert_close(box.points(features), points, rtol=0, atol=1e-3)


@given(st.integers(1, 30), st.floats(0, 0.6), st.integers(0, 1000))
def test_sparse_features_have_the_same_range(rows: int, share: float, seed: int) -> None:
    draws = torch.Generator().manual_seed(seed)
    dense = torch.randn(rows, 5, generator=draws) * (torch.rand(rows, 5, generator=draws) < share)
    entries = dense.to_sparse_csr()
    sparse = Features.sparse(entries.crow_indices(), entries.col_indices(), entries.values(), 5)
    some = (rows // 3, rows - rows // 4)
    for part in (None, some):
        wanted = Features.dense(dense).range(part)
        for one, two in zip(sparse.range(part), wanted, strict=True):
            assert torch.equal(one, two)


def test_sparse_features_are_not_made_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.Generator().manual_seed(0)
    words = (torch.rand(30, 200, generator=draws) < 0.05).float()
    graph = Graph.from_edges(cases.tiny_graph().edge_index, 30, words, y=cases.tiny_graph().y)
    assert graph.features is not None and graph.features.is_sparse

    def refuse(self: object) -> Tensor:
        raise AssertionError("densified")

    monkeypatch.setattr("fgai.sparse.features.SparseRows.to_dense", refuse)
    low, high = Budget().feature_box(graph)
    used = words.any(0)
    assert low[used].unique().tolist() == pytest.approx([-BEYOND])
    assert high[used].unique().tolist() == pytest.approx([1 + BEYOND])
    assert bool((~used).any()) and not bool(low[~used].any() | high[~used].any())


def test_constant_features_cannot_be_changed() -> None:
    x = cases.tiny_graph().features.to_dense().clone()  # type: ignore[union-attr]
    x[:, 2] = 7.3
    graph, model = with_features(x), cases.trained("gat", "vanilla")
    for attack in (PGDInjection(SMALL), cases.SmallEnsemble(Budget(nodes=2, edges=3, steps=3))):
        with cases.quiet():
            features = attack.run(model, graph).change.features
        assert features is not None and bool((features[:, 2] == x[0, 2]).all())
        assert not torch.equal(features[0], SMALL.feature_box(graph).middle)
    with cases.quiet():
        moved = (
            FeaturePGD(Budget(rows=0.3, radius=0.3, steps=3, step_size=0.1)).run(model, graph).change.delta
        )
    assert moved is not None and not bool(moved[:, 2].any()) and bool(moved[:, 3].any())
    with cases.quiet():
        natural = cases.attack(fgai.attacks.NaturalInjection).run(model, graph)
    torch.testing.assert_close(natural.change.features[:, 2], x[: len(natural.change.features), 2])  # type: ignore[index, arg-type]


def test_data_without_any_variation_needs_a_box() -> None:
    graph, model = with_features(torch.ones(30, 6)), cases.trained("gat", "vanilla")
    for kind in (PGDInjection, RandomInjection):
        with pytest.raises(BudgetError, match=r"is constant.*give `box`"):
            kind(SMALL).run(model, graph)
    with cases.quiet():
        PGDInjection(replace(SMALL, box=(-1.0, 1.0))).run(model, graph)
    with pytest.raises(BudgetError, match="is constant"):
        fgai.make_faithful(model, graph, nodes=2, edges=2, epochs=1, progress=False)
    settings = {"nodes": 2, "edges": 2, "epochs": 1, "progress": False}
    fgai.make_faithful(model, graph, prediction_stability=0.0, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.3e38])
@pytest.mark.parametrize("sparse", [False, True])
def test_features_that_are_not_finite_are_refused_before_work(bad: float, sparse: bool) -> None:
    x = cases.tiny_graph().features.to_dense().clone()  # type: ignore[union-attr]
    x[4, 3] = bad
    graph = with_features(x)
    if sparse:
        entries = x.to_sparse_csr()
        stored = (entries.crow_indices(), entries.col_indices(), entries.values())
        graph = graph.replace(features=Features.sparse(*stored, 6))
    with pytest.raises(InputError, match=r"must be finite.*feature 3"):
        PGDInjection(SMALL).run(cases.trained("gat", "vanilla"), graph)


def test_a_graph_without_features_is_refused() -> None:
    graph = cases.tiny_graph().replace(features=None)
    low, high = data_range(graph)
    assert low.numel() == high.numel() == 0
    with pytest.raises(InputError, match="has no features to inject"):
        InjectionAdversary(graph, Budget(nodes=2, edges=2, targets="fit"))


def test_large_offsets_in_single_precision() -> None:
    """The box has a hundred numbers at most there; steps that are smaller than their distance add up."""
    x = 1e6 + 2 * cases.tiny_graph().features.to_dense()  # type: ignore[union-attr]
    graph = with_features(x)
    model = fgai.train(cases.PygModel(6, 3), graph, epochs=2, progress=False)
    with cases.quiet():
        result = PGDInjection(Budget(nodes=2, edges=3, steps=40, step_size=0.01)).run(model, graph)
    features, box = result.change.features, Budget().feature_box(graph)
    assert features is not None and bool(((features >= box.low) & (features <= box.high)).all())
    if result.ledger.gradient > 0 and result.value > result.noise:
        assert bool(((features - box.middle).abs() > 0.2 * box.half).any())


def test_a_box_narrower_than_the_data_is_told_once() -> None:
    model, graph = cases.trained("gat", "vanilla"), cases.tiny_graph()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = PGDInjection(replace(SMALL, box=(-0.5, 0.5), restarts=2)).run(model, graph)
    told = [w.message for w in caught if getattr(w.message, "code", "") == "box-narrower-than-data"]
    assert len(told) == 1 and "6 of 6 features" in str(told[0]) and "feature 0 lies in" in str(told[0])
    assert result.change.features is not None and float(result.change.features.abs().max()) <= 0.5
    with pytest.warns(ReliabilityWarning, match="box-narrower-than-data"):
        fgai.make_faithful(model, graph, nodes=2, edges=2, epochs=1, progress=False, box=(-0.5, 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fgai.make_faithful(model, graph, nodes=2, edges=2, epochs=1, progress=False, box=(-9.0, 9.0))


def test_features_are_drawn_from_a_box() -> None:
    draws, box = torch.Generator().manual_seed(0), Box.of(2.0, 3.0, torch.zeros(6))
    drawn = draw_features(cases.tiny_graph(), 50, box, draws)
    assert drawn.shape == (50, 6) and float(drawn.min()) >= 2 and float(drawn.max()) <= 3


def test_the_check_is_made_feature_by_feature() -> None:
    x = cases.tiny_graph().features.to_dense() * torch.tensor([1.0, 1, 1, 1, 1, 1000])  # type: ignore[union-attr]
    graph = with_features(x)
    ends = graph.test_mask.nonzero().flatten()[:3].view(1, 3)  # type: ignore[union-attr]
    inside = x.mean(0, keepdim=True)
    check_budget(GraphChange(endpoints=ends, features=inside), SMALL, graph)
    inside[0, 4] = 20.0  # within what the last feature holds
    with pytest.raises(BudgetError, match=r"leave the box: feature 4 must be in .*, got 20"):
        check_budget(GraphChange(endpoints=ends, features=inside), SMALL, graph)


def test_a_threat_in_another_box() -> None:
    threat = THREATS["standard"].sized(box=(0.0, 1.0))
    assert threat.budget.box == (0.0, 1.0) and threat.per_graph is not None
    assert threat.per_graph.box == (0.0, 1.0) and threat.budget.nodes == 20
    assert THREATS["modify"].sized(box=(0.0, 1.0)).budget.box == (0.0, 1.0)
    with pytest.raises(InputError, match="changes no features"):
        THREATS["edges"].sized(box=(0.0, 1.0))
    with pytest.raises(BudgetError, match="low < high"):
        THREATS["standard"].sized(box=(1.0, 0.0))


def test_a_box_follows_its_range_and_the_values() -> None:
    low, graph = torch.zeros(2), with_features(cases.tiny_graph().features.to_dense().clone())
    widths = [float(Budget().box_in(low, torch.full((2,), most)).half[0]) for most in (1.0, 2.0)]
    assert widths[1] == pytest.approx(2 * widths[0])
    before = Budget().feature_box(graph)
    assert Budget().feature_box(graph) is before and Budget(box=(-9.0, 9.0)).feature_box(graph) is not before
    graph.features.stored.mul_(3)
    assert torch.allclose(Budget().feature_box(graph).half, 3 * before.half)
