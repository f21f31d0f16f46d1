"""What `evaluate` and `compare` take, and what they refuse."""

from __future__ import annotations

import copy

import pytest
import torch

import fgai
from fgai.errors import AttentionError, BudgetError, InputError
from fgai.evaluation import compare, evaluate
from support import attack_cases as cases
from support.evaluate_cases import THREAT, record_of


def test_pyg_data_is_as_good_as_a_graph() -> None:
    graph = cases.tiny_graph()
    record = record_of("pyg", graph=graph.to_data())
    assert record.metrics == record_of("pyg").metrics
    assert record.data["fingerprint"] == fgai.datasets.fingerprint(graph)


def test_a_graph_without_labels_is_measured_without_scores() -> None:
    record = record_of(
        "gat", graph=cases.tiny_graph().replace(y=None), curves=True, nulls=True, per_node=True
    )
    assert record.value("f1") == {}
    assert record.get("f_slope") is None and record.get("null.uniform.f_slope") is None
    assert record.value("g_jsd.all") > 0
    assert "label" not in record.per_node
    record.to_markdown()


def test_without_a_test_mask_all_nodes_are_scored_and_a_warning_says_so() -> None:
    record = record_of("gat", graph=cases.tiny_graph().replace(test_mask=None), per_node=True)
    assert record.node_values("scored").all()
    told = [entry["message"] for entry in record.warnings if entry["code"] == "no-split"]
    assert len(told) == 1 and "no `test_mask`: all 30 nodes are attacked and scored" in told[0]
    assert not [entry for entry in record_of("gat").warnings if entry["code"] == "no-split"]


def test_small_graphs_take_a_smaller_budget_by_name() -> None:
    graph, model = cases.tiny_graph(), cases.trained("gat", "vanilla")
    few = graph.replace(test_mask=torch.arange(30) < 6)
    with pytest.raises(BudgetError, match="at most 6, the number of test nodes to join"):
        evaluate(model, few, "random", k=2)
    with cases.quiet():
        record = compare({"GAT": model}, few, "standard", nodes=2, edges=3, k=2, curves=False)["GAT"]
        found = fgai.explain(model, few, 0, nodes=2, edges=3, k=2, certificate=False)
        page = fgai.report({"GAT": model}, few, nodes=2, edges=3, k=2)
    assert (record.threat["name"], record.threat["budget"]["nodes"], record.threat["budget"]["edges"]) == (
        "standard", 2, 3
    )  # fmt: skip
    assert "threat standard (nodes=2, edges=3), test nodes" in record.to_markdown()
    assert found.attacked is not None and page.records[0]["threat"]["budget"]["edges"] == 3
    with pytest.raises(InputError, match="'edges' has no `nodes` to change"):
        evaluate(model, few, "edges", nodes=2)
    with pytest.raises(InputError, match="`edges` must be at least 1"):
        evaluate(model, few, edges=0)


@pytest.mark.parametrize("models", [[1], cases.tiny_graph()])
def test_models_without_names_are_refused(models: object) -> None:
    with pytest.raises(InputError, match=r"at least one model by name, as \{'GAT': model\}, got"):
        compare(models, cases.tiny_graph())
    with pytest.raises(InputError, match="by name"):
        fgai.report(models, cases.tiny_graph())


def test_labels_that_begin_at_one_are_named_as_the_cause() -> None:
    graph = cases.tiny_graph()
    model, shifted = fgai.GAT.for_data(graph), graph.replace(y=graph.y + 1)
    words = "labels begin at 1, classes are counted from 0: use `y - 1`"
    with pytest.raises(InputError, match=words):
        evaluate(model, shifted, THREAT)
    with pytest.raises(InputError, match=words):
        fgai.train(model, shifted, epochs=1)


def test_the_model_is_left_as_it_was_also_when_the_evaluation_fails() -> None:
    model = copy.deepcopy(cases.trained("gat", "vanilla")).train()
    empty = torch.zeros(30, dtype=torch.bool)
    with pytest.raises(BudgetError, match="no test nodes"):
        evaluate(model, cases.tiny_graph().replace(test_mask=empty), THREAT)
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    with pytest.raises(InputError, match="must be finite"), cases.quiet():
        evaluate(model, cases.tiny_graph(), THREAT, k=2)
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_without_attention_is_refused() -> None:
    from torch_geometric.nn import GCN

    graph = cases.tiny_graph()
    with pytest.raises(AttentionError, match="no attention layer"):
        evaluate(GCN(graph.num_features, 4, 2, graph.num_classes), graph, THREAT)


def test_bad_input_is_refused() -> None:
    model, graph = cases.trained("gat", "vanilla"), cases.tiny_graph()
    with pytest.raises(InputError, match="`k` must be at least 1"):
        evaluate(model, graph, THREAT, k=0)
    with pytest.raises(InputError, match="targets"):
        evaluate(model, graph, THREAT, targets="train")
    with pytest.raises(InputError, match="did you mean 'standard'"):
        evaluate(model, graph, "standart")
    with pytest.raises(InputError, match="at least one model"):
        compare({}, graph)
    with pytest.raises(InputError, match="`vanilla` must be one of GAT"):
        compare({"GAT": model}, graph, THREAT, vanilla="GT")
    links = fgai.GAT.for_data(graph, task="link")
    with pytest.raises(InputError, match="holds a node task"):
        evaluate(links, graph, THREAT)
    narrow = fgai.GAT(graph.num_features, 2)
    with pytest.raises(InputError, match=r"logits \[30, 3\]"):
        evaluate(narrow, graph, THREAT)
