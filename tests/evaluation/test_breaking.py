"""How few nodes are enough, and what happens to nodes that keep their class."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from fgai.attacks import DICE, PRBCD, THREATS, Budget, PGDInjection, Threat
from fgai.cli.app import app
from fgai.errors import InputError
from fgai.evaluation import breaking_point, evaluate
from fgai.evaluation.breaking import bisect_below
from fgai.metrics import same_class_changed, same_class_share
from support import attack_cases as cases
from support.task_cases import batch_of_graphs

TINY = Threat("tiny", PGDInjection, Budget(nodes=2, edges=3, steps=3, step_size=0.3), "for tests")
EDGES = {
    "dice": Threat("dice-7", DICE, Budget(edges=7), "for tests"),
    "flips": Threat("flips-7", PRBCD, Budget(edges=7, steps=2, step_size=50.0), "for tests"),
}


@given(st.integers(1, 40), st.integers(1, 40))
def test_a_falling_measure_gives_the_first_number_below(first: int, limit: int) -> None:
    found, seen = bisect_below(lambda n: 0.2 if n >= first else 0.9, 0.5, limit)
    assert found == (first if first <= limit else None)
    assert len(seen) <= 2 * math.log2(limit) + 2
    assert max(seen) <= limit


@given(st.lists(st.sampled_from([0.1, 0.9, float("nan")]), min_size=1, max_size=30))
def test_any_measure_is_crossed_where_it_says(values: list[float]) -> None:
    found, seen = bisect_below(lambda n: values[n - 1], 0.5, len(values))
    assert all(seen[n] == values[n - 1] or seen[n] != seen[n] for n in seen)
    if found is None:
        assert not any(value < 0.5 for value in seen.values())
    else:
        assert seen[found] < 0.5
        assert found == 1 or (found - 1 in seen and not seen[found - 1] < 0.5)


def test_breaking_point_on_a_model() -> None:
    model, graph = cases.trained("gat", "vanilla"), cases.tiny_graph()
    with cases.quiet():
        found = breaking_point(model, graph, TINY, threshold=0.999, limit=4, k=2, seed=1)
        again = breaking_point(model, graph, TINY, threshold=0.999, limit=4, k=2, seed=1)
        never = breaking_point(model, graph, TINY, threshold=1e-9, limit=3, k=2, seed=1)
    assert found.nodes is not None and found.overlap[found.nodes] < 0.999
    assert found.overlap == again.overlap and (found.edges, found.threat) == (3, "tiny")
    assert never.nodes is None and sorted(never.overlap) == [1, 2, 3]
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["nodes"] == found.nodes and set(values["overlap"]) == {str(n) for n in found.overlap}
    found.show()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threat": "edges"}, "injects nodes"),
        ({"threat": "mild"}, "threat"),
        ({"threshold": 0.0}, "threshold"),
        ({"threshold": 1.5}, "threshold"),
        ({"limit": 0}, "limit"),
        ({"targets": "fit"}, "targets"),
    ],
)
def test_breaking_point_refuses(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        breaking_point(cases.trained("gat", "vanilla"), cases.tiny_graph(), **options)  # type: ignore[arg-type]


def test_breaking_point_is_for_node_tasks() -> None:
    with pytest.raises(InputError, match=r"for node tasks, .* holds a graph task"):
        breaking_point(cases.trained("gat", "vanilla"), batch_of_graphs())


def test_every_threat_is_listed_without_a_model() -> None:
    result = CliRunner().invoke(app, ["attack", "--list"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for name in THREATS:
        assert name in result.output


def test_same_class_equals_a_loop() -> None:
    draws = torch.Generator().manual_seed(0)
    count, layers = 23, 3
    overlap = torch.randint(0, 3, (layers, count), generator=draws).double() / 2
    overlap[torch.rand(layers, count, generator=draws) < 0.2] = float("nan")
    touched = list(torch.rand(layers, count, generator=draws) < 0.7)
    before = torch.randn(count, 4, generator=draws)
    after = torch.cat([before + torch.randn(count, 4, generator=draws), torch.zeros(2, 4)])
    nodes = torch.randperm(count, generator=draws)[:15]
    scored = torch.zeros(count, dtype=torch.bool).index_fill_(0, nodes, True)
    same = before.argmax(1) == after[:count].argmax(1)
    stayed = [int(before[i].argmax()) == int(after[i].argmax()) for i in range(count)]
    for layer in range(layers):
        rows = [i for i in nodes.tolist() if touched[layer][i] and overlap[layer, i] == overlap[layer, i]]
        changed = [stayed[i] and float(overlap[layer, i]) < 1 for i in rows]
        found = same_class_changed(overlap[layer], same, nodes=scored & touched[layer])
        assert found == pytest.approx(sum(changed) / len(rows))
    assert same_class_share(before[nodes], after[nodes]) == pytest.approx(
        sum(stayed[i] for i in nodes.tolist()) / 15
    )


def test_same_class_without_reach_is_undefined() -> None:
    nothing = torch.zeros(5, dtype=torch.bool)
    assert math.isnan(same_class_changed(torch.ones(5).double(), ~nothing, nodes=nothing))


def test_evaluate_runs_an_attack_with_its_own_objective_once() -> None:
    model, graph = cases.trained("gat", "vanilla"), cases.tiny_graph()
    threat = Threat("kept", PGDInjection, cases.INJECTION, "for tests", objective="preserving")
    with cases.quiet():
        record = evaluate(model, graph, threat, k=2, curves=False, nulls=False)
    assert record.ledgers["prediction"] == record.ledgers["explanation"]
    assert record.ledgers["prediction"]["feasible"] is not None
    assert record.value("same_class.explanation.kept") >= 0.99
    assert 0 <= record.value("same_class.prediction.changed.all") <= 1


@pytest.mark.many
@pytest.mark.parametrize(("name", "model"), [("flips", "gat"), ("dice", "gt"), ("dice", "pyg")])
def test_evaluate_where_edges_go(name: str, model: str) -> None:
    with cases.quiet():
        record = evaluate(
            cases.trained(model, "vanilla"), cases.tiny_graph(), EDGES[name], k=2, nulls=name == "flips"
        )
    assert 0 <= record.value("overlap_touched.prediction.all") <= 1
    assert record.get("f_slope.node.attacked.gap") is not None
    assert record.threat["budget"]["edges"] == 7
