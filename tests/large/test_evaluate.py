"""Evaluation of stored graphs: the numbers of whole graphs in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import fgai
from fgai import metrics
from fgai.attention import observe, prepared
from fgai.errors import DataError, FgaiError, InputError, ReliabilityWarning
from fgai.large import evaluate_store, observation, write_store
from support.graph_cases import small_data


@pytest.mark.filterwarnings(r"ignore:\[(flat|weak)-attention\]")
def test_numbers_are_those_of_the_graph_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "BLOCK", 17)  # several blocks, rows longer than one among them
    graph = small_data(nodes=90, width=7)
    vanilla = fgai.train("GATv2", graph, epochs=8, progress=False)
    model = fgai.train("GATv2", graph, epochs=15, seed=1, progress=False)
    found = evaluate_store(model, write_store(graph, tmp_path / "graph"), vanilla=vanilla, k=3)
    one, two = (observe(each, prepared(each, graph), heads="mean") for each in (vanilla, model))
    rows = graph.test_mask.nonzero().flatten()
    assert found.f1["test"] == pytest.approx(metrics.f1(two.logits[rows], graph.y[rows]))
    same = float((one.logits.argmax(1) == two.logits.argmax(1)).double().mean())
    assert found.agreement == pytest.approx(same) and same < 1
    assert found.g_tvd == pytest.approx(metrics.g_tvd(one.logits, two.logits), rel=1e-4)
    assert found.g_tvd_prob == pytest.approx(metrics.g_tvd_prob(one.logits, two.logits), rel=1e-4)
    for layer, (a, b) in enumerate(zip(one.attention.layers, two.attention.layers, strict=True)):
        assert found.sharpness[layer] == pytest.approx(metrics.sharpness(b.heads(), b.rowptr), rel=1e-4)
        wanted = metrics.overlap(a.ranking(), b.ranking(), a.rowptr, 3)
        assert found.overlap is not None and found.overlap[layer] == pytest.approx(wanted) and wanted < 1


def test_flat_attention_is_warned_of_as_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observation, "BLOCK", 17)
    graph = small_data(nodes=90, width=7)
    model = fgai.GAT(7, 3, hidden_channels=2, heads=2).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith(("source_weight", "destination_weight")):
                value.mul_(0.1)
    stored = write_store(graph, tmp_path / "graph")
    with pytest.warns(ReliabilityWarning) as notes:
        found = evaluate_store(model, stored)
    with pytest.warns(ReliabilityWarning) as others:
        options = {"curves": False, "nulls": False, "explanation_attack": False}
        record = fgai.evaluate(model, graph, "random", nodes=2, edges=2, k=2, **options)
    code = {note.message.code: str(note.message) for note in notes}
    assert list(code) == ["flat-attention"] and found.name == graph.name
    assert code["flat-attention"] in {str(note.message) for note in others}
    assert found.warnings == [note for note in record.warnings if note["code"] == "flat-attention"]


@pytest.mark.parametrize("label", [2**40, -5000, 3])
def test_labels_that_the_model_cannot_give_are_refused(tmp_path: Path, label: int) -> None:
    graph = small_data(nodes=40, width=5)
    y = graph.y.clone()
    y[0] = label
    write_store(graph.replace(y=y), tmp_path / "graph")
    with pytest.raises(FgaiError, match=r"`y`|logits per node"):
        evaluate_store(fgai.GAT(5, 3, hidden_channels=2, heads=2).eval(), tmp_path / "graph")


def test_a_damaged_graph_is_refused(tmp_path: Path) -> None:
    write_store(small_data(nodes=40, width=5), tmp_path / "graph")
    mask = np.load(tmp_path / "graph" / "test_mask.npy")
    np.save(tmp_path / "graph" / "test_mask.npy", ~mask)
    with pytest.raises(DataError, match=r"test_mask\.npy is damaged"):
        evaluate_store(fgai.GAT(5, 3, hidden_channels=2, heads=2).eval(), tmp_path / "graph")


@pytest.mark.filterwarnings(r"ignore:\[(flat|weak)-attention\]")
def test_alone_and_refusals(tmp_path: Path) -> None:
    graph = small_data(nodes=40, width=5)
    place = tmp_path / "graph"
    write_store(graph.replace(y=None), place)
    model = fgai.GAT(5, 3, hidden_channels=2, heads=2).eval()
    found = evaluate_store(model, place)
    assert found.f1 == {} and found.overlap is None and len(found.to_dict()["sharpness"]) == 2
    with pytest.raises(InputError, match="layers, edges and classes"):
        evaluate_store(model, place, vanilla=fgai.GAT(5, 4, hidden_channels=2, heads=2))
    with pytest.raises(InputError, match="row by row"):
        evaluate_store(fgai.GCN(5, 3), place)
