"""`explain`: what the record says is what the model and the attack say, and it prints and reads back."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fgai.attacks import Budget, PGDInjection, Threat
from fgai.attention import observe
from fgai.certificates import PROPERTIES, certify_attention
from fgai.errors import CheckpointError, FgaiWarning, InputError
from fgai.explanations import NodeExplanation, explain
from fgai.explanations.node import name_of
from fgai.models import AttentionModel
from fgai.tasks import task_of
from fgai.training import train, untrained_model
from support import task_cases
from support.forward import view_of
from support.graph_cases import small_data

GRAPH = small_data()
THREAT = Threat("few", PGDInjection, Budget(nodes=3, edges=4, steps=2, step_size=0.5), "for a tiny graph")


@pytest.fixture(scope="module")
def model() -> AttentionModel:
    return train(untrained_model("GAT", GRAPH, hidden_channels=2, heads=3), GRAPH, epochs=8, progress=False)


@pytest.fixture(scope="module")
def attacked_node(model: AttentionModel) -> int:
    ends = THREAT.attack(THREAT.budget).run(model, GRAPH).change.endpoints
    assert ends is not None
    return int(ends[0, 0])


def text_of(found: NodeExplanation, width: int = 120) -> str:
    out = io.StringIO()
    found.show(Console(file=out, width=width))
    return out.getvalue()


class TestRecord:
    def test_neighbours_and_attack_are_those_of_the_model(
        self, model: AttentionModel, attacked_node: int
    ) -> None:
        found = explain(model, GRAPH, attacked_node, k=3, threat=THREAT, certificate=False)
        clean = view_of(model, GRAPH).node(attacked_node)
        assert [entry["node"] for entry in found.neighbours] == list(clean.neighbours)
        assert [entry["attention"] for entry in found.neighbours] == pytest.approx(clean.weights)
        result = THREAT.attack(THREAT.budget).run(model, GRAPH)
        after = view_of(model, result.graph, original=40).node(attacked_node)
        later = dict(zip(after.neighbours, after.weights, strict=True))
        assert found.attacked is not None
        for entry in found.neighbours:
            assert entry["attacked"] == pytest.approx(later[entry["node"]])
        original = sorted((n for n in later if n < 40), key=lambda n: (-later[n], n))[:3]
        assert found.attacked["kept"] == sorted(set(clean.neighbours[:3]) & set(original))
        assert found.attacked["overlap"] == pytest.approx(len(found.attacked["kept"]) / 3)
        new = [weight for n, weight in later.items() if n >= 40]
        assert found.attacked["new_neighbours"] == len(new) >= 1
        assert found.attacked["new_attention"] == pytest.approx(sum(new))
        assert found.attacked["predicted"] == after.predicted and found.attacked["threat"] == "few"

    def test_an_attack_can_be_given(self, model: AttentionModel, attacked_node: int) -> None:
        result = THREAT.attack(THREAT.budget).run(model, GRAPH)
        one = explain(model, GRAPH, attacked_node, threat=THREAT, certificate=False)
        other = explain(model, GRAPH, attacked_node, threat=None, attack=result, certificate=False).attacked
        assert one.attacked is not None and other is not None
        assert {**other, "threat": "few"} == one.attacked

    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({}, "given"),
            ({"threat": None}, "given"),
            ({"threat": "standard"}, "standard"),
            ({"threat": THREAT}, "few"),
        ],
    )
    def test_a_threat_that_is_named_names_the_attack(
        self, model: AttentionModel, attacked_node: int, options: dict[str, Any], name: str
    ) -> None:
        attack = THREAT.attack(THREAT.budget).run(model, GRAPH)
        found = explain(model, GRAPH, attacked_node, attack=attack, certificate=False, **options)
        assert found.attacked is not None and found.attacked["threat"] == name

    @pytest.mark.parametrize("radius", [0.0, 0.01])
    def test_certificates_are_those_of_certify(self, model: AttentionModel, radius: float) -> None:
        """Radii do not depend on the radius at which changes are certified, in hidden layers neither."""
        found = explain(model, GRAPH, 3, k=2, threat=None)
        wanted = certify_attention(model, GRAPH, radius=radius, k1=2, k2=2)
        assert found.attacked is None and found.certified is not None
        assert len(found.certified["layers"]) == len(wanted.layers) == 2
        for mine, layer in zip(found.certified["layers"], wanted.layers, strict=True):
            assert mine["topk_radius"] == pytest.approx(float(layer.topk_radius[3]))
            assert layer.prediction.class_radius is not None
            assert mine["class_radius"] == pytest.approx(float(layer.prediction.class_radius[3]))

    def test_the_four_properties_are_those_of_certify(self, model: AttentionModel) -> None:
        other = untrained_model("GAT", GRAPH, hidden_channels=2, heads=3)
        wanted = certify_attention(model, GRAPH, vanilla=other, radius=0.01, k1=2, k2=2)
        for node in range(0, 40, 7):
            found = explain(model, GRAPH, node, k=2, threat=None, vanilla=other).certified
            assert found is not None and found["compared"] and found["radius"] == 0.01
            for index, layer in enumerate(found["layers"]):
                held = {name: mask for name, mask in wanted.properties(index).items() if mask is not None}
                assert layer["properties"] == {name: bool(mask[node]) for name, mask in held.items()}
                assert list(held) == list(PROPERTIES)

    def test_what_is_not_measured_is_none_and_said(self, model: AttentionModel) -> None:
        found = explain(model, GRAPH, 3, k=2, threat=None)
        assert found.certified is not None and not found.certified["compared"]
        last = found.certified["layers"][-1]
        same, stable, like, steady = (last["properties"][name] for name in PROPERTIES)
        assert same is None and like is None and isinstance(stable, bool) and isinstance(steady, bool)
        words = ["yes" if held else "no" for held in (stable, steady)]
        assert (
            f"{last['layer']}, Definition 1 at radius 0.01: same explanation: not measured; stable"
            f" explanation: {words[0]}; same prediction: not measured; stable prediction: {words[1]}"
        ) in text_of(found, 400)
        transformer = untrained_model("GT", GRAPH, hidden_channels=16, heads=(2, 1)).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FgaiWarning)
            doubted = explain(transformer, GRAPH, 3, threat=None, vanilla=transformer)
        assert doubted.certified is not None
        assert doubted.certified["layers"][0]["properties"]["stable_prediction"] is None
        assert "same prediction: yes; stable prediction: unknown" in text_of(doubted, 400)

    def test_isolated_node(self, model: AttentionModel) -> None:
        found = explain(model, GRAPH, 39, threat=None)
        assert [entry["itself"] for entry in found.neighbours] == [True]
        assert found.certified is not None and found.certified["layers"][0]["topk_radius"] is None
        assert "no other neighbour can enter" in text_of(found)
        transformer = untrained_model("GT", GRAPH, hidden_channels=16, heads=(2, 1)).eval()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FgaiWarning)
            bare = explain(transformer, GRAPH, 39, threat=THREAT)
        assert bare.neighbours == [] and bare.attacked is not None and bare.attacked["overlap"] is None
        assert "attends to nothing" in text_of(bare)

    def test_names_and_saving(self, model: AttentionModel, attacked_node: int, tmp_path: Path) -> None:
        names = {n: f"[bold]n{n}" for n in range(40)}
        found = explain(model, GRAPH, attacked_node, threat=THREAT, names=names)
        shown = text_of(found)
        assert shown.startswith(f"node [bold]n{attacked_node} of small: class")
        assert "of the top 5 stay" in shown or "of the top" in shown
        assert "new neighbour" in shown and "ball" in shown
        again = NodeExplanation.load(found.save(tmp_path / "node.json"))
        assert again == found
        (tmp_path / "node.json").write_text('{"kind": "evaluation"}')
        with pytest.raises(CheckpointError, match="explanation"):
            NodeExplanation.load(tmp_path / "node.json")

    def test_names_of_classes(self, model: AttentionModel, tmp_path: Path) -> None:
        names = ["[red]one", "two", "three"]
        found = explain(model, GRAPH.replace(class_names=tuple(names)), 3, k=3, threat=THREAT)
        assert found.class_names == names and found.attacked is not None
        heading, words = text_of(found, 400).split("\n", 1)
        assert f"of small: class {names[found.predicted]}, " in heading
        assert heading.rstrip().endswith(f"(truth: {names[found.label]})")
        assert f"under the few attack: class {names[found.attacked['predicted']]} (" in words
        values = found.to_dict()
        assert NodeExplanation.from_dict(values) == found
        del values["class_names"]
        assert NodeExplanation.from_dict(values).class_names is None
        assert explain(model, GRAPH, 3, threat=None).class_names is None

    def test_truth_is_shown(self, model: AttentionModel) -> None:
        graph = GRAPH.replace(edge_truth=GRAPH.adjacency.source % 2 == 0)
        found = explain(model, graph, 3, threat=None, certificate=False)
        for entry in found.neighbours:
            assert entry["informative"] == (entry["node"] % 2 == 0 and not entry["itself"])
        assert "explains" in text_of(found)

    def test_model_is_left_as_it_was(self, model: AttentionModel) -> None:
        model.train()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        explain(model, GRAPH, 3, threat=THREAT)
        assert model.training and all(layer.tap is None for layer in model.convs)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0)
        model.eval()

    def test_bad_input(self, model: AttentionModel) -> None:
        with pytest.raises(InputError, match=r"0..39, got 40"):
            explain(model, GRAPH, 40)
        with pytest.raises(InputError, match="`k`"):
            explain(model, GRAPH, 3, k=0)
        with pytest.raises(InputError, match="`threat` must be one of"):
            explain(model, GRAPH, 3, threat="weird")
        with pytest.raises(InputError, match="must name every node"):
            name_of(7, ["a", "b"])
        assert name_of(1, ["a", "b"]) == "b" and name_of(7, {1: "b"}) == "7"


class TestOtherTasks:
    def test_class_is_that_of_the_graph_or_of_a_pair(self) -> None:
        for task in ("link", "graph"):
            data, model = task_cases.data(task), task_cases.trained(task)
            node = data.num_nodes - 1 if data.batch is not None else int(data.links.pairs[0, 5])  # type: ignore[union-attr]
            row = int(task_of(data).row_of(data)[node])
            assert row not in (-1, node)
            chances = observe(model, data).logits.double().softmax(1)[row]
            explained = explain(model, data, node, threat=None, certificate=False)
            assert explained.predicted == int(chances.argmax())
            assert explained.confidence == pytest.approx(float(chances.max()))

    def test_nodes_of_small_graphs_keep_their_numbers_under_attack(self) -> None:
        data, model = task_cases.data("graph"), task_cases.trained("graph")
        for node in (0, data.num_nodes - 1):
            explained = explain(model, data, node, nodes=1, edges=3, certificate=False)
            assert explained.attacked is not None
            assert all(entry["attacked"] is not None for entry in explained.neighbours)
            changed = {entry["attacked"] == entry["attention"] for entry in explained.neighbours}
            assert changed == {False}
