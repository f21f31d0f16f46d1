"""What Python answers: the receptive field gives what the whole graph gives; errors; the widget."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch_geometric.nn import GATConv

import fgai
from fgai.attention import observe, prepared
from fgai.errors import InputError, MissingExtraError
from fgai.graph import ChangeRecord, Graph
from fgai.reports.whatif import WhatIf
from fgai.reports.whatif.answer import certified_neighbours
from fgai.training import limit, untrained_model
from support.graph_cases import small_data
from support.whatif_cases import random_change

GRAPH = small_data()
SPARSE = torch.zeros(40, 700).index_put((torch.arange(40), 17 * torch.arange(40)), torch.arange(40.0) + 2)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = GATConv(6, 4, heads=2), GATConv(8, 3)

    def forward(self, x: Any, edge_index: Any) -> Any:
        return self.last(self.first(x, edge_index).relu(), edge_index)


@pytest.mark.parametrize("kind", ["GAT", "GATv2", "GT", "GCN", "own", "sparse"])
def test_it_is_the_answer_of_a_full_pass(kind: str) -> None:
    graph = GRAPH
    if kind == "sparse":
        graph = Graph.from_edges(GRAPH.edge_index, 40, SPARSE, y=GRAPH.y, train_mask=GRAPH.train_mask)
        assert graph.features is not None and graph.features.is_sparse
    torch.manual_seed(0)
    model = Own() if kind == "own" else untrained_model("GAT" if kind == "sparse" else kind, graph)
    answers, rng = WhatIf({"model": model}, graph), np.random.default_rng(1)
    for _ in range(5):
        change = random_change(graph, model, rng)
        before, after = answers.view("model", change)
        for answer, whole in (
            (before, answers._base(model)),
            (after, change.apply(model, answers._base(model))),
        ):
            seen = observe(model, prepared(model, whole))
            torch.testing.assert_close(torch.tensor(answer.logits), seen.logits[change.node])
            for layer, ours in zip(seen.attention.layers, answer.layers, strict=True):
                row = slice(*layer.rowptr[change.node : change.node + 2].tolist())
                assert layer.source[row].tolist() == ours["neighbours"]
                shares = torch.tensor(ours["explanation"], dtype=torch.float64)
                torch.testing.assert_close(shares, layer.explanation()[row], rtol=1e-5, atol=1e-6)


def test_a_transformer_keeps_its_encodings() -> None:
    model = untrained_model("GT", GRAPH)
    base = WhatIf(model, GRAPH)._base(model)
    assert base.positional is not None
    changed = ChangeRecord.of(model, GRAPH, 3, added_edges=[[3, 39]]).apply(model, base)
    assert torch.equal(prepared(model, changed).positional, base.positional)


def test_the_worst_node_lowers_the_margin() -> None:
    model = untrained_model("GATv2", GRAPH)
    answers, values = WhatIf(model, GRAPH), {"node": 3, "removed_edges": [], "added_edges": []}
    for injected in ([], [{"copy": 5, "strength": 2.0, "edges": [3]}]):
        worst = {"features": answers.worst({**values, "injected": injected}), "strength": 1.0, "edges": [3]}
        random = {"features": [0.5] * 6, "strength": 1.0, "edges": [3]}
        (clean,), (harmed,), (other,) = (
            answers.views({**values, "injected": [*injected, *more]}) for more in ([], [worst], [random])
        )
        label = int(np.argmax(clean["after"]["logits"]))

        def margin(view: Any, label: int = label) -> float:
            logits = view["after"]["logits"]
            return logits[label] - max(value for c, value in enumerate(logits) if c != label)

        assert margin(harmed) < min(margin(clean), margin(other))


def test_badges_are_those_of_the_certificates() -> None:
    limited = limit(untrained_model("GAT", GRAPH), GRAPH, 0.2, shrink=0.5)
    assert WhatIf(untrained_model("GAT", GRAPH), GRAPH).certify() == {} and certified_neighbours([]) is None
    (most,) = WhatIf(limited, GRAPH).certify().values()
    ones = fgai.certify_injection(limited, GRAPH, neighbours=1, where="direct").certified
    assert [value > 0 for value in most] == ones.tolist()


def test_bad_arguments_are_named() -> None:
    model = untrained_model("GAT", GRAPH)
    with pytest.raises(InputError, match="at least one model"):
        WhatIf({}, GRAPH)
    with pytest.raises(InputError, match="whose nodes are classified"):
        WhatIf(model, Graph.from_edges(GRAPH.edge_index, 40, y=GRAPH.y))
    with pytest.raises(InputError, match=r"0\.\.39, got 40"):
        WhatIf(model, GRAPH).facts(node=40)


def test_the_widget_answers_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "anywidget", None)
    model = untrained_model("GT", GRAPH)
    with pytest.raises(MissingExtraError, match=r"fgai\[notebook\]"):
        fgai.explore(model, GRAPH)
    monkeypatch.undo()
    pytest.importorskip("anywidget")
    widget = fgai.explore(model, GRAPH, node=3)
    sent: list[Any] = []
    monkeypatch.setattr(widget, "send", sent.append)
    assert "export default" in widget._esm and ".whatif" in widget._css and widget.facts["start"] == 3
    change = {"node": 3, "removed_edges": [], "added_edges": [], "injected": []}
    for number, question in enumerate(("view", "delete")):
        widget._handle_custom_msg({"id": number, "question": question, "change": change}, [])
    widget._handle_custom_msg({"id": 2, "question": "view", "change": {**change, "node": 40}}, [])
    assert sent[0] == {"id": 0, "answer": WhatIf(model, GRAPH).views(change)}
    assert "delete" in sent[1]["error"] and "node 40" in sent[2]["error"]
