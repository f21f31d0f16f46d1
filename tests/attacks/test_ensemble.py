"""The ensemble: never weaker than its parts, judged by what is reported; masked gradients are caught."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fgai.attacks import (
    EXPLANATION_MEMBERS,
    PREDICTION_MEMBERS,
    Budget,
    EnsembleInjection,
    PGDInjection,
    ShortEnsemble,
    make_attack,
)
from fgai.attacks.budget import Box
from fgai.attacks.endpoints import RULES, SHARED_RULES, _cover_endpoints, _EndpointContext, _weakest_endpoints
from fgai.attacks.search.climb import OPTIMISERS, SPACES
from fgai.attacks.search.members import Member, _batches
from fgai.attacks.search.site import (
    ROW_LOSSES,
    _ClassScore,
    _damage_at,
    _InjectionSite,
    _LinkScore,
    _own_and_gap,
)
from fgai.attention import call_model, evaluating, observe, prepared
from fgai.errors import InputError, ReliabilityWarning
from fgai.graph import Graph, GraphChange
from fgai.metrics import f1, task_scores
from fgai.models import GAT
from fgai.objectives import Clean, explanation
from fgai.recompute import Recompute
from fgai.topk.swaps import swap_gaps
from support import attack_cases as cases
from support.rival_cases import compare_rivals

TINY = Budget(nodes=3, edges=4, steps=4)
ALONE = tuple(
    member
    for member in PREDICTION_MEMBERS
    if member.start not in ("incumbent", "donated") and member.gradient == "true"
)
FEW = ("random", "defects")
"""Rules for endpoints of tests that need more than one."""
PLAIN = ((4, 0.1, 1), (8, 0.05, 2))
"""Plain attacks of few steps, for an ensemble of few steps."""


def run(model: nn.Module, graph: Graph, attack: Any, **given: Any) -> Any:
    with cases.quiet():
        return attack.run(model, graph, **given)


def wrong(model: nn.Module, graph: Graph, attacked: Graph) -> float:
    """One minus the F1 on test nodes, computed apart from the attack."""
    assert graph.y is not None and graph.test_mask is not None
    with evaluating(model), torch.no_grad():
        logits = call_model(model, attacked)[: graph.num_nodes]
    return 1 - f1(logits[graph.test_mask], graph.y[graph.test_mask])


@pytest.mark.many
@pytest.mark.parametrize(
    ("name", "recipe"),
    cases.first(2, [("gat", "faithful"), *((name, "vanilla") for name in cases.MODELS[::-1])]),
)
def test_contract(name: str, recipe: str) -> None:
    graph, model = cases.tiny_graph(), cases.trained(name, recipe)
    vanilla = None if recipe == "vanilla" else cases.trained(name, "vanilla")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = run(model, graph, EnsembleInjection(TINY), seed=3, vanilla=vanilla)
    assert max(result.ledger.damages) == pytest.approx(wrong(model, graph, result.graph), abs=1e-6)
    assert result.ledger.damages[0] <= max(result.ledger.damages)
    rows = result.ledger.members
    found = {(row["member"], row["endpoints"]) for row in rows}
    kinds = {"true", "straight"} if recipe == "faithful" else {"true"}
    serving = [member.name for member in PREDICTION_MEMBERS if member.gradient in kinds]
    assert {(name, rule) for name in serving for rule in RULES} <= found
    (first, _), *others = result.ledger.proposals()
    assert first is None and [row for row, _ in others] == rows
    for row, damage in others:
        assert row["damage"] == pytest.approx(damage, abs=1e-6), row
    assert result.ledger.damages[result.ledger.won] == max(result.ledger.damages)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.many
@pytest.mark.parametrize(
    ("name", "objective"),
    cases.first(
        2, [("gat", "prediction"), ("gatv2", "intruders"), ("gt", "explanation"), ("pyg", "prediction")]
    ),
)
def test_never_weaker_than_a_member_or_the_plain_attack(name: str, objective: str) -> None:
    graph, model = cases.tiny_graph(), cases.trained(name, "vanilla")
    members = ALONE[::2] if objective == "prediction" else EXPLANATION_MEMBERS[:3]
    whole = EnsembleInjection(TINY, objective, k=cases.K, members=members, rules=FEW, baselines=PLAIN)
    most = max(run(model, graph, whole, seed=1).ledger.damages)
    for member in members:
        alone = EnsembleInjection(TINY, objective, k=cases.K, members=[member], rules=FEW, baselines=())
        assert most >= max(run(model, graph, alone, seed=1).ledger.damages) - 1e-9, member.name
    judged = EnsembleInjection(TINY, objective, k=cases.K)
    for steps, size, restarts in PLAIN:
        budget = replace(TINY, steps=steps, step_size=size, restarts=restarts)
        change = run(model, graph, PGDInjection(budget, objective, k=cases.K), seed=1).change
        assert most >= damage_of(judged, model, graph, change) - 1e-6


def damage_of(attack: EnsembleInjection, model: nn.Module, graph: Graph, change: GraphChange) -> float:
    """What an ensemble would report of a change, computed from full passes alone."""
    ready = prepared(model, graph)
    attacked = change.apply(ready)[0]
    if attack.objective.reads == "logits":
        return wrong(model, graph, attacked)
    before, after = (observe(model, seen, heads="mean") for seen in (ready, attacked))
    clean = Clean(before.logits, before.attention, torch.arange(graph.num_nodes))
    if attack.objective.top_k_margin is None:
        return float(attack.objective(after.logits, after.attention, clean))
    return float(attack.objective.value(after.logits, after.attention, clean))


@given(seed=st.integers(0, 50), steps=st.integers(1, 4))
@settings(max_examples=2)
def test_never_weaker_than_with_half_the_steps(seed: int, steps: int) -> None:
    graph, model = cases.tiny_graph(), cases.trained("gat", "vanilla")
    attacks = (
        EnsembleInjection(replace(TINY, steps=n), members=ALONE[::3], rules=FEW, baselines=PLAIN)
        for n in (steps, 2 * steps)
    )
    few, many = (max(run(model, graph, attack, seed=seed).ledger.damages) for attack in attacks)
    assert many >= few


def test_nothing_found_by_brute_force_over_a_grid_is_missed() -> None:
    """One new node with two features that matter, every point of a fine grid tried."""
    graph = cases.tiny_graph()
    assert graph.features is not None
    narrow = graph.replace(features=type(graph.features).dense(graph.features.to_dense()[:, :2].contiguous()))
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = GAT.for_data(narrow, hidden_channels=3, heads=2).eval()
    budget = Budget(nodes=1, edges=6, steps=40)
    attack = EnsembleInjection(budget, rules=("random",))
    result = run(model, narrow, attack, seed=2)
    ready = prepared(model, narrow)
    axis = torch.linspace(-1, 1, 13)
    best = max(
        wrong(model, narrow, result.change.__class__(
            endpoints=result.change.endpoints, features=torch.stack([x, y])[None]
        ).apply(ready)[0])
        for x in axis
        for y in axis
    )  # fmt: skip
    assert max(result.ledger.damages) >= 0.98 * best


class Quantised(GAT):
    """Activations rounded to a coarse grid: no gradient passes."""

    def embed(self, graph: Graph) -> Tensor:
        return torch.round(super().embed(graph) * 4) / 4


class Clamped(GAT):
    """Features beyond a hair's breadth are cut off, without a gradient for whoever stands outside."""

    def embed(self, graph: Graph) -> Tensor:
        assert graph.features is not None
        cut = graph.features.map(lambda values: values.clamp(-0.02, 0.02) * 50)
        return super().embed(graph.replace(features=cut))


def masked(kind: str) -> nn.Module:
    """A trained model whose gradients are hidden on purpose."""
    trained = cases.trained("gat", "vanilla")
    if kind == "saturated":
        model = copy.deepcopy(trained)
        with torch.no_grad():
            for conv in model.convs:  # type: ignore[union-attr]
                conv.source_weight.mul_(1e4)
                conv.destination_weight.mul_(1e4)
        return model
    other = {"quantised": Quantised, "clamped": Clamped}[kind](**trained.config)  # type: ignore[arg-type]
    other.load_state_dict(trained.state_dict())
    return other.eval()


MASKED = {"masked-gradients", "zero-gradient", "saturated-attention"}


@pytest.mark.many
@pytest.mark.parametrize("kind", ["saturated", "quantised", "clamped"])
def test_masked_gradients_are_caught(kind: str) -> None:
    graph, codes = cases.tiny_graph(), set()
    for seed in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            EnsembleInjection(TINY).run(masked(kind), graph, seed=seed)
        codes |= {w.message.code for w in caught if isinstance(w.message, ReliabilityWarning)}
        if codes & MASKED:
            break
    assert codes & MASKED, codes


@pytest.mark.parametrize("name", cases.first(1, ["gat", "gatv2", "gt"]))
def test_a_clean_model_raises_no_flag(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attack = EnsembleInjection(replace(TINY, steps=40), rules=FEW)
        attack.run(cases.trained(name, "vanilla"), cases.tiny_graph())
    flags = {w.message.code for w in caught if isinstance(w.message, ReliabilityWarning)}
    assert not flags & MASKED


class TestSite:
    @pytest.mark.parametrize("reads", [False, True])
    @pytest.mark.parametrize("name", ["gat", "gatv2", "gt"])
    def test_several_sets_of_features_at_once_equal_one_by_one(self, name: str, reads: bool) -> None:
        model, graph = (
            cases.trained(name, "vanilla"),
            prepared(cases.trained(name, "vanilla"), cases.tiny_graph()),
        )
        draws = torch.Generator().manual_seed(3)
        features = torch.rand(4, 3, graph.num_features, generator=draws) * 2 - 1
        ends = torch.tensor([[16, 20, 3], [7, 1, 2], [5, 9, 11]])
        with evaluating(model, freeze=True):
            seen = observe(model, graph, heads="mean")
            clean = Clean(seen.logits, seen.attention, torch.arange(0, 30, 2))
            again, change = Recompute(model, graph), GraphChange(endpoints=ends)
            part, full = (
                _InjectionSite(model, graph, change, clean, a, reads="ranking" if reads else "logits")
                for a in (again, None)
            )
            wanted = None if reads else clean.nodes
            part._set_plan(again.plan(change, wanted, all_rows=reads, limit=float("inf")))
            labels = seen.logits.argmax(1)
            values = []
            for site in (part, full):
                losses = ["entropy", "margin", "reach", "margin"]
                aim: Any = _damage_at(site, explanation(2), losses) if reads else _ClassScore(site, losses)
                moving = features.clone().requires_grad_()
                loss, damage = aim(site.run(moving))
                (gradient,) = torch.autograd.grad(loss.sum(), moving)
                if not reads:
                    loss = loss + out_of_reach(site, aim, losses, labels)
                values.append((loss.detach(), damage, gradient))
        for one, two in zip(*values, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def out_of_reach(site: _InjectionSite, aim: _ClassScore, losses: list[str], labels: Tensor) -> Tensor:
    """What rows that no new node reaches would add to each loss: a constant, which a climb leaves out."""
    rest = site.clean.nodes[~torch.isin(site.clean.nodes, site.rows)]
    logits = site.clean.logits[rest][None]
    mine = torch.nn.functional.one_hot(labels[rest], logits.shape[-1]).bool()
    own, gap = _own_and_gap(logits, mine)
    return torch.stack([ROW_LOSSES[name](logits, own, gap / aim.scale).sum() / aim.count for name in losses])


class TestPieces:
    @pytest.mark.parametrize("name", list(SPACES))
    @given(seed=st.integers(0, 1000), low=st.floats(-3, 0), width=st.floats(0.5, 4))
    def test_spaces_stay_in_the_box(self, name: str, seed: int, low: float, width: float) -> None:
        space, box = SPACES[name], Box.of(low, low + width, torch.zeros(5, dtype=torch.float64))
        draws = torch.Generator().manual_seed(seed)
        features = low + width * torch.rand(2, 3, 5, generator=draws, dtype=torch.float64)
        point = space.start(features, box)
        back = space.features(point, box)
        torch.testing.assert_close(back, features, rtol=0, atol=1e-3 * width)
        far = space.features(space.project(point + 100 * torch.randn(2, 3, 5, generator=draws), box), box)
        assert float(far.min()) >= low - 1e-6 and float(far.max()) <= low + width + 1e-6

    def test_adam_is_adam(self) -> None:
        start, draws = torch.zeros(1, 2, 3), torch.Generator().manual_seed(0)
        theirs = start.clone().requires_grad_()
        adam = torch.optim.Adam([theirs], lr=0.1, maximize=True)
        ours, mine = OPTIMISERS["adam"](start, torch.full((1, 1, 1), 0.1)), start.clone()
        for _ in range(5):
            gradient = torch.randn(start.shape, generator=draws)
            theirs.grad = gradient.clone()
            adam.step()
            mine = mine + ours.move(gradient)
        torch.testing.assert_close(mine, theirs.detach())

    def test_the_gap_is_positive_exactly_where_a_row_is_wrong(self) -> None:
        logits = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(1))
        label = torch.arange(7) % 4
        own, gap = _own_and_gap(logits, torch.nn.functional.one_hot(label).bool())
        assert torch.equal(gap > 0, logits.argmax(-1) != label)
        assert torch.equal(own, logits[:, torch.arange(7), label])
        wanted = torch.nn.functional.cross_entropy(logits[0], label, reduction="none")
        torch.testing.assert_close(ROW_LOSSES["entropy"](logits, own, gap)[0], wanted)

    @given(seed=st.integers(0, 1000))
    def test_the_damage_to_links_is_their_auc(self, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        logits, label = torch.randn(3, 11, 2, generator=draws), torch.randint(0, 2, (11,), generator=draws)
        aim = object.__new__(_LinkScore)
        aim.label = label
        expected = [1 - task_scores("link", one, label)["roc_auc"] for one in logits]
        if 0 < int(label.sum()) < 11:
            torch.testing.assert_close(aim.damage(logits), torch.tensor(expected))
        else:
            assert not aim.damage(logits).any()

    def test_members_are_batched_and_polish_comes_last(self) -> None:
        groups = _batches(PREDICTION_MEMBERS)
        assert sorted(m.name for g in groups for m in g) == sorted(m.name for m in PREDICTION_MEMBERS)
        assert [m.name for m in groups[-1]] == ["polish", "polish momentum"]
        kinds = [{(m.steps, m.gradient) for m in group} for group in groups]
        assert all(len(kind) == 1 for kind in kinds) and len(groups) == 4

    @pytest.mark.parametrize("field", ["start", "space", "optimiser", "loss"])
    def test_unknown_words_are_refused(self, field: str) -> None:
        with pytest.raises(InputError, match=field):
            Member(**{"name": "x", "start": "small", field: "other"})

    def test_an_ensemble_needs_members(self) -> None:
        with pytest.raises(InputError, match="must not be empty"):
            EnsembleInjection(TINY, members=())


@pytest.mark.parametrize("long", [17, 200])
def test_pairs_of_the_kernel_are_those_of_the_reference(long: int) -> None:
    compare_rivals("cpu", long, swap_gaps)


def test_a_member_whose_edge_is_gone_is_compared_with_no_other() -> None:
    now = torch.tensor([3.0, 2.0, 1.0, 0.5, 9.0, 8.0, 7.0])  # two nodes, four neighbours and three
    members = torch.tensor([True, True, False, False, True, False, True])
    there = torch.tensor([False, True, True, True, True, True, True])
    rowptr, rows = torch.tensor([0, 4, 7]), torch.arange(2)
    margins, real = swap_gaps(now, there, members, rowptr, rows, 2)
    assert real.sum(1).tolist() == [1, 1]
    torch.testing.assert_close(margins[real], torch.tensor([1.0 - 2.0, 8.0 - 7.0]))


class TestEndpoints:
    @pytest.mark.parametrize("rule", list(RULES))
    def test_rules_keep_the_budget(self, rule: str) -> None:
        graph = cases.tiny_graph()
        nodes = graph.test_mask.nonzero().flatten()  # type: ignore[union-attr]
        logits, attacked = torch.randn(2, 30, 3, generator=torch.Generator().manual_seed(0))
        sites = _EndpointContext(graph, nodes, nodes, logits, (3, 4), attacked, graph.y)
        first, second = (RULES[rule](sites, torch.Generator().manual_seed(5)) for _ in range(2))
        assert first.shape == (3, 4) and torch.equal(first, second)
        assert bool(torch.isin(first, nodes).all())
        assert all(torch.unique(row).numel() == 4 for row in first)

    @pytest.mark.parametrize("rule", list(RULES))
    def test_only_weakest_reads_the_attacked_model(self, rule: str) -> None:
        graph = cases.tiny_graph()
        nodes = graph.test_mask.nonzero().flatten()  # type: ignore[union-attr]
        logits, one, two = torch.randn(3, 30, 3, generator=torch.Generator().manual_seed(0))
        first, second = (
            RULES[rule](
                _EndpointContext(graph, nodes, nodes, logits, (1, 2), seen, graph.y), torch.Generator()
            )
            for seen in (one, two)
        )
        assert torch.equal(first, second) == (rule in SHARED_RULES)

    def test_weakest_takes_the_node_next_to_the_least_certain_leaves(self) -> None:
        """Two stars of one size: one with narrow margins, one with wide ones, and a wrong one."""
        edges = [(centre, leaf) for centre in range(3) for leaf in range(3 + 5 * centre, 8 + 5 * centre)]
        graph = Graph.from_edges(torch.tensor(edges).T, 18, torch.eye(18), undirected=True)
        every, logits, labels = torch.arange(18), torch.zeros(18, 2), torch.zeros(18, dtype=torch.long)
        for centre, gap in enumerate((3.0, 0.1, -2.0)):
            logits[[centre, *range(3 + 5 * centre, 8 + 5 * centre)], 0] = gap
        sites = _EndpointContext(graph, every, every, logits, (1, 2), logits, labels)
        assert _weakest_endpoints(sites, torch.Generator()).flatten().tolist() == [1, 0]
        wrong = replace(sites, labels=1 - labels)
        assert int(_weakest_endpoints(wrong, torch.Generator()).flatten()[0]) == 2

    def test_cover_takes_the_node_next_to_most_leaves(self) -> None:
        """Two stars: the centre of the larger is worth most, then the other's."""
        edges = [(0, leaf) for leaf in range(2, 10)] + [(1, leaf) for leaf in range(10, 15)]
        graph = Graph.from_edges(torch.tensor(edges).T, 16, torch.eye(16), undirected=True)
        every = torch.arange(16)
        sites = _EndpointContext(graph, every, every, None, (1, 2))
        found = _cover_endpoints(sites, torch.Generator().manual_seed(0))
        assert sorted(found.flatten().tolist()) == [0, 1]

    def test_more_endpoints_than_targets_are_filled_up(self) -> None:
        graph = cases.tiny_graph()
        nodes = torch.arange(5)
        sites = _EndpointContext(graph, nodes, nodes, torch.zeros(30, 3), (4, 3))
        for rule in RULES.values():
            found = rule(sites, torch.Generator().manual_seed(0))
            assert found.shape == (4, 3) and all(torch.unique(row).numel() == 3 for row in found)


@pytest.mark.parametrize(("name", "size"), [("ensemble", (20, 20)), ("ensemble-strong", (60, 40))])
def test_threats_by_name(name: str, size: tuple[int, int]) -> None:
    attack = make_attack(name, "explanation", k=3)
    assert isinstance(attack, EnsembleInjection) and attack.follows_gradients
    assert attack.objective.reads != "logits"
    assert (attack.budget.nodes, attack.budget.edges) == size


@pytest.mark.parametrize("objective", ["prediction", "explanation"])
def test_the_short_ensemble_is_a_part_of_the_whole(objective: str) -> None:
    budget = Budget(nodes=3, edges=4)
    short, whole = ShortEnsemble(budget, objective), EnsembleInjection(budget, objective)
    names = {member.name for member in short.members}
    assert 2 <= len(names) < len(whole.members) and names <= {member.name for member in whole.members}
    assert set(short.rules) < set(whole.rules) and short.budget.steps == 100
    assert max(member.steps for member in short.members) <= 100
