"""Captured training steps against the same steps kernel by kernel, and what a CPU can show of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.algorithm1 import Ascent, AscentSettings
from experiments.defences import Regularised
from fgai.attacks import Budget
from fgai.attacks.injection import PGDInjection
from fgai.attacks.search import climb as climb_module
from fgai.attention import observe, prepared
from fgai.errors import FgaiWarning
from fgai.graph import Graph
from fgai.models import GAT, GT, GATv2
from fgai.ops.capture import Replay
from fgai.training import (
    AdversarialRecipe,
    FaithfulSettings,
    HardenSettings,
    StepContext,
    TrainConfig,
    VanillaRecipe,
    fit,
    term,
)
from fgai.training import loop as loop_module
from fgai.training.adversary import InjectionAdversary
from fgai.training.capture import MAX_UNREAD, _sum_by_name, can_capture
from fgai.training.faithful import FaithfulRecipe
from support.graph_cases import small_data
from support.task_cases import batch_of_graphs

BUDGET = Budget(nodes=3, edges=4, step_size=0.1, targets="fit")
KINDS = ("vanilla", "adversarial", "fgai", "own term", "ascent")


@term(on="attacked", needs_attention=True)
def moved(context: StepContext) -> Tensor:
    """Attention on old edges of the last layer."""
    assert context.attacked_attention is not None
    return (context.attacked_attention[-1] - context.attention[-1]).square().sum()


def recipe_for(kind: str, model: nn.Module, graph: Graph) -> Any:
    if kind == "vanilla":
        return VanillaRecipe(graph)
    if kind == "adversarial":
        return AdversarialRecipe(graph, HardenSettings(nodes=3, edges=4))
    torch.manual_seed(5)
    vanilla = type(model)(**model.config).to(graph.device).eval()
    if kind == "ascent":
        return Ascent(vanilla, graph, AscentSettings(steps=2, epochs=40, k=60))
    settings = FaithfulSettings(nodes=3, edges=4, steps=2, epochs=40)
    return FaithfulRecipe(vanilla, graph, settings, [moved] if kind == "own term" else [])


def model_for(cls: type[nn.Module], graph: Graph) -> nn.Module:
    torch.manual_seed(1)
    return cls.for_data(graph, attention_dropout=0.3)  # type: ignore[attr-defined, no-any-return]


def count_captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with every climb that is captured."""
    found: list[int] = []

    class Counted(Replay[Any]):
        """Tells of itself once it is made."""

        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            found.append(1)

    monkeypatch.setattr(climb_module, "Replay", Counted)
    return found


@pytest.mark.parametrize("cls", [GAT, GATv2, GT])
def test_observed_attention_has_the_recorded_gradients(cls: type[nn.Module]) -> None:
    graph = small_data()
    model = model_for(cls, graph).eval()
    graph = prepared(model, graph)
    found = []
    for heads in ("mean", "each"):
        seen = observe(model, graph, heads=heads, grad=True)
        logits, attention = seen.logits, seen.attention
        loss = logits.square().sum() + sum((w.values.mean(1) ** 3).sum() for w in attention)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append([logits, *(w.heads() for w in attention), *gradients])
        assert [w.name for w in attention] and all(w.adjacency is graph.adjacency for w in attention)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert all(getattr(module, "watch", None) is None for module in model.modules())


def test_observing_ends_also_after_an_error() -> None:
    graph = small_data()
    model = model_for(GAT, graph)
    with pytest.raises(Exception, match="features"):
        observe(model, prepared(model, graph).replace(features=None), heads="mean", grad=True)
    assert all(getattr(module, "watch", None) is None for module in model.modules())


def test_features_climb_in_place_along_the_sign() -> None:
    graph = small_data()
    adversary = InjectionAdversary(graph, BUDGET)
    adversary.start(torch.Generator().manual_seed(0))
    where, before = adversary.features.data_ptr(), adversary.features.detach().clone()
    attacked, _ = adversary.ascend_and_inject(graph, adversary.draw(torch.Generator().manual_seed(1)))
    assert attacked.features is not None and attacked.features.appended is not None
    push = torch.linspace(-1, 1, before.numel()).reshape(before.shape)
    (attacked.features.appended * push).sum().backward()
    adversary.ascend()
    assert adversary.features.data_ptr() == where
    low, high = BUDGET.feature_box(graph)
    after = (before + 0.1 * (high - low) / 2 * push.sign()).clamp(low, high)
    torch.testing.assert_close(adversary.features.detach(), after)
    adversary.ascend()  # nothing collected since
    torch.testing.assert_close(adversary.features.detach(), after)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("many", [False, True], ids=["one graph", "small graphs"])
def test_losses_from_draws_are_the_losses(many: bool, kind: str) -> None:
    graph = batch_of_graphs() if many else small_data()
    found = []
    for drawn_first in (True, False):
        model = model_for(GAT, graph)
        ready = prepared(model, graph)
        recipe = recipe_for(kind, model, ready)
        recipe.start(model, 3)
        seen = []
        for epoch in range(3):
            torch.manual_seed(epoch)
            model.train()
            draws = recipe.draw(epoch)
            losses = recipe.losses_from(model, draws) if drawn_first else recipe.losses(model, epoch)
            for loss in losses:
                loss["total"].backward()
                seen += [float(value.detach()) for value in loss.values()]
        found.append(seen)
    assert found[0] == found[1] and found[0]


def test_only_recipes_that_declare_it_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Longer(VanillaRecipe):
        """Changes a step, inherits `draw`, and does not say that it can be captured."""

        def losses(self, model: nn.Module, epoch: int) -> Any:
            for loss in super().losses(model, epoch):
                yield {**loss, "total": 2 * loss["total"]}

    graph = small_data()
    model = model_for(GAT, graph)
    graph = prepared(model, graph)
    assert not can_capture(VanillaRecipe(graph), model)  # on the CPU nothing is captured
    monkeypatch.setattr(nn.Parameter, "is_cuda", True)
    assert can_capture(VanillaRecipe(graph), model) and not can_capture(Longer(graph), model)
    for declares in (VanillaRecipe, AdversarialRecipe, FaithfulRecipe):
        assert vars(declares)["capturable"] is True
    assert "capturable" not in vars(Regularised)
    Longer.capturable = True
    assert can_capture(Longer(graph), model)


def test_terms_of_several_losses_add_up() -> None:
    assert _sum_by_name(["a", "total", "b", "total"], [1.0, 2.0, 3.0, 4.0]) == {
        "a": 1.0,
        "b": 3.0,
        "total": 6.0,
    }


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnTheDevice:
    """Captured equals kernel by kernel, for every recipe and model."""

    def run(
        self,
        kind: str,
        cls: type[nn.Module],
        monkeypatch: pytest.MonkeyPatch,
        captured: bool,
        graph: Graph | None = None,
    ) -> Any:
        graph = small_data(nodes=90) if graph is None else graph
        model = model_for(cls, graph).to("cuda")
        graph = prepared(model, graph)
        config = TrainConfig(epochs=MAX_UNREAD + 8, validate_every=7, patience=99, decay=0.5, clip=1.0)
        with monkeypatch.context() as patch:
            if not captured:
                patch.setattr(loop_module, "can_capture", lambda *_: False)
            history = fit(model, recipe_for(kind, model, graph), config, seed=2, progress=False)
        return history, model

    @pytest.mark.parametrize("cls", [GAT, GATv2, GT])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("many", [False, True], ids=["one graph", "small graphs"])
    def test_same_losses_scores_and_weights(
        self, many: bool, kind: str, cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        graph = batch_of_graphs() if many else None
        ours, first = self.run(kind, cls, monkeypatch, True, graph)
        theirs, second = self.run(kind, cls, monkeypatch, False, graph)
        assert len(ours.terms) == len(theirs.terms) == MAX_UNREAD + 8
        for one, two in zip(ours.terms, theirs.terms, strict=True):
            assert one == pytest.approx(two, rel=1e-4, abs=1e-6)  # like the weights: sums in another order
        assert [e for e, _ in ours.scores] == [e for e, _ in theirs.scores]
        assert [s for _, s in ours.scores] == pytest.approx([s for _, s in theirs.scores], rel=1e-5)
        for one, two in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)

    @pytest.mark.parametrize("new", [3, 60], ids=["rows in reach", "full passes"])
    @pytest.mark.parametrize("goal", ["prediction", "margin", "explanation"])
    def test_a_strong_attack_is_the_same_replayed(
        self, goal: str, new: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        graph = small_data(nodes=90)
        model = model_for(GAT, graph).to("cuda").eval()
        budget = Budget(nodes=new, edges=4, steps=25, step_size=0.05, restarts=2)
        attack, captured = PGDInjection(budget, goal), count_captures(monkeypatch)
        found = []
        for worth in (20, 1000):
            monkeypatch.setattr(climb_module, "MIN_STEPS", worth)
            found.append(attack.run(model, graph, seed=1))
        ours, theirs = found
        assert captured == [1, 1]  # one in each restart of the first, none in the second
        assert (ours.ledger.partial > 0) is (new == 3)
        assert ours.ledger.partial == theirs.ledger.partial
        assert ours.ledger.share == pytest.approx(theirs.ledger.share)
        assert ours.value == pytest.approx(theirs.value, rel=1e-5)
        assert ours.ledger.curve == pytest.approx(theirs.ledger.curve, rel=1e-4, abs=1e-6)
        assert (ours.ledger.steps, ours.ledger.forwards) == (theirs.ledger.steps, theirs.ledger.forwards)
        assert ours.ledger.gradient == pytest.approx(theirs.ledger.gradient, rel=1e-4)

    def test_draws_differ_from_epoch_to_epoch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        history, _ = self.run("vanilla", GAT, monkeypatch, captured=True)
        totals = [terms["total"] for terms in history.terms]
        assert len(set(totals)) > MAX_UNREAD

    def test_a_step_that_waits_for_the_device_runs_kernel_by_kernel(self) -> None:
        class Waiting(VanillaRecipe):
            """Reads a number in the middle of the step."""

            capturable = True

            def draw(self, epoch: int) -> Any:
                return super().draw(epoch)

            def losses_from(self, model: nn.Module, draws: Any) -> Any:
                for loss in self.losses(model, 0):
                    assert float(loss["total"].detach()) >= 0
                    yield loss

        graph = small_data()
        model = model_for(GAT, graph).to("cuda")
        with pytest.warns(FgaiWarning, match="kernel by kernel"):
            history = fit(
                model, Waiting(prepared(model, graph)), TrainConfig(epochs=6), seed=0, progress=False
            )
        assert len(history.terms) == 6

    def test_global_random_numbers_are_left_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(4)
        torch.rand(3, device="cuda")
        state = torch.cuda.get_rng_state()
        model_seed = torch.random.get_rng_state()
        graph = small_data()
        model = GAT(graph.num_features, 3).to("cuda")
        torch.cuda.set_rng_state(state)
        torch.random.set_rng_state(model_seed)
        fit(model, VanillaRecipe(prepared(model, graph)), TrainConfig(epochs=5), seed=0, progress=False)
        after: Tensor = torch.cuda.get_rng_state()
        assert torch.equal(after, state) and torch.equal(torch.random.get_rng_state(), model_seed)
