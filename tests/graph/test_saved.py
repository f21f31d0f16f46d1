"""Changes as files: what is read back is the same change, and nothing damaged or foreign is replayed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fgai.errors import CheckpointError
from fgai.graph import ChangeRecord, InjectedNode
from fgai.models import AttentionModel
from fgai.training import untrained_model
from support.graph_cases import listed, small_data

GRAPH = small_data()
MODEL: AttentionModel = untrained_model("GAT", GRAPH, hidden_channels=2, heads=3)
FIRST = next(edge for edge in listed(GRAPH) if edge[0] != edge[1])
ABSENT = next((0, n) for n in range(1, 40) if (0, n) not in listed(GRAPH) and (n, 0) not in listed(GRAPH))


def whole_change() -> ChangeRecord:
    return ChangeRecord.of(
        MODEL,
        GRAPH,
        3,
        removed_edges=[FIRST],
        added_edges=[ABSENT],
        injected=[
            InjectedNode(copy=5, strength=0.5, edges=[3, 7]),
            InjectedNode(typical=1, strength=1.0, edges=[3]),
            InjectedNode(features=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], strength=2.0, edges=[8, 3, 1]),
        ],
    )


def test_every_part_is_applied() -> None:
    changed = whole_change().apply(MODEL, GRAPH)
    pairs = {(min(e), max(e)) for e in listed(GRAPH) if e[0] != e[1]}
    pairs = (
        pairs - {(min(FIRST), max(FIRST))} | {ABSENT} | {(3, 40), (7, 40), (3, 41), (8, 42), (3, 42), (1, 42)}
    )
    edges = [edge for edge in listed(changed) if edge[0] != edge[1]]
    assert {tuple(sorted(edge)) for edge in edges} == pairs and len(edges) == 2 * len(pairs)
    assert changed.features is not None and GRAPH.features is not None
    x, old = changed.features.to_dense(), GRAPH.features.to_dense()
    assert GRAPH.y is not None and GRAPH.train_mask is not None
    mean = old[(GRAPH.y == 1) & GRAPH.train_mask].mean(0)
    torch.testing.assert_close(x[:40], old)
    torch.testing.assert_close(x[40:], torch.stack([old[5] / 2, mean, 2 * torch.arange(1.0, 7.0)]))


def test_a_file_holds_the_same_change_with_and_without_a_checksum(tmp_path: Path) -> None:
    change = whole_change()
    assert ChangeRecord.load(change.save(tmp_path / "change.json")) == change
    (tmp_path / "page.json").write_text(json.dumps(change.to_dict()))
    assert ChangeRecord.load(tmp_path / "page.json") == change
    with pytest.raises(CheckpointError, match="damaged"):
        text = (tmp_path / "change.json").read_text()
        (tmp_path / "change.json").write_text(text.replace('"node": 3', '"node": 4'))
        ChangeRecord.load(tmp_path / "change.json")


def edited(edit: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(whole_change().to_dict()))
    edit(values)
    return values


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda v: v.update(model="0" * 64), "another model"),
        (lambda v: v.update(graph="0" * 32), "another graph"),
        (lambda v: v.update(node=40), "names node 40"),
        (lambda v: v["added_edges"].append([3, 40]), "names node 40"),
        (lambda v: v["removed_edges"].append([3, -1]), "names node -1"),
        (lambda v: v["injected"][0].update(copy=40), "names node 40"),
        (lambda v: v["injected"][1].update(edges=[40]), "names node 40"),
        (lambda v: v["injected"][1].update(edges=[]), "distinct edges"),
        (lambda v: v["injected"][1].update(edges=[3, 3]), "distinct edges"),
        (lambda v: v["injected"][1].update(typical=3), "class 3"),
        (lambda v: v["injected"][1].update(copy=3), "one of"),
        (lambda v: v["injected"][1].pop("typical"), "one of"),
        (lambda v: v["injected"][2]["features"].pop(), "6 finite features, got 5"),
        (lambda v: v["injected"][2].update(features=["1"] * 6), "must be a number"),
        (lambda v: v["injected"][2].update(strength=float("inf")), "finite"),
        (lambda v: v["injected"][2].update(strength=1e308), "finite"),
        (lambda v: v["injected"][2].update(strength=10**400), "finite"),
        (lambda v: v["injected"][2].update(features=[10**400] * 6), "finite"),
        (lambda v: v["injected"][1].update(typical=10**30), "no training nodes"),
        (lambda v: v["injected"][1].update(typical=-1), "class -1"),
        (lambda v: v["injected"][2].update(color="red"), "color"),
        (lambda v: v["added_edges"].append([ABSENT[1], ABSENT[0]]), "twice"),
        (lambda v: v["added_edges"].append([5, 5]), "two nodes"),
        (lambda v: v["added_edges"].append([5]), "two nodes"),
        (lambda v: v["removed_edges"].append([0, 39]), "not there"),
        (lambda v: v.update(removed_edges=[], added_edges=[FIRST]), "is there"),
        (lambda v: v.update(node="3"), "whole number"),
        (lambda v: v.pop("injected"), "lacks injected"),
        (lambda v: v.update(schema=2), "newer"),
        (lambda v: v.update(kind="evaluation"), "kind"),
    ],
)
def test_nothing_foreign_or_damaged_is_replayed(edit: Callable[[dict[str, Any]], Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        ChangeRecord.from_dict(edited(edit)).apply(MODEL, GRAPH)


def test_another_models_weights_are_refused() -> None:
    other = untrained_model("GAT", GRAPH, hidden_channels=2, heads=3, seed=1)
    with pytest.raises(CheckpointError, match="another model"):
        whole_change().apply(other, GRAPH)
