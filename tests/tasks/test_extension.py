"""Tasks from outside the package: registered, and then known wherever tasks are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import fgai
from fgai.attacks import PGDInjection, Threat, make_attack
from fgai.certificates import certify_attention
from fgai.datasets import register_task_split
from fgai.datasets.registry import TASK_SPLITS
from fgai.errors import DataError, InputError
from fgai.evaluation import compare
from fgai.evaluation.summary import score_of, score_phrase
from fgai.explanations import AsPyG
from fgai.graph import Graph
from fgai.graph.fields import Links
from fgai.metrics import task_scores
from fgai.models import GAT
from fgai.reports.build import make_report
from fgai.reports.page import render
from fgai.tasks import (
    TASKS,
    LinkTask,
    NodeTask,
    Task,
    get_task,
    register_task,
    task_of,
)
from fgai.training import make_faithful, train
from support import attack_cases
from support.cli_cases import here
from support.graph_cases import small_data

FEW = Threat("few", PGDInjection, attack_cases.INJECTION, "for a tiny graph")


class CoreTask(NodeTask):
    """Node classification, scored at the first two classes alone."""

    name: ClassVar[str] = "core"
    rows_are: ClassVar[str] = "core nodes"
    scores: ClassVar[Mapping[str, str]] = {"accuracy": "accuracy"}

    def fits(self, graph: Graph) -> bool:
        return graph.name.endswith("-core")

    def rows(self, graph: Graph, targets: str) -> Tensor:
        rows = super().rows(graph, targets)
        assert graph.y is not None
        return rows[graph.y[rows] < 2]


class SignTask(LinkTask):
    """Given pairs are told apart into those of one class and others; nothing is drawn, no edge is hidden."""

    name: ClassVar[str] = "sign"
    rows_are: ClassVar[str] = "signs"
    scores: ClassVar[Mapping[str, str]] = {"accuracy": "accuracy", "roc_auc": "link_auc"}
    selected_by: ClassVar[str | None] = None
    fixed_graph: ClassVar[bool] = True

    def fits(self, graph: Graph) -> bool:
        return graph.links is not None and graph.name == "signed"

    def view(self, graph: Graph, targets: str) -> Graph:
        return graph

    def epoch(self, graph: Graph, generator: torch.Generator) -> Graph:
        return graph

    def explanation_values(self, values: Tensor, graph: Graph, rows: Tensor) -> dict[str, Tensor]:
        return {"signs": values[:, self._links(graph).pairs[0, rows]]}

    def _links(self, graph: Graph) -> Links:
        assert graph.links is not None
        return graph.links


def cored(graph: Graph, seed: int) -> Graph:
    return graph.replace(name=f"{graph.name}-core")


def signed() -> Graph:
    graph = small_data(seed=2, nodes=40)
    source, destination = graph.adjacency.source, graph.adjacency.destination
    once = source < destination
    pairs = torch.stack([source[once], destination[once]])
    assert graph.y is not None
    y = (graph.y[pairs[0]] == graph.y[pairs[1]]).long()
    links = Links(pairs, y, torch.arange(pairs.shape[1]) % 3)
    return graph.replace(links=links, name="signed", y=None, train_mask=None, val_mask=None, test_mask=None)


@pytest.fixture
def core() -> Iterator[Task]:
    task = register_task(CoreTask())
    register_task_split("core", cored, of="node")
    yield task
    del TASK_SPLITS["core"], TASKS["core"]


@pytest.fixture
def sign() -> Iterator[Task]:
    yield register_task(SignTask())
    del TASKS["sign"]


def trained(graph: Graph, **sizes: int) -> GAT:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = GAT.for_data(graph, hidden_channels=3, heads=2, **sizes)
    return train(model, graph, epochs=5, progress=False)


class TestRegistry:
    def test_a_task_comes_and_goes(self, core: Task) -> None:
        graph = cored(small_data(), 0)
        assert task_of(graph) is core is get_task("core")
        assert task_of(small_data()).name == "node"
        del TASKS["core"]
        assert task_of(graph).name == "node"
        with pytest.raises(InputError, match="core"):
            get_task("core")
        register_task(core)

    def test_a_name_is_given_once(self, core: Task) -> None:
        with pytest.raises(InputError, match="already"):
            register_task(CoreTask())
        with pytest.raises(InputError, match="already"):
            register_task_split("core", cored, of="node")

    def test_a_task_without_scores_is_refused(self) -> None:
        class Mute(CoreTask):
            scores: ClassVar[Mapping[str, str]] = {}

        with pytest.raises(InputError, match="scores"):
            register_task(Mute())
        assert "core" not in TASKS

    def test_unknown_names_are_refused(self) -> None:
        for ask in (
            lambda: GAT(3, 2, task="core"),
            lambda: task_scores("core", torch.ones(2, 2), torch.zeros(2).long()),
            lambda: make_attack("standard", task="core"),
            lambda: register_task_split("core", cored, of="node"),
        ):
            with pytest.raises(InputError, match="core"):
                ask()

    def test_a_score_nobody_knows_is_named(self, core: Task, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CoreTask, "scores", {"luck": "luck"})
        with pytest.raises(InputError, match="luck"):
            task_scores("core", torch.ones(2, 2), torch.zeros(2).long())


def test_a_task_of_nodes_is_trained_evaluated_tabled_and_reported(core: Task) -> None:
    graph = cored(small_data(), 0)
    model = trained(graph)
    assert model.task == "core" and model.config["out_channels"] == graph.num_classes
    with attack_cases.quiet():
        faithful = make_faithful(model, graph, nodes=2, edges=3, epochs=2, progress=False)
        table = compare({"GAT": model, "FGAI": faithful}, graph, FEW, k=2, per_node=True)
    record = table.records[0]
    rows = core.rows(graph, "test")
    assert graph.y is not None and int(graph.y[rows].max()) == 1
    right = model(graph)[rows].argmax(1) == graph.y[rows]
    assert record.value("accuracy.clean") == pytest.approx(float(right.double().mean()))
    assert record.config["task"] == "core" and "f1" not in record.metrics
    assert set(record.value("same_class")) == {"prediction", "explanation"}
    assert record.node_values("scored").sum() == rows.numel()
    shown = table.to_markdown()
    assert "accuracy clean" in shown and "test core nodes" in shown and "F1" not in shown
    plain = record.to_dict()
    assert (
        score_of(plain) == "accuracy"
        and score_phrase(plain, "of the ") == "of the tested core nodes classified right"
    )
    assert "ested core nodes classified right" in render(make_report(table))
    assert certify_attention(model, graph, radius=0.01).layer().prediction.class_status == "exact"


def test_a_record_outlives_its_task(core: Task) -> None:
    graph = cored(small_data(), 0)
    with attack_cases.quiet():
        record = fgai.evaluate(trained(graph), graph, FEW, k=2, curves=False, explanation_attack=False)
    del TASKS["core"]
    try:
        assert "test rows" in record.to_markdown() and score_of(record.to_dict()) == "accuracy"
    finally:
        register_task(core)


def test_a_task_with_rows_of_its_own_is_evaluated(sign: Task) -> None:
    graph = signed()
    assert task_of(graph) is sign
    model = trained(graph, out_channels=7)
    with attack_cases.quiet():
        record = fgai.evaluate(model, graph, FEW, k=2, vanilla=model, per_node=True)
    assert set(record.value("explanations")) == {"prediction", "explanation", "chance", "similarity"}
    assert set(record.value("explanations.prediction")) == {"signs"}
    assert record.value("explanations.similarity.signs.all") == 1
    assert 0 < record.value("explanations.chance.signs.all") < 1
    assert record.node_values("item_predicted_clean").shape == (sign.count(graph),)
    assert 0 <= record.value("roc_auc.attacked") <= 1 and "test signs" in record.to_markdown()
    with pytest.raises(InputError, match="nodes or graphs"):
        AsPyG(model)


def test_a_read_out_nobody_can_follow_is_not_certified(sign: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = signed()
    model = trained(graph, out_channels=7)
    assert certify_attention(model, graph, radius=0.01).layer().prediction.class_status == "bound"
    monkeypatch.setattr(SignTask, "linear_read_out", "")
    with attack_cases.quiet():
        found = certify_attention(model, graph, radius=0.01).layer().prediction
    assert found.class_status == "unknown" and "signs" in found.reason


def test_the_command_line_knows_the_task(core: Task, tmp_path: Path) -> None:
    small = ("--set", "hidden_channels=3", "--set", "heads=2", "--epochs", 1)
    done = here("train", "--task", "core", *small, cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    path = "vanilla-gat-planted-core.safetensors"
    assert "accuracy" in done.stdout and (tmp_path / path).exists()
    done = here("attack", path, "--threat", "random", cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert "accuracy, test core nodes" in " ".join(done.stdout.split())


def test_datasets_of_other_tasks_do_not_serve_it(core: Task) -> None:
    assert fgai.load_dataset("planted", task="core").name == "planted-core"
    with pytest.raises(InputError, match="node or link or core tasks"):
        fgai.load_dataset("planted", task="graph")
    with pytest.raises((InputError, DataError), match="graph tasks"):
        fgai.load_dataset("mutag", task="core")
