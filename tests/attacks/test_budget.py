"""What attacks refuse: impossible budgets, overspending, outputs that are not finite."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fgai.attacks import DEFAULT, THREATS, Attack, Budget, PGDInjection, RandomEdges, make_attack
from fgai.errors import BudgetError, InputError
from fgai.graph import GraphChange
from support import attack_cases as cases


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nodes": -1}, "nodes"),
        ({"edges": -2}, "edges"),
        ({"steps": -1}, "steps"),
        ({"step_size": -0.1}, "step_size"),
        ({"step_size": float("nan")}, "step_size"),
        ({"radius": -1.0}, "radius"),
        ({"rows": 1.5}, "share"),
        ({"restarts": 0}, "restarts"),
        ({"box": (1.0, 1.0)}, "low < high"),
        ({"box": (float("nan"), 1.0)}, "low < high"),
        ({"targets": "train"}, "targets"),
    ],
)
def test_impossible_budgets_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BudgetError, match=message):
        Budget(**fields)


def test_more_edges_than_targets_are_refused() -> None:
    with pytest.raises(BudgetError, match="lower `edges`"):
        cases.attack(PGDInjection, edges=29).run(cases.trained("gat", "vanilla"), cases.tiny_graph())


def test_more_nodes_than_the_graph_are_refused_from_a_thousand_on() -> None:
    graph = cases.tiny_graph()
    with pytest.raises(BudgetError, match=f"at most 1000 or .*, {graph.num_nodes}, got 1001"):
        cases.attack(PGDInjection, nodes=1001).run(cases.trained("gat", "vanilla"), graph)


def test_more_new_edges_than_free_pairs_are_refused() -> None:
    with pytest.raises(BudgetError, match="free pairs"):
        cases.attack(RandomEdges, edges=10_000).run(cases.trained("gat", "vanilla"), cases.tiny_graph())


def test_an_empty_target_set_is_refused() -> None:
    graph = cases.tiny_graph()
    with pytest.raises(BudgetError, match="no test nodes"):
        cases.attack(PGDInjection).run(
            cases.trained("gat", "vanilla"),
            graph.replace(test_mask=torch.zeros(graph.num_nodes, dtype=torch.bool)),
        )


def test_a_box_that_excludes_the_data_is_refused() -> None:
    with pytest.raises(BudgetError, match="must overlap"):
        cases.attack(PGDInjection, box=(50.0, 60.0)).run(cases.trained("gat", "vanilla"), cases.tiny_graph())


def test_unknown_threats_and_objectives_are_refused() -> None:
    with pytest.raises(InputError, match="did you mean 'standard'"):
        make_attack("standrad")
    with pytest.raises(InputError, match="objective"):
        make_attack("standard", "accuracy")


def test_outputs_that_are_not_finite_are_refused() -> None:
    model = copy.deepcopy(cases.trained("gat", "vanilla"))
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(InputError, match="must be finite"):
        cases.attack(PGDInjection).run(model, cases.tiny_graph())


class Overspends(Attack):
    """Proposes whatever it was told to."""

    name = "overspends"
    proposal = GraphChange()

    def candidates(self, graph, nodes, generator, judge, ledger):  # type: ignore[no-untyped-def]
        ledger.steps += 1
        yield self.proposal


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t, o: GraphChange(endpoints=t[:8].view(4, 2), features=torch.zeros(4, 6)), "injected 4"),
        (lambda t, o: GraphChange(endpoints=t[:5].view(1, 5), features=torch.zeros(1, 6)), "injected 1 × 5"),
        (lambda t, o: GraphChange(endpoints=o[:2].view(1, 2), features=torch.zeros(1, 6)), "outside"),
        (lambda t, o: GraphChange(endpoints=t[:2].view(1, 2), features=torch.full((1, 6), 50.0)), "box"),
        (
            lambda t, o: GraphChange(endpoints=t[:2].view(1, 2), features=torch.full((1, 6), float("nan"))),
            "box",
        ),
        (lambda t, o: GraphChange(edges=t[:2].view(2, 1)), "edges"),
        (lambda t, o: GraphChange(removed=t[:2].view(2, 1)), "removed 1"),
        (lambda t, o: GraphChange(removed=torch.stack([t[:1], o[:1]])), "outside"),
        (lambda t, o: GraphChange(rows=t[:1], delta=torch.full((1, 6), 0.5)), "moved"),
        (lambda t, o: GraphChange(rows=t[:9], delta=torch.full((9, 6), 0.01)), "nodes' features"),
        (lambda t, o: GraphChange(rows=o[:1], delta=torch.full((1, 6), 0.01)), "outside"),
        (lambda t, o: GraphChange(endpoints=t[:2].view(1, 2), features=torch.zeros(1, 6)), "steps"),
    ],
)
def test_no_attack_overspends(make: Any, message: str) -> None:
    graph = cases.tiny_graph()
    budget = Budget(nodes=3, edges=4, radius=0.1, rows=0.1)
    attack = Overspends(budget)
    assert graph.test_mask is not None
    attack.proposal = make(graph.test_mask.nonzero().flatten(), (~graph.test_mask).nonzero().flatten())
    with pytest.raises(BudgetError, match=message):
        attack.run(cases.trained("gat", "vanilla"), graph)


def test_the_threats_are_those_of_the_protocol() -> None:
    protocol = {"ensemble", "ensemble-strong", "standard", "strong", "random", "edges", "modify", "values"}
    assert next(iter(THREATS)) == DEFAULT == "ensemble-short" and protocol <= set(THREATS)
    for weak, better in (("standard", "ensemble"), ("strong", "ensemble-strong")):
        one, two = THREATS[weak].budget, THREATS[better].budget
        assert (one.nodes, one.edges, one.box) == (two.nodes, two.edges, two.box)
    standard, strong = THREATS["standard"].budget, THREATS["strong"].budget
    assert (standard.nodes, standard.edges, standard.box) == (20, 20, None)
    assert (standard.steps, standard.step_size, standard.restarts) == (10, 0.1, 1)
    assert (strong.nodes, strong.edges, strong.steps, strong.step_size, strong.restarts) == (
        60,
        40,
        50,
        0.05,
        3,
    )
    assert THREATS["random"].budget.box is None and THREATS["random"].budget.steps == 0
    assert (THREATS["edges"].budget.edges, THREATS["edges"].budget.nodes) == (400, 0)
    modify = THREATS["modify"].budget
    assert (modify.rows, modify.radius, modify.steps, modify.step_size) == (0.05, 0.1, 10, 0.01)
