"""What sets each attack apart: where TDGIA joins, what DICE reads, how flips are relaxed, what stays."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fgai.attacks import (
    DICE,
    PRBCD,
    TDGIA,
    THREATS,
    Budget,
    PGDInjection,
    check_budget,
    draw_endpoints,
    make_attack,
)
from fgai.attacks.endpoints import _batch_endpoints, _defect_scores
from fgai.attacks.existing import (
    _attacker_labels,
    _Flips,
    _pyg_attack,
    _random_pairs,
    _reweighted,
    _same_label_pairs,
    _weighted_forward,
)
from fgai.attacks.injection import _smooth_prediction
from fgai.attention import AttentionMap, evaluating
from fgai.errors import BudgetError, InputError
from fgai.graph import Graph, GraphChange
from fgai.objectives import Clean, explanation, preserving
from fgai.sparse import Features, edge_keys
from support import attack_cases as cases
from support.forward import seen_by
from support.graph_cases import small_data


def prepared(name: str) -> tuple[Any, Graph]:
    model, graph = cases.trained(name, "vanilla"), cases.tiny_graph()
    return model, model.prepare(graph) if hasattr(model, "prepare") else graph  # type: ignore[operator]


def clean_view(name: str, targets: str = "test") -> tuple[Any, Graph, Clean]:
    model, graph = prepared(name)
    with evaluating(model), torch.no_grad():
        view = seen_by(model, graph)
    return model, graph, Clean(*view, Budget(targets=targets).target_nodes(graph))


class TestRemoval:
    """Edges that go: applied, counted and mapped."""

    def change(self) -> tuple[Graph, GraphChange]:
        graph = cases.tiny_graph()
        assert graph.test_mask is not None
        inside = _same_label_pairs(graph, graph.test_mask.nonzero().flatten(), torch.zeros(30))
        nodes = graph.test_mask.nonzero().flatten()
        free = [
            (a, b) for a in nodes.tolist() for b in nodes.tolist()
            if a < b and not torch.isin(torch.tensor((b << 32) | a), graph.keys)
        ]  # fmt: skip
        return graph, GraphChange(edges=torch.tensor(free[:3]).t(), removed=inside[:, :2])

    def test_edges_and_their_reverses_come_and_go(self) -> None:
        graph, change = self.change()
        attacked, edge_map = change.apply(graph)
        assert change.edges is not None and change.removed is not None
        both = [torch.cat([pairs, pairs.flip(0)], 1) for pairs in (change.edges, change.removed)]
        expected = set(graph.keys.tolist()) | set(edge_keys(*both[0]).tolist())
        assert set(attacked.keys.tolist()) == expected - set(edge_keys(*both[1]).tolist())
        assert torch.equal(graph.keys[edge_map.before], attacked.keys[edge_map.after])
        assert (edge_map.num_before, edge_map.num_after) == (graph.num_edges, attacked.num_edges)

    def test_both_count(self) -> None:
        graph, change = self.change()
        check_budget(change, Budget(edges=5), graph)
        with pytest.raises(BudgetError, match="added 3 edges and removed 2, allowed 4"):
            check_budget(change, Budget(edges=4), graph)
        with pytest.raises(BudgetError, match="allowed 0"):
            check_budget(change, Budget(nodes=2, edges=9), graph)

    def test_what_is_not_there_cannot_go(self) -> None:
        graph, change = self.change()
        with pytest.raises(BudgetError, match="3 of the removed edges are not there"):
            check_budget(GraphChange(removed=change.edges), Budget(edges=9), graph)
        loops = graph.add_self_loops()[0]
        node = Budget().target_nodes(graph)[:1]
        with pytest.raises(BudgetError, match="itself"):
            check_budget(GraphChange(removed=torch.stack([node, node])), Budget(edges=9), loops)

    @pytest.mark.parametrize("k", [1, 2])
    def test_the_explanation_objective_reads_the_edges_that_stay(self, k: int) -> None:
        model, graph, clean = clean_view("gat")
        attacked = self.change()[1].apply(graph)[0]
        with evaluating(model), torch.no_grad():
            logits, attention = seen_by(model, attacked)
        found = float(explanation(k)(logits, attention, clean))
        assert found == pytest.approx(looped_explanation(clean.attention, attention, k), rel=1e-4)


def looped_explanation(before: AttentionMap, after: AttentionMap, k: int) -> float:
    """Node by node; members and outsiders that are gone do not count."""
    layers = []
    for old, new in zip(before, after, strict=True):
        now = dict(zip(new.keys.tolist(), new.values.log().mean(1).tolist(), strict=True))
        shares = []
        for node in range(old.num_nodes):
            row = [e for e in range(old.num_edges) if int(old.destination[e]) == node]
            row.sort(key=lambda e: (-float(old.values[e].log().mean()), e))
            keys = [int(old.keys[e]) for e in row]
            if len(row) > k:
                out = sorted((now[key] for key in keys[k:] if key in now), reverse=True)
                inside = sorted(now[key] for key in keys[:k] if key in now)
                shares += [1 / (1 + math.exp(b - a)) for a, b in zip(out, inside, strict=False)]
        layers.append(sum(shares) / len(shares))
    return sum(layers) / len(layers)


class TestDICE:
    def test_equals_are_parted_and_others_joined(self) -> None:
        model, graph, clean = clean_view("gat")
        labels = _attacker_labels(graph, clean.logits)
        change = DICE(Budget(edges=9)).run(model, graph, seed=2).change
        assert change.edges is not None and change.removed is not None
        assert change.edges.shape == (2, 5) and change.removed.shape == (2, 4)
        assert bool((labels[change.edges[0]] != labels[change.edges[1]]).all())
        assert bool((labels[change.removed[0]] == labels[change.removed[1]]).all())

    def test_test_labels_are_not_read(self) -> None:
        model, graph = prepared("gat")
        assert graph.y is not None and graph.train_mask is not None
        other = graph.replace(y=torch.where(graph.train_mask, graph.y, (graph.y + 1) % 3))
        first, second = (DICE(Budget(edges=9)).run(model, g).graph.keys for g in (graph, other))
        assert torch.equal(first, second)

    def test_training_labels_are(self) -> None:
        _, graph, clean = clean_view("gat")
        assert graph.y is not None and graph.train_mask is not None
        labels = _attacker_labels(graph, clean.logits)
        assert torch.equal(labels[graph.train_mask], graph.y[graph.train_mask])
        assert torch.equal(labels[~graph.train_mask], clean.logits.argmax(1)[~graph.train_mask])

    def test_nothing_joins_where_all_look_alike(self) -> None:
        _, graph, clean = clean_view("gat")
        same = Clean(torch.zeros_like(clean.logits), clean.attention, clean.nodes)
        judge: Any = type("Judge", (), {"clean": same})()
        attack, draws = DICE(Budget(edges=6)), torch.Generator().manual_seed(0)
        (change,) = attack.candidates(graph.replace(y=None), clean.nodes, draws, judge, None)  # type: ignore[arg-type]
        assert change.edges is not None and change.edges.shape[1] == 0

    def test_small_graphs_are_refused(self) -> None:
        graph = cases.tiny_graph()
        with pytest.raises(InputError, match="class for every node"):
            _attacker_labels(graph, torch.zeros(4, 3))


class TestTDGIA:
    def test_scores_equal_the_formula(self) -> None:
        degree, p = torch.tensor([3.0, 8.0]), torch.tensor([0.9, 0.1])
        expected = [2.9 * (0.9 / 3 + 0.1 / math.sqrt(15)), 2.1 * (0.9 / 8 + 0.1 / math.sqrt(40))]
        graph = cast(Graph, SimpleNamespace(adjacency=SimpleNamespace(degree=degree), has_loops=True))
        torch.testing.assert_close(_defect_scores(graph, torch.arange(2), p, 5), torch.tensor(expected))

    def test_the_best_scored_are_joined_and_classes_are_mixed(self) -> None:
        _, graph, clean = clean_view("gat")
        draws = torch.Generator().manual_seed(0)
        found = _batch_endpoints(graph, clean.nodes, clean.logits, clean.logits, (2, 4), draws)
        assert found.shape == (2, 4) and found.unique().numel() == 8
        scores = {}
        for node in clean.nodes.tolist():
            p = float(clean.logits[node].softmax(0).max())
            degree = float((graph.adjacency.destination == node).sum())
            scores[node] = (2 + p) * (0.9 / degree + 0.1 / math.sqrt(4 * degree))
        best = sorted(scores, key=lambda node: -scores[node])[:8]
        assert set(found.flatten().tolist()) == set(best)
        label = clean.logits.argmax(1)
        counts = torch.stack([torch.bincount(label[row], minlength=3) for row in found])
        assert int((counts[0] - counts[1]).abs().max()) <= 1

    def test_smooth_loss_equals_a_loop(self) -> None:
        y, now = torch.randn(2, 11, 4, generator=torch.Generator().manual_seed(0)).double() * 3
        nodes = torch.tensor([1, 4, 5, 9])
        losses = []
        for node in nodes.tolist():
            own = int(y[node].argmax())
            loss = float(now[node].exp().sum().log() - now[node, own])
            losses.append(max(0.0, 4 - loss) ** 2)
        found = _smooth_prediction(now, AttentionMap(()), Clean(y, AttentionMap(()), nodes))
        assert float(found) == pytest.approx(-sum(losses) / 4)

    def test_nodes_come_in_batches_and_steps_are_shared(self) -> None:
        model, graph = prepared("gatv2")
        with cases.quiet():
            result = TDGIA(Budget(nodes=7, edges=3, steps=11, step_size=0.3)).run(model, graph)
        assert result.ledger.steps == 11
        assert result.change.endpoints is not None and result.change.endpoints.shape[0] in (2, 4, 6, 7)

    def test_few_targets_get_small_batches(self) -> None:
        model, graph = prepared("gat")
        with cases.quiet():
            result = TDGIA(Budget(nodes=6, edges=15, steps=6, step_size=0.3)).run(model, graph)
        assert result.ledger.steps == 6  # 15 targets: every batch is one node


class TestWeights:
    @pytest.mark.parametrize("name", cases.MODELS)
    def test_whole_weights_are_edges_that_are_there_or_not(self, name: str) -> None:
        model, graph, clean = clean_view(name)
        flips = _Flips(graph, clean.nodes)
        pairs = _random_pairs(clean.nodes.numel(), 20, torch.Generator().manual_seed(1))
        exact = flips.perturbation(pairs).apply(graph)[0]
        both = torch.cat([pairs, pairs.flip(0)], 1)
        local = torch.unique(torch.cat([edge_keys(*both), edge_keys(*flips.inside)]))
        local = torch.stack([local & 0xFFFFFFFF, local >> 32])
        weight = torch.isin(edge_keys(*flips.nodes[local]), exact.keys).float()
        with evaluating(model), torch.no_grad():
            expected, attention = seen_by(model, exact)
            logits, seen = _weighted_forward(model, *flips.weighted(local, weight))
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)
        for ours, theirs in zip(seen, attention, strict=True):
            torch.testing.assert_close(ours.restrict(theirs.keys).values, theirs.values, atol=1e-5, rtol=1e-4)
        assert torch.equal(flips.rounded(local, weight).keys, exact.keys)

    def test_own_models_and_pyg_models_weigh_alike(self) -> None:
        # The same weights, once inside the softmax and once after it.
        from fgai.ops import edge_softmax, weighted_softmax

        graph = small_data(nodes=19)
        draws = torch.Generator().manual_seed(4)
        scores = torch.randn(graph.num_edges, 3, generator=draws, dtype=torch.float64)
        weight = torch.rand(graph.num_edges, generator=draws, dtype=torch.float64).requires_grad_()
        inside = weighted_softmax(scores, weight, graph.adjacency)
        plain, ends = edge_softmax(scores, graph.adjacency), graph.edge_index
        after = _reweighted(graph.keys, weight, plain, *ends)
        torch.testing.assert_close(inside, after)
        pull = torch.randn(inside.shape, generator=draws, dtype=torch.float64)
        first, second = (torch.autograd.grad((w * pull).sum(), weight)[0] for w in (inside, after))
        torch.testing.assert_close(first, second)


class TestPRBCD:
    def test_options_stay_with_their_instance(self) -> None:
        shared = type(_pyg_attack(torch.nn.Identity(), 10)).coeffs
        before = dict(shared)
        first = _pyg_attack(torch.nn.Identity(), 10, max_final_samples=3, eps=0.5)
        second = _pyg_attack(torch.nn.Identity(), 10)
        assert (first.coeffs["max_final_samples"], first.coeffs["eps"]) == (3, 0.5)
        assert shared == before == second.coeffs

    def test_no_global_numbers_are_drawn(self) -> None:
        model, graph = prepared("gat")
        before = torch.get_rng_state()
        with cases.quiet():
            cases.attack(PRBCD).run(model, graph)
        assert torch.equal(before, torch.get_rng_state())

    def test_gradients_equal_a_dense_reference(self) -> None:
        # d objective / d weight, by finite differences on every candidate pair.
        model, graph, clean = clean_view("gat")
        model, features = copy.deepcopy(model).double(), graph.features
        assert features is not None
        graph = graph.replace(features=Features.dense(features.to_dense().double()))
        flips = _Flips(graph, clean.nodes[:6])
        pairs = torch.combinations(torch.arange(6)).t()
        both = torch.cat([pairs, pairs.flip(0)], 1)
        weight = torch.full((pairs.shape[1],), 0.4, dtype=torch.float64, requires_grad=True)

        def value(w: Tensor) -> Tensor:
            logits, _ = _weighted_forward(model, *flips.weighted(both, torch.cat([w, w])))
            return logits[clean.nodes].sum()

        with evaluating(model, freeze=True):
            assert torch.autograd.gradcheck(value, weight)

    @pytest.mark.parametrize("name", ["gat", "pyg"])
    def test_it_comes_close_to_the_best_single_flip(self, name: str) -> None:
        # One flip: every pair can be tried.
        model, graph, clean = clean_view(name)
        attack = PRBCD(Budget(edges=1, steps=6, step_size=5.0))
        with cases.quiet():
            result = attack.run(model, graph)
        flips = _Flips(graph, clean.nodes)
        values = []
        with evaluating(model), torch.no_grad():
            for pair in torch.combinations(torch.arange(clean.nodes.numel())):
                attacked = flips.perturbation(pair[:, None]).apply(graph)[0]
                values.append(float(attack.objective(*seen_by(model, attacked), clean)))
        values.sort()
        assert result.value <= values[-1] + 1e-5
        assert result.value >= values[-3] - 1e-5  # among the best 3 of 105

    def test_edges_come_and_go(self) -> None:
        model, graph = prepared("gat")
        with cases.quiet():
            change = PRBCD(Budget(edges=90, steps=1, step_size=5.0)).run(model, graph).change
        assert change.edges is not None and change.removed is not None
        assert change.edges.shape[1] > 0 and change.removed.shape[1] > 0

    def test_refusals(self) -> None:
        model, graph = prepared("gat")
        with pytest.raises(BudgetError, match="must be below 105, the pairs of 15 targets"):
            cases.attack(PRBCD, edges=105).run(model, graph)
        real = (graph.adjacency.source != graph.adjacency.destination).nonzero().flatten()
        one_way = graph.remove(real[:1])[0]
        everything = one_way.replace(test_mask=None)
        with pytest.raises(InputError, match="without a reverse"):
            _Flips(everything, torch.arange(30))

    @given(st.integers(5, 30), st.integers(0, 9), st.integers(0, 2**31))
    def test_random_pairs_are_distinct(self, count: int, wanted: int, seed: int) -> None:
        pairs = _random_pairs(count, wanted, torch.Generator().manual_seed(seed))
        assert pairs.shape == (2, wanted) and bool((pairs[0] < pairs[1]).all())
        assert torch.unique(edge_keys(*pairs)).numel() == wanted


class TestPreserving:
    @given(st.integers(0, 2**31 - 1), st.sampled_from([0.5, 0.75, 1.0]))
    @settings(max_examples=30, deadline=None)
    def test_value_equals_its_definition(self, seed: int, keep: float) -> None:
        _, _, clean = clean_view("gat")
        draws = torch.Generator().manual_seed(seed)
        logits = clean.logits + torch.randn(clean.logits.shape, generator=draws)
        found = preserving(2, keep)(logits, clean.attention, clean)
        same = (logits.argmax(1) == clean.logits.argmax(1))[clean.nodes].float().mean()
        expected = explanation(2)(logits, clean.attention, clean) if same >= keep else same - keep
        assert float(found) == pytest.approx(float(expected), abs=1e-6)

    def test_the_gradient_pushes_back_once_classes_go(self) -> None:
        _, _, clean = clean_view("gat")
        own = clean.logits.argmax(1)
        wrong = clean.logits.clone()
        wrong[clean.nodes, own[clean.nodes]] -= 20
        wrong.requires_grad_()
        (gradient,) = torch.autograd.grad(preserving(2)(wrong, clean.attention, clean), wrong)
        assert bool((gradient[clean.nodes, own[clean.nodes]] > 0).all())

    @pytest.mark.parametrize("keep", [0.0, 1.1, float("nan")])
    def test_a_share_is_a_share(self, keep: float) -> None:
        with pytest.raises(InputError, match="keep"):
            preserving(keep=keep)

    def test_classes_are_kept_where_that_is_possible(self) -> None:
        model, graph, clean = clean_view("gat")
        with cases.quiet():
            loose = cases.attack(PGDInjection, "explanation", steps=12, restarts=1).run(model, graph)
            tight = cases.attack(PGDInjection, "preserving", steps=12, restarts=1).run(model, graph)
        with evaluating(model), torch.no_grad():
            after = model(tight.graph)[clean.nodes].argmax(1)
        assert tight.value >= 0 and 0 < tight.ledger.feasible <= 1  # type: ignore[operator]
        assert float((after == clean.logits[clean.nodes].argmax(1)).float().mean()) >= 0.99
        assert tight.start < tight.value <= loose.value + 1e-6

    def test_a_share_of_ones_own_is_taken(self) -> None:
        mine = preserving(3, keep=0.6)
        assert PGDInjection(cases.INJECTION, mine).objective is mine
        threat = replace(THREATS["preserving"], objective=mine)
        assert make_attack(threat).objective is mine
        assert make_attack("preserving").objective.name == "preserving"

    def test_a_threat_with_its_own_objective_takes_no_other(self) -> None:
        with pytest.raises(InputError, match=r"'preserving' has the objective 'preserving'.*'margin'"):
            make_attack("preserving", "margin")


@pytest.mark.parametrize("name", ["preserving", "tdgia", "dice", "flips"])
def test_threats_by_name(name: str) -> None:
    threat = THREATS[name]
    attack = make_attack(name, targets="val", k=3)
    assert type(attack) is threat.attack and attack.budget.targets == "val"
    if threat.budget.nodes:  # the standard budget, with more steps
        assert (threat.budget.nodes, threat.budget.edges, threat.budget.box) == (20, 20, None)
    else:
        assert threat.budget.edges == 400


@given(st.integers(6, 60), st.integers(1, 5), st.integers(1, 12), st.integers(0, 2**31))
def test_endpoints_of_fewer_nodes_are_the_first_rows(pool: int, few: int, more: int, seed: int) -> None:
    nodes, each = torch.arange(pool) * 3, 3
    first, second = (
        draw_endpoints(nodes, count, each, torch.Generator().manual_seed(seed)) for count in (few, few + more)
    )
    assert torch.equal(first, second[:few])
