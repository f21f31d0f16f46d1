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


def test_without_a_test_mask_all_nodes_are_scored() -> None:
    record = record_of("gat", graph=cases.tiny_graph().replace(test_mask=None), per_node=True)
    assert record.node_values("scored").all()


def test_the_model_is_left_as_it_was_also_when_the_evaluation_fails() -> None:
    model = copy.deepcopy(cases.trained("gat", "vanilla")).train()
    empty = torch.zeros(30, dtype=torch.bool)
    with pytest.raises(BudgetError, match="no test nodes"):
        evaluate(model, cases.tiny_graph().replace(test_mask=empty), THREAT)
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    with pytest.raises(InputError, match="not finite"), cases.quiet():
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
