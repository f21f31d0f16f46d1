"""The record: shares, curves and tables from per-node values, and back from JSON bit by bit."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

import fgai
from fgai.certificates import (
    ARITHMETIC,
    PROMISE,
    PROPERTIES,
    RADII,
    TABLE_RADII,
    CertificateRecord,
    Prediction,
    certify_attention,
)
from fgai.datasets import planted
from fgai.errors import CheckpointError, InputError
from fgai.models import GAT
from support.certify_cases import NORMS

SAME = ("same_explanation", "same_prediction")


@pytest.fixture(scope="module")
def record() -> CertificateRecord:
    torch.manual_seed(0)
    graph = planted(seed=2, num_nodes=130, num_classes=3)
    model, other = (GAT.for_data(graph, hidden_channels=3, heads=2) for _ in range(2))
    return certify_attention(
        model, graph, vanilla=other, radius=0.004, k1=4, k2=3, norm="l2", alpha=0.2, beta=0.6
    )


def test_json_brings_back_every_bit(record: CertificateRecord, tmp_path: Path) -> None:
    again = CertificateRecord.load(record.save(tmp_path / "certificate.json"))
    assert again.to_json() == record.to_json()
    for mine, theirs in zip(record.layers, again.layers, strict=True):
        pairs = [(mine.costs, theirs.costs), (mine.degree, theirs.degree), (mine.beta1, theirs.beta1)]
        pairs.append((mine.prediction.class_radius, theirs.prediction.class_radius))
        for a, b in pairs:
            assert a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b)
    assert again.promise == PROMISE and again.shares()["all_four"] == record.shares()["all_four"]
    read = json.loads((tmp_path / "certificate.json").read_text())
    assert read["summary"]["layers"][-1]["topk"]["curve"] == record.layer().curve("topk")


def test_records_of_other_kinds_are_refused(record: CertificateRecord) -> None:
    values = record.to_dict()
    with pytest.raises(CheckpointError, match="newer"):
        CertificateRecord.from_dict({**values, "schema": 99})
    with pytest.raises(CheckpointError, match="kind"):
        CertificateRecord.from_dict({**values, "kind": "evaluation"})
    with pytest.raises(CheckpointError, match="incomplete"):
        CertificateRecord.from_dict({key: value for key, value in values.items() if key != "layers"})


def test_summary_equals_loops_over_nodes(record: CertificateRecord) -> None:
    for index, layer in enumerate(record.layers):
        summary = record.summary()["layers"][index]
        nodes = [i for i in range(layer.num_nodes) if int(layer.degree[i]) > 3]
        assert summary["counted"] == len(nodes)
        assert summary["trivial_share"] == pytest.approx(1 - len(nodes) / layer.num_nodes)
        radius = layer.prediction.class_radius
        assert radius is not None
        for kind, values in (("topk", layer.costs[:, 0]), ("class", radius)):
            held = [float(values[i]) > 0.004 for i in nodes]
            assert summary[kind]["share"] == pytest.approx(sum(held) / len(nodes))
            assert (
                summary[kind]["median_radius"]
                == sorted(float(values[i]) for i in nodes)[(len(nodes) - 1) // 2]
            )
            shares = [sum(float(values[i]) > r for i in nodes) / len(nodes) for r in RADII]
            assert summary[kind]["curve"] == pytest.approx(shares)
            assert shares == sorted(shares, reverse=True)
    assert RADII[0] == pytest.approx(0.001) and RADII[-1] == pytest.approx(0.1)


def test_a_node_satisfies_the_definition_only_with_all_four(record: CertificateRecord) -> None:
    layer, last = record.layer(), record.layer().prediction
    parts: list[Tensor | None] = [layer.beta1, record.alpha1, last.alpha2_probabilities, record.satisfied()]
    beta1, alpha1, alpha2, satisfied = (part for part in parts if part is not None)
    beta2 = layer.beta2(record.radius)
    for i in range(layer.num_nodes):
        four = beta1[i] >= 0.6 - 1e-9, beta2[i] >= 0.6 - 1e-9, alpha1[i] <= 0.2, alpha2[i] <= 0.2
        assert bool(satisfied[i]) is all(bool(part) for part in four)


def test_without_bounds_or_vanilla_less_is_claimed() -> None:
    torch.manual_seed(1)
    graph = planted(seed=2, num_nodes=80, num_classes=3)
    model = GAT.for_data(graph, hidden_channels=3, heads=2)
    free = certify_attention(model, graph, radius=0.01)
    assert free.satisfied() is None and free.shares()["all_four"] is None and free.alpha1 is None
    half = certify_attention(model, graph, radius=0.01, beta=0.5, divergence="logits", alpha=1.0)
    assert list(half.properties()) == list(PROPERTIES)
    assert [name for name, held in half.properties().items() if held is None] == list(SAME)
    assert half.alpha2() is half.layer().prediction.alpha2_logits
    assert "not measured" in half.to_markdown()
    everything = certify_attention(model, graph, radius=0.01, vanilla=model, k1=None, k2=None, beta=0.5)
    assert everything.shares() == dict.fromkeys((*PROPERTIES, "all_four"))
    assert not bool(everything.layer().counted.any()) and "none counted" in everything.to_markdown()
    assert everything.sentences()[-1].startswith("Counted: 0 of 80 nodes, because")


def test_shares_are_means_over_the_counted_nodes(record: CertificateRecord) -> None:
    for index, layer in enumerate(record.layers):
        nodes = [i for i in range(layer.num_nodes) if int(layer.degree[i]) > 4]  # max(k1, k2)
        assert record.counted(index).nonzero().flatten().tolist() == nodes != []
        shares, held = record.shares(index), record.properties(index)
        for name in PROPERTIES:
            mask = held[name]
            assert mask is not None
            assert shares[name] == pytest.approx(sum(bool(mask[i]) for i in nodes) / len(nodes))
        masks = [mask for mask in held.values() if mask is not None]
        every = [all(bool(mask[i]) for mask in masks) for i in nodes]
        assert shares["all_four"] == pytest.approx(sum(every) / len(nodes))
        summary = record.summary()["layers"][index]
        assert summary["definition"] == {"counted": len(nodes), **shares}
        assert summary["sentences"] == record.sentences(index)


def test_sentences_say_the_shares_and_what_is_not_measured(record: CertificateRecord) -> None:
    shares, said = record.shares(), record.sentences()
    titles = ["Same explanation", "Stable explanation", "Same prediction", "Stable prediction", "All four"]
    for title, name, sentence in zip(titles, (*PROPERTIES, "all_four"), said, strict=False):
        assert sentence.startswith(f"{title} at {100 * (shares[name] or 0):.1f} % of the nodes")
        assert sentence.endswith(".") and "None" not in sentence
    assert "at least 60 % of the vanilla model's top 4 are among the model's top 4" in said[0]
    assert "at least 60 % of the top 3 provably stay while the explanation moves by at most 0.004" in said[1]
    assert "by at most 0.2 (total variation of probabilities)" in said[2]
    assert "while each head moves by at most 0.004 (l2)" in said[3]
    count = int(record.counted().sum())
    assert said[5:] == [f"Counted: {count} of 130 nodes, those with more than 4 neighbours."]
    alone = dataclasses.replace(
        record,
        compared=False,
        alpha1_probabilities=None,
        layers=tuple(dataclasses.replace(layer, beta1=None) for layer in record.layers),
    )
    half = alone.sentences()
    for sentence, title in ((half[0], titles[0]), (half[2], titles[2]), (half[4], titles[4])):
        assert sentence == f"{title}: not measured, because no vanilla model was given."
    assert (half[1], half[3]) == (said[1], said[3])


def test_unknown_is_none_and_never_zero(record: CertificateRecord) -> None:
    unknown = Prediction(reason="nobody knows its layers")
    layers = tuple(dataclasses.replace(layer, prediction=unknown) for layer in record.layers)
    doubted = dataclasses.replace(record, layers=layers)
    shares = doubted.shares()
    assert shares["stable_prediction"] is None and shares["all_four"] is None
    assert {name: shares[name] for name in (*SAME, "stable_explanation")} == {
        name: record.shares()[name] for name in (*SAME, "stable_explanation")
    }
    assert doubted.satisfied() is None and doubted.properties()["stable_prediction"] is None
    said = doubted.sentences()
    assert said[3:5] == [
        f"{title}: unknown, because nobody knows its layers." for title in ("Stable prediction", "All four")
    ]
    again = CertificateRecord.from_dict(doubted.to_dict())
    assert again.shares() == shares and again.sentences() == said


def test_the_old_name_leads_to_the_new_ones() -> None:
    with pytest.raises(AttributeError, match=r"certify_attention.*certify_injection"):
        fgai.certify  # noqa: B018
    assert "certify" not in dir(fgai)


@pytest.mark.parametrize("norm", NORMS)
def test_radius_zero_and_radii_beyond_every_attention(norm: str) -> None:
    torch.manual_seed(1)
    graph = planted(seed=2, num_nodes=80, num_classes=3)
    model = GAT.for_data(graph, hidden_channels=3, heads=2)
    still = certify_attention(model, graph, radius=0.0, k2=3, norm=norm)
    for layer in still.layers:
        assert layer.share("class", 0.0) == 1.0 and layer.share("topk", 0.0) == 1.0
        for change in (layer.prediction.alpha2_logits, layer.prediction.alpha2_probabilities):
            assert change is not None and float(change.abs().max()) == 0.0
    far = certify_attention(model, graph, radius=5.0, k2=3, norm=norm)
    for layer in far.layers:
        floor = 1 - (layer.degree - 3).clamp(0, 3).double() / 3
        torch.testing.assert_close(layer.beta2(5.0), floor)
        chances = layer.prediction.alpha2_probabilities
        assert chances is not None and far.trivial_probabilities is not None
        assert bool((chances <= far.trivial_probabilities + 1e-12).all())


def test_every_output_carries_the_promise(record: CertificateRecord) -> None:
    assert PROMISE in record.to_markdown() and PROMISE in record.to_json()
    out = io.StringIO()
    record.show(Console(file=out, width=300))
    shown = out.getvalue()
    assert PROMISE in shown and "trivial" in shown and "exact" in shown and "bound" in shown
    for radius in TABLE_RADII:
        assert f"R = {radius:g}" in shown


def test_layers_are_named_by_number(record: CertificateRecord) -> None:
    assert record.layer(0).name == "convs.0" and record.layer(-1) is record.layers[-1]
    with pytest.raises(InputError, match="2 layers"):
        record.layer(2)
    assert math.isfinite(record.layer(0).sharpness)


def test_a_record_without_its_vector_is_refused_if_its_promise_names_one(record: CertificateRecord) -> None:
    values = record.to_dict()
    del values["explanation"]
    with pytest.raises(CheckpointError, match="lacks `explanation`"):
        CertificateRecord.from_dict(values)
    values["promise"] = "Moved by R."
    assert CertificateRecord.from_dict(values).explanation == ARITHMETIC
    for layer in values["layers"]:
        del layer["per_node"]["heads_beta2"]
    older = CertificateRecord.from_dict(values)
    assert older.layer().heads_beta2 is None and "heads_beta2" not in older.to_dict()["layers"][0]["per_node"]
