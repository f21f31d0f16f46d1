"""Algorithm 1 as printed: where δ and ρ climb, how far, and what that trains."""

# mypy: disable-error-code="arg-type, attr-defined, index, no-any-return, operator, union-attr"

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest
from torch import Tensor, nn
from torch.nn.functional import elu
from torch_geometric.nn import GATConv

from experiments.algorithm1 import Ascent, AscentSettings, Hashed, ascend, project, random_point
from experiments.methods import setting_names, train_method
from fgai.attention import evaluating, observe, prepared
from fgai.errors import InputError
from fgai.training import TrainConfig, fit
from support.balls import _norms
from support.balls import project as reference_project
from support.csr_rows import pointer, rows
from support.training_cases import GRAPH, Calling, assert_same_weights, fresh

RADIUS = 0.07
KINDS = ("GAT", "GATv2", "GT")


def config(**changes: Any) -> AscentSettings:
    """The paper's setting on a small graph."""
    return AscentSettings(**{"k": 60, "radius": RADIUS, "steps": 6, **changes})


def started(kind: str = "GAT", model: nn.Module | None = None, **changes: Any) -> tuple[Ascent, nn.Module]:
    vanilla = fresh(kind) if model is None else model
    recipe = Ascent(vanilla, prepared(vanilla, GRAPH), config(**changes))
    recipe.start(vanilla, 0)
    return recipe, vanilla


def draws(seed: int = 0) -> Hashed:
    return Hashed(torch.tensor(seed))


@given(rows(columns=2), st.sampled_from([0.0, 0.01, 0.3, 1.0, 40.0]))
def test_projection_equals_the_reference(case: tuple[Tensor, ...], radius: float) -> None:
    *columns, rowptr = case
    points = torch.stack(columns, dim=1)
    torch.testing.assert_close(
        project(points, rowptr, radius), reference_project(points, rowptr, radius), rtol=1e-9, atol=1e-9
    )


def test_random_points_are_uniform() -> None:
    # In d dimensions the norm of a uniform point satisfies P(norm <= t R) = t^d.
    rowptr = pointer([3] * 400 + [0] + [2] * 400)
    point = random_point(rowptr, 2000, 0.2, draws(4))
    size = _norms(point, rowptr, "l1") / 0.2
    assert kstest(torch.cat([size[:400] ** 3, size[401:] ** 2]).numpy(), "uniform").pvalue > 0.01
    assert abs(float(point.sign().mean())) < 0.1


class TestAscend:
    ROWS = torch.tensor([0, 2, 3, 3])

    def test_one_step_by_hand(self) -> None:
        """The gradient (3, 4) is followed for 2.5 radii, to (1.5, 2); the nearest point of the l1 ball of
        radius 1 is 1.25 less in both."""
        slope = torch.tensor([3.0, 4.0, 0.0])
        found = ascend(lambda at: (slope * at).sum(), torch.zeros(3), self.ROWS, 1.0, 1)
        assert found.tolist() == pytest.approx([0.25, 0.75, 0.0])

    def test_every_node_and_head_has_a_ball_of_its_own(self) -> None:
        slope = torch.tensor([[1.0, -5.0], [0.0, 0.0], [7.0, 2e-30]])
        found = ascend(lambda at: (slope * at).sum(), torch.zeros(3, 2), self.ROWS, 0.5, 4)
        assert found.tolist() == [[0.5, -0.5], [0.0, 0.0], [0.5, 0.5]]

    def test_a_linear_function_is_taken_to_its_maximum(self) -> None:
        slope = torch.tensor([1.0, -3.0, 1.0])
        found = ascend(lambda at: (slope * at).sum(), torch.zeros(3), self.ROWS, 0.2, 40)
        assert float((slope * found).sum()) == pytest.approx(0.2 * (3.0 + 1.0), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_both_stay_in_their_balls_and_climb(kind: str) -> None:
    recipe, model = started(kind)
    starts, ends = recipe.starts(draws()), recipe.climbed(model, draws())
    with evaluating(model), torch.no_grad():
        found, before = recipe.stability(model, *ends), recipe.stability(model, *starts)
    for point in (*starts, *ends):
        assert bool((_norms(point, recipe.rowptr, "l1") <= RADIUS * (1 + 1e-5)).all())
    assert ends[0].shape == observe(model, recipe.graph).attention.last.values.shape
    assert found["prediction_stability"] > 1.05 * before["prediction_stability"] > 0
    assert found["explanation_stability"] >= before["explanation_stability"] > 0


def test_ends_are_beyond_random_points_of_the_surface() -> None:
    recipe, model = started()
    rows, (_, rho) = recipe.rowptr, recipe.starts(draws())
    ends = recipe.climbed(model, draws())
    with evaluating(model), torch.no_grad():
        found = recipe.stability(model, *ends)
        for seed in range(5):
            delta, _ = recipe.starts(draws(seed))
            outward = delta * (RADIUS / _norms(delta, rows, "l1")).repeat_interleave(rows.diff(), 0)
            moved = recipe.stability(model, outward, rho)
            assert found["prediction_stability"] > moved["prediction_stability"]


class Linear(nn.Module):
    """A user's own model whose output layer reads its attention linearly."""

    def __init__(self) -> None:
        super().__init__()
        self.first = GATConv(GRAPH.num_features, 4, heads=2, add_self_loops=False)
        self.second = GATConv(8, GRAPH.num_classes, heads=1, add_self_loops=False, bias=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(elu(self.first(x, edge_index)), edge_index)


def test_the_slope_in_delta_is_the_one_worked_out() -> None:
    """With y_i = Σ_j w_ij z_j the distance ½ Σ_c |Σ_j δ_ij z_jc| has the slope ½ Σ_c sign(·) z_jc / N."""
    torch.manual_seed(0)
    recipe, model = started(model=Linear())
    graph = recipe.graph
    delta, _ = recipe.climbed(model, draws())
    delta = delta.detach().requires_grad_()
    with evaluating(model, freeze=True):
        clean = observe(model, graph).logits
        (found,) = torch.autograd.grad(recipe._moved(clean, recipe._logits(model, delta)), delta)
        assert graph.features is not None
        hidden = elu(model.first(graph.features.to_dense(), graph.edge_index))
        values = model.second.lin(hidden)
    source, destination = graph.edge_index
    moved = torch.zeros(graph.num_nodes, values.shape[1]).index_add(0, destination, delta * values[source])
    wanted = (moved.sign()[destination] * values[source]).sum(1, keepdim=True) / 2 / graph.num_nodes
    torch.testing.assert_close(found, wanted.detach(), atol=1e-7, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_slope_in_delta_is_that_of_differences(kind: str) -> None:
    recipe, model = started(kind)
    delta, _ = recipe.climbed(model, draws())
    with evaluating(model, freeze=True):
        clean = observe(model, recipe.graph).logits

        def distance(point: Tensor) -> Tensor:
            return recipe._moved(clean, recipe._logits(model, point))

        at = delta.detach().requires_grad_()
        (slope,) = torch.autograd.grad(distance(at), at)
        along = slope / slope.norm()
        step = 2e-3
        difference = (distance(delta + step * along) - distance(delta - step * along)) / (2 * step)
    assert float(difference) == pytest.approx(float(slope.norm()), rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_explanation_stability_as_printed_trains_nothing(kind: str) -> None:
    recipe, model = started(kind)
    terms = recipe.stability(model, *recipe.climbed(model, draws()))
    parameters = list(model.parameters())
    still = torch.autograd.grad(
        terms["explanation_stability"], parameters, allow_unused=True, retain_graph=True
    )
    assert float(terms["explanation_stability"].detach()) > 0
    assert all(slope is None or not slope.any() for slope in still)
    slopes = torch.autograd.grad(terms["prediction_stability"], parameters, allow_unused=True)
    assert any(slope is not None and bool(slope.any()) for slope in slopes)


@pytest.mark.parametrize("kind", KINDS)
def test_by_name_on_every_model(kind: str) -> None:
    vanilla = fresh(kind)
    made = train_method(
        "fgai-paper", kind, GRAPH, vanilla=vanilla, progress=False, settings={"epochs": 3, "steps": 2}
    )
    history = made.history
    assert set(history.terms[0]) == {
        "closeness", "similarity", "prediction_stability", "explanation_stability", "total",
    }  # fmt: skip
    assert history.kept_epoch == 3, "Algorithm 1 returns what its last step left"
    assert not any(".limits." in name for name in made.state_dict())


@pytest.mark.many
@pytest.mark.parametrize("after", [0, 2, 3])
def test_killed_and_resumed_is_bit_equal(after: int, tmp_path: Path) -> None:
    class KilledError(Exception):
        pass

    def kill(epoch: int, terms: dict[str, float]) -> None:
        if epoch == after:
            raise KilledError

    def made() -> tuple[nn.Module, Ascent]:
        vanilla = fresh()
        return fresh(), Ascent(vanilla, prepared(vanilla, GRAPH), config(steps=2))

    settings = TrainConfig(epochs=5, validate_every=2, lr=0.02)
    whole, recipe = made()
    history = fit(whole, recipe, settings, seed=3, progress=False)
    options: dict[str, Any] = {"seed": 3, "progress": False, "checkpoint": tmp_path, "checkpoint_every": 1}
    model, recipe = made()
    with pytest.raises(KilledError):
        fit(model, recipe, settings, tracker=Calling(kill), **options)
    model, recipe = made()
    assert fit(model, recipe, settings, **options).terms == history.terms
    assert_same_weights(model, whole)


def test_has_no_limits_and_no_other_adversary() -> None:
    assert not {"adversary", "limits", "margin"} & {*setting_names("fgai-paper", "GAT")}
    with pytest.raises(InputError, match="`settings` must be one of"):
        train_method("fgai-paper", "GAT", GRAPH, vanilla=fresh(), settings={"limits": True})
    with pytest.raises(InputError, match="`divergence` must be one of"):
        AscentSettings(divergence="tvd")
