"""One contract for every attack on every model and recipe."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls
from torch import Tensor, nn

from fgai.attacks import (
    DICE,
    PRBCD,
    TDGIA,
    AdaptiveInjection,
    Attack,
    Budget,
    FeaturePGD,
    NaturalInjection,
    PGDInjection,
    RandomEdges,
    RandomInjection,
    check_budget,
)
from fgai.attacks.base import _DamageAttack
from fgai.attacks.search.climb import SearchResult
from fgai.attacks.search.members import GRADIENTS
from fgai.attention import AttentionMap, LayerAttention, evaluating, observe, prepared
from fgai.errors import ReliabilityWarning
from fgai.graph import Graph, GraphChange
from fgai.metrics import intruder_mass
from fgai.objectives import Clean, explanation, margin_loss, prediction
from support import attack_cases as cases
from support.forward import seen_by

COMBINATIONS = (list(cases.BUDGETS), cases.MODELS, cases.RECIPES, cases.OBJECTIVES)


def label(value: Any) -> str:
    return getattr(value, "name", str(value))


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything an attack might leave changed."""
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "training": [module.training for module in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "grad": [p.grad for p in model.parameters()],
        "hooks": [
            (len(m._forward_hooks), len(m._forward_pre_hooks), m.__dict__.get("tap")) for m in model.modules()
        ],
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, value in before.pop("state").items():
        assert torch.equal(value, after["state"][name]), name
    after.pop("state")
    assert before == after


def assert_within(change: GraphChange, attacked: Graph, budget: Budget, graph: Graph) -> None:
    """The budget, counted again from the graphs alone."""
    added = attacked.num_nodes - graph.num_nodes
    assert added <= budget.nodes
    old, new = set(graph.keys.tolist()), set(attacked.keys.tolist())
    assert old <= new or not budget.nodes
    ends = [(key & 0xFFFFFFFF, key >> 32) for key in new ^ old]
    joined = [(a, b) for a, b in ends if a != b]
    assert all(a >= graph.num_nodes for a, b in ends if a == b)
    limit = budget.nodes * budget.edges if budget.nodes else budget.edges
    assert len(joined) <= 2 * limit
    assert graph.test_mask is not None
    for a, b in joined:
        for node in (a, b):
            assert node >= graph.num_nodes or bool(graph.test_mask[node])
    before, after = graph.features.to_dense(), attacked.features.to_dense()  # type: ignore[union-attr]
    moved = (after[: graph.num_nodes] - before).abs()
    assert bool((moved <= budget.radius * budget.feature_box(graph).half + 1e-6).all())
    rows = int((moved.amax(1) > 0).sum())
    assert rows <= max(1, round(budget.rows * int(graph.test_mask.sum())))
    if added:
        low, high = before.amin(0), before.amax(0)
        more = 0.1 * (high - low) + 1e-6
        new = after[graph.num_nodes :]
        assert bool(((new >= low - more) & (new <= high + more)).all())
    check_budget(change, budget, graph)


def judged(attack: Attack, model: nn.Module, graph: Graph, attacked: Graph, how: str = "__call__") -> float:
    """The objective's loss, or its damage, computed apart from the attack."""
    with evaluating(model), torch.no_grad():
        clean = Clean(*seen_by(model, graph), attack.budget.target_nodes(graph), graph.y)
        return float(getattr(attack.objective, how)(*seen_by(model, attacked), clean))


def run_contract(kind: type[Attack], name: str, recipe: str, objective: str) -> None:
    model, graph = cases.trained(name, recipe), cases.tiny_graph()
    if hasattr(model, "prepare"):
        graph = model.prepare(graph)
    model.train()
    before = snapshot(model)
    attack = cases.attack(kind, objective)
    with cases.quiet():
        result, again = (attack.run(model, graph, seed=3) for _ in range(2))
        other = attack.run(model, graph, seed=4)
    assert_same(before, snapshot(model))
    assert_within(result.change, result.graph, attack.budget, graph)
    for first, second in zip(vars(result.change).values(), vars(again.change).values(), strict=True):
        assert (first is None) == (second is None)
        assert first is None or torch.equal(first, second)
    assert (result.value, result.ledger.curve) == (again.value, again.ledger.curve)
    drawn = [r.change.endpoints if r.change.endpoints is not None else r.graph.keys for r in (result, other)]
    drawn = drawn if result.change.rows is None else [result.change.rows, other.change.rows]  # type: ignore[list-item]
    if kind in (PRBCD, TDGIA, cases.SmallEnsemble):  # only noise and starts are drawn
        flat = (recipe, objective) == ("rung", "explanation")  # no attention to move: it reads no edges
        assert (result.ledger.curve == other.ledger.curve) is flat
    else:
        assert not torch.equal(*drawn)
    assert result.value == pytest.approx(judged(attack, model, graph, result.graph), rel=1e-5, abs=1e-6)
    if kind in cases.REPORTED:
        assert result.ledger.damages[result.ledger.won] == max(result.ledger.damages)
        damage = judged(attack, model, graph, result.graph, "value")
        assert max(result.ledger.damages) == pytest.approx(damage, abs=1e-5)
        assert len(result.ledger.proposals()) == len(result.ledger.members) + attack.budget.restarts
    else:
        assert result.value >= result.noise
        assert result.value >= max(result.ledger.curve) - 1e-6
    if kind in cases.START_FROM_NOISE:
        noise = cases.attack(RandomInjection, objective).run(model, graph, seed=3)
        assert result.noise >= noise.value - 1e-6  # summed in another order where few rows are in reach
    steps = 0 if kind in cases.UNSEARCHED else attack.budget.steps
    if kind in cases.REPORTED:
        useless = [
            member.steps
            for member in getattr(attack, "members", ())
            if not GRADIENTS[member.gradient](model, observe(model, prepared(model, graph)).attention)
        ]
        skipped = sum(useless) * len(getattr(attack, "rules", ())) * attack.budget.restarts
        assert result.ledger.steps == attack.max_steps - skipped
        assert result.ledger.forwards > len(result.ledger.curve)
    else:
        assert result.ledger.steps == steps * attack.budget.restarts
        relaxed = result.ledger.steps if kind is PRBCD else 0
        assert result.ledger.forwards == len(result.ledger.curve) + relaxed
    assert (result.ledger.feasible is None) == (attack.objective.name != "preserving")
    kept = result.edge_map
    assert torch.equal(graph.keys[kept.before], result.graph.keys[kept.after])
    gone = 0 if result.change.removed is None else 2 * result.change.removed.shape[1]
    assert kept.before.numel() == graph.num_edges - gone


def some_combinations() -> list[tuple[type[Attack], str, str, str]]:
    """Every attack under every second objective, every objective on every model, and every recipe."""
    seen: Counter[str] = Counter()
    rows = []
    for index, (kind, half) in enumerate(itertools.product(cases.BUDGETS, range(2))):
        model = cases.MODELS[index % len(cases.MODELS)]
        objective = cases.OBJECTIVES[(index // len(cases.MODELS) + index + half) % len(cases.OBJECTIVES)]
        rows.append((kind, model, cases.RECIPES[seen[model] % len(cases.RECIPES)], objective))
        seen[model] += 1
    return rows


@pytest.mark.many
@pytest.mark.parametrize(("kind", "model", "recipe", "objective"), some_combinations(), ids=label)
def test_contract(kind: type[Attack], model: str, recipe: str, objective: str) -> None:
    run_contract(kind, model, recipe, objective)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "model", "recipe", "objective"), list(itertools.product(*COMBINATIONS)), ids=label
)
def test_contract_in_full(kind: type[Attack], model: str, recipe: str, objective: str) -> None:
    run_contract(kind, model, recipe, objective)


@pytest.mark.parametrize("kind", list(cases.BUDGETS), ids=label)
@pytest.mark.parametrize("fails_at", [1, 3])
def test_a_raising_attack_leaves_the_model_as_it_was(kind: type[Attack], fails_at: int) -> None:
    model, calls = copy.deepcopy(cases.trained("gat", "vanilla")), [0]

    def objective(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
        calls[0] += 1
        if calls[0] > fails_at:
            raise RuntimeError("broken on purpose")
        return prediction(logits, attention, clean)

    model.train()
    model.convs[1].eval()  # type: ignore[union-attr, index]
    next(model.parameters()).requires_grad_(False)
    before = snapshot(model)
    attack = cases.attack(kind, objective, restarts=4)
    with pytest.raises(RuntimeError, match="on purpose"):
        attack.run(model, cases.tiny_graph())
    assert_same(before, snapshot(model))


@pytest.mark.parametrize("kind", [PGDInjection, RandomInjection], ids=label)
def test_every_model_and_objective_gets_the_same_endpoints(kind: type[Attack]) -> None:
    graph, seen = cases.tiny_graph(), []
    with cases.quiet():
        for name, objective in zip(cases.MODELS, [*cases.OBJECTIVES, "prediction"], strict=True):
            result = cases.attack(kind, objective, restarts=1).run(
                cases.trained(name, "vanilla"), graph, seed=2
            )
            seen.append(result.change.endpoints)
    for endpoints in seen[1:]:
        assert torch.equal(seen[0], endpoints)
    for row in seen[0]:
        assert row.unique().numel() == row.numel()


def test_more_steps_are_never_weaker() -> None:
    model, graph = cases.trained("gatv2", "vanilla"), cases.tiny_graph()
    with cases.quiet():
        attacks = [cases.attack(PGDInjection, steps=steps, restarts=1) for steps in (0, 1, 2, 5)]
        values = [attack.run(model, graph).value for attack in attacks]
    assert values == sorted(values)
    assert values[-1] > values[0]


def test_more_restarts_are_never_weaker() -> None:
    model = cases.trained("gat", "vanilla")
    values = [
        cases.attack(PGDInjection, "margin", restarts=n).run(model, cases.tiny_graph()).value
        for n in (1, 2, 4)
    ]
    assert values == sorted(values)


@pytest.mark.parametrize(
    ("kind", "nothing"),
    [
        (RandomInjection, {"nodes": 0}),
        (PGDInjection, {"nodes": 0}),
        (RandomEdges, {"edges": 0}),
        (FeaturePGD, {"radius": 0.0}),
        (TDGIA, {"nodes": 0}),
        (AdaptiveInjection, {"nodes": 0}),
        (DICE, {"edges": 0}),
        (PRBCD, {"edges": 0}),
        (cases.SmallEnsemble, {"nodes": 0}),
        (NaturalInjection, {"nodes": 0}),
    ],
    ids=label,
)
@pytest.mark.parametrize("name", cases.first(1, cases.MODELS))
def test_a_budget_of_nothing_is_the_identity(
    kind: type[Attack], nothing: dict[str, float], name: str
) -> None:
    model, graph = cases.trained(name, "vanilla"), cases.tiny_graph()
    attack = cases.attack(kind, **nothing)
    with cases.quiet():
        result = attack.run(model, graph)
    prepared = model.prepare(graph) if hasattr(model, "prepare") else graph  # type: ignore[operator]
    assert torch.equal(result.graph.keys, prepared.keys)
    assert torch.equal(result.graph.features.to_dense(), graph.features.to_dense())  # type: ignore[union-attr]
    assert result.value == pytest.approx(result.start, abs=1e-6)


def test_fgsm_ends_at_corners_of_the_box() -> None:
    attack = cases.attack(PGDInjection, box=(-2.0, 3.0), steps=1, step_size=1.0, restarts=1)
    result = attack.run(cases.trained("gat", "vanilla"), cases.tiny_graph())
    assert result.value > result.noise
    assert set(result.change.features.unique().tolist()) <= {-2.0, 0.5, 3.0}  # type: ignore[union-attr]


def test_the_random_threat_stays_in_the_range_of_the_data() -> None:
    graph = cases.tiny_graph()
    attack = cases.attack(RandomInjection)
    features = attack.run(cases.trained("gat", "vanilla"), graph).change.features
    low, high = graph.features.range()  # type: ignore[union-attr]
    assert features is not None and bool(((features >= low) & (features <= high)).all())
    assert features.unique().numel() == features.numel()


@pytest.mark.many
@pytest.mark.parametrize(
    ("name", "kind"),
    cases.first(5, cases.rotated(cases.MODELS, [NaturalInjection, PGDInjection, cases.SmallEnsemble])),
    ids=label,
)
def test_attention_for_new_nodes_is_an_objective(kind: type[Attack], name: str) -> None:
    model, graph = cases.trained(name, "vanilla"), cases.tiny_graph()
    attack = cases.attack(kind, "intruders", restarts=1)
    with cases.quiet():
        result = attack.run(model, graph, seed=3)
    ready = model.prepare(graph) if hasattr(model, "prepare") else graph  # type: ignore[operator]
    assert result.start == 0 and result.noise <= result.value <= 1
    assert result.value == pytest.approx(judged(attack, model, ready, result.graph), rel=1e-5)
    with evaluating(model), torch.no_grad():
        seen = seen_by(model, result.graph)[1]
    masses = [
        intruder_mass(layer.values.mean(1), layer.source >= 30, layer.rowptr, nodes=torch.arange(30))
        for layer in seen
    ]
    assert result.value == pytest.approx(sum(masses) / len(masses), rel=1e-5)


def test_natural_features_lie_between_real_ones() -> None:
    graph = cases.tiny_graph()
    real = graph.features.to_dense()  # type: ignore[union-attr]
    for seed in range(2):
        with cases.quiet():
            result = cases.attack(NaturalInjection).run(cases.trained("gat", "vanilla"), graph, seed=seed)
        for row in result.change.features:  # type: ignore[union-attr]
            equal = torch.cat([real.T, torch.ones(1, len(real))]).double().numpy()
            wanted = torch.cat([row, torch.ones(1)]).double().numpy()
            assert nnls(equal, wanted)[1] < 1e-5


@pytest.mark.parametrize("targets", ["test", "val", "fit"])
def test_targets_are_where_the_attack_may_go(targets: str) -> None:
    graph = cases.tiny_graph()
    masks = {"test": graph.test_mask, "val": graph.val_mask, "fit": graph.train_mask | graph.val_mask}  # type: ignore[operator]
    result = cases.attack(RandomInjection, edges=2, targets=targets).run(
        cases.trained("gat", "vanilla"), graph
    )
    assert bool(masks[targets][result.change.endpoints].all())  # type: ignore[index]


# The objectives against slow loops.


@given(st.integers(0, 2**31 - 1), st.integers(1, 4))
def test_the_explanation_objective_equals_a_loop(seed: int, k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, 7, (2, 25), generator=generator).unique(dim=1)
    values = torch.rand(edges.shape[1], 2, generator=generator).double() + 0.01
    moved = torch.rand(edges.shape[1] + 3, 2, generator=generator).double() + 0.01
    extra = torch.cat([edges, torch.tensor([[7, 7, 7], [0, 3, 5]])], dim=1)
    before = AttentionMap((LayerAttention.from_edges(values, *edges, num_nodes=7),))
    after = AttentionMap((LayerAttention.from_edges(moved, *extra, num_nodes=8),))
    clean = Clean(torch.zeros(7, 2), before, torch.arange(7))
    found = explanation(k)(torch.zeros(8, 2), after, clean)
    now = {(s, d): m.log().mean() for s, d, m in zip(*extra.tolist(), moved, strict=True)}
    margins = []
    for node in range(7):
        row = [(s, d, v.log().mean()) for s, d, v in zip(*edges.tolist(), values, strict=True) if d == node]
        if len(row) > k:
            row.sort(key=lambda entry: (-float(entry[2]), entry[0]))
            out = sorted((float(now[s, d]) for s, d, _ in row[k:]), reverse=True)
            inside = sorted(float(now[s, d]) for s, d, _ in row[:k])
            margins += [1 / (1 + math.exp(b - a)) for a, b in zip(out, inside, strict=False)]
    assert float(found) == pytest.approx(sum(margins) / len(margins) if margins else 0.0, rel=1e-6, abs=1e-9)


def test_the_prediction_objectives_equal_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    y, now = torch.randn(2, 11, 4, generator=generator).double()
    nodes = torch.tensor([1, 4, 5, 9])
    clean = Clean(y, AttentionMap(()), nodes)
    losses, margins = [], []
    for node in nodes.tolist():
        own = max(range(4), key=lambda c: float(y[node, c]))
        losses.append(float(now[node].exp().sum().log() - now[node, own]))
        rest = max(float(now[node, c]) for c in range(4) if c != own)
        margins.append(min(rest - float(now[node, own]), 1.0))
    assert float(prediction(now, AttentionMap(()), clean)) == pytest.approx(sum(losses) / 4)
    assert float(margin_loss(now, AttentionMap(()), clean)) == pytest.approx(sum(margins) / 4)


# Weak attacks say so.


class Flipped(torch.autograd.Function):
    """The identity, with a gradient that points the wrong way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Masked(cases.PygModel):
    """A defence by a broken gradient."""

    def __init__(self, kind: str) -> None:
        super().__init__(6, 3)
        self.kind = kind
        self.load_state_dict(cases.trained("pyg", "vanilla").state_dict())

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.kind == "none":
            x = x.detach()
        elif self.kind == "zero":
            x = x.detach() + 0 * x
        else:
            x = Flipped.apply(x)
        return super().forward(x, edge_index)


@pytest.mark.parametrize("kind", ["none", "zero"])
def test_a_zero_gradient_is_told(kind: str) -> None:
    with pytest.warns(ReliabilityWarning, match="zero-gradient") as caught:
        cases.attack(PGDInjection).run(Masked(kind), cases.tiny_graph())
    assert caught[0].message.code == "zero-gradient"  # type: ignore[union-attr]


def test_a_search_that_loses_to_noise_is_told() -> None:
    attack = cases.attack(PGDInjection, box=(-20.0, 20.0), step_size=0.01, restarts=1)
    with pytest.warns(ReliabilityWarning, match="weaker-than-noise"):
        attack.run(Masked("flipped"), cases.tiny_graph())


class ByCount(_DamageAttack):
    """Takes a step of which the loss knows nothing good, and one that a count of damage may prefer."""

    counts = (0.0, 0.0)

    def candidates(self, graph: Graph, nodes: Tensor, *rest: Any) -> Iterator[GraphChange]:
        ledger = rest[-1]
        ledger.add(SearchResult(torch.zeros(1, 6), 0.0, 0.0, gradient=1.0, steps=1), "one")
        for size in (20.0, 0.0):
            yield GraphChange(endpoints=nodes[:1, None], features=torch.full((1, 6), size))

    def damage(self, judge: Any, change: GraphChange, value: float) -> float:
        return self.counts[int(not change.features.any())]  # type: ignore[union-attr]


@pytest.mark.parametrize("more", [False, True])
def test_a_search_judged_by_damage_is_weak_only_if_its_damage_is(more: bool) -> None:
    attack = ByCount(Budget(nodes=1, edges=1, steps=1, box=(-20.0, 20.0)), "prediction")
    attack.counts = (0.1, 0.2) if more else (0.2, 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attack.run(cases.trained("pyg", "vanilla"), cases.tiny_graph())
    assert any("weaker-than-noise" in str(one.message) for one in caught) is not more
