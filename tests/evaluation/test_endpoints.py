"""Records of an ensemble: what it reached at random and at chosen endpoints; intruders beside overlap."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fgai.attacks import Ledger, Threat, weak_search_note
from fgai.attention import observe
from fgai.evaluation import EvaluationRecord
from fgai.evaluation.record import _explanation_table, _prediction_table
from fgai.evaluation.run import damage_by_endpoints
from fgai.reports.words import attack_words
from support import attack_cases as cases
from support.evaluate_cases import THREAT, record_of, tiny_threat, whole_record

SMALL = Threat("small", cases.SmallEnsemble, cases.BUDGETS[cases.SmallEnsemble], "3 nodes × 4 edges")


@cache
def ensemble_record() -> EvaluationRecord:
    """A twin under a small ensemble; shared, so no test may change it."""
    vanilla, model = cases.trained("gat", "vanilla"), cases.trained("gat", "faithful")
    return record_of(model, SMALL, vanilla=vanilla, nulls=True)


def headings(record: EvaluationRecord) -> list[str]:
    tables = (_prediction_table([record], record), _explanation_table([record], record))
    return [column.heading for table in tables for column in table.columns]


def test_both_sets_of_endpoints_are_shown_and_the_worst_counts() -> None:
    record = ensemble_record()
    ends = [record.value(f"f1.attacked_{name}") for name in ("random", "chosen")]
    assert record.value("f1.attacked") == pytest.approx(min(ends))
    lost = record.value("lost.explanation")
    assert set(lost) == {"random", "cover", "chosen"} and lost["chosen"] == lost["cover"]
    assert max(lost.values()) == pytest.approx(max(record.ledgers["explanation"]["damages"]))
    shown = headings(record)
    for heading in ("F1 random ends ↑", "F1 chosen ends ↑", "lost, random ends ↓", "lost, chosen ends ↓"):
        assert heading in shown


def test_explanations_are_compared_at_endpoints_that_every_model_meets() -> None:
    """Whichever endpoints win against a model, kept and intruders are of the rule `cover`."""
    graph, models = cases.tiny_graph(), [cases.trained(name, "vanilla") for name in ("gat", "gatv2")]
    records = [record_of(model, SMALL) for model in models]
    for attack in ("prediction", "explanation"):
        nodes = []
        for record, model in zip(records, models, strict=True):
            for rule in ("random", "cover"):
                kept = record.value(f"endpoints.{rule}.{attack}.overlap.all")
                if attack == "explanation":
                    assert 1 - kept == pytest.approx(record.value(f"lost.explanation.{rule}"), abs=1e-9)
            assert kept == record.value(f"overlap_touched.{attack}.all")
            assert record.value(f"endpoints.cover.{attack}.intruders.mass.all") == record.value(
                f"intruders.{attack}.mass.all"
            )
            with cases.quiet():
                result = SMALL.attack(SMALL.budget, attack, k=cases.K).run(model, graph)
            nodes.append(result.by_rule["cover"].endpoints.flatten().sort().values)
        assert torch.equal(*nodes)
        assert records[0].value("touched.layers") == records[1].value("touched.layers")


def test_records_of_other_attacks_read_and_print_as_before() -> None:
    record = whole_record()
    assert set(record.value("f1")) == {"clean", "attacked", "attacked_explanation", "chance"}
    assert record.get("lost") is None
    assert not [heading for heading in headings(record) if "ends" in heading]


def test_noise_has_random_endpoints_in_every_restart() -> None:
    rows = [{"endpoints": rule} for rule in ("random", "cover", "random", "cover")]
    ledger = Ledger(members=rows, damages=[0.9, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert damage_by_endpoints(ledger) == {"random": 0.9, "cover": 0.5, "chosen": 0.5}
    assert damage_by_endpoints(Ledger(damages=[0.1, 0.2])) == {}


@pytest.mark.parametrize("attack", ["prediction", "explanation"])
def test_intruders_equal_a_loop(attack: str) -> None:
    record, model = record_of(), cases.trained("gat", "vanilla")
    with cases.quiet():
        made = THREAT.attack(THREAT.budget, attack, k=cases.K).run(model, cases.tiny_graph())
    for place, layer in enumerate(observe(model, made.graph).averaged().attention):
        found: dict[str, list[float]] = {"nodes": [], "places": [], "mass": []}
        for node in range(30):
            row = (layer.destination == node).nonzero().flatten().tolist()
            new = {e for e in row if int(layer.source[e]) >= 30}
            if new:
                top = sorted(row, key=lambda e: (-float(layer.values[e]), e))[: cases.K]
                found["nodes"].append(float(bool(new & set(top))))
                found["places"].append(len(new & set(top)) / len(top))
                found["mass"].append(float(layer.values[sorted(new)].sum()))
        for name, values in found.items():
            told = record.value(f"intruders.{attack}.{name}.layers")[place]
            assert told == pytest.approx(torch.tensor(values).mean().item(), abs=1e-5)


def test_intruders_stand_beside_overlap_with_null_rows() -> None:
    record = ensemble_record()
    assert {"intruded ↓", "their mass ↓", "intruded, expl. ↓", "their mass, expl. ↓"} <= set(headings(record))
    assert 0 < record.value("null.uniform.intruders.mass.all") < 1
    assert record.get("null.random.intruders.mass") is None


def test_without_new_nodes_there_are_no_intruders() -> None:
    record = record_of(threat=tiny_threat("edges"))
    assert record.value("intruders.prediction.mass.all") is None
    assert not [heading for heading in headings(record) if "intruded" in heading]


def test_weak_searches_are_called_so() -> None:
    weak = record_of(threat=Threat("standard", THREAT.attack, THREAT.budget, "as the paper's"))
    assert str(weak) == weak.to_markdown()
    for text in (weak.to_markdown(), attack_words(weak.to_dict())):
        assert weak_search_note("standard") in text
    strong = ensemble_record()
    assert "for a claim" not in strong.to_markdown()
    named = {**strong.to_dict(), "threat": {**strong.threat, "name": "ensemble", "budget": {"nodes": 2}}}
    assert "in every way there is" in attack_words(named)
