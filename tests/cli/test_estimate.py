"""Long commands say first about how long they take and how much memory they need."""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import fgai
from fgai.attacks import THREATS, make_attack
from fgai.cli import Output
from fgai.cli.files import EPOCH, announce, evaluation_passes, training_passes
from fgai.errors import InputError
from support.cli_cases import refused
from support.graph_cases import small_data

ESTIMATE = re.compile(r"^this takes about \d+ (s|min) and \d+\.\d GB of memory$", re.MULTILINE)
COMMANDS: dict[str, tuple[tuple[str, ...], str]] = {
    "train": ((), "fgai.cli.train.train_method"),
    "faithful": (("planted-gat", "-o", "new"), "fgai.cli.train.make_faithful"),
    "harden": (("planted-gat", "-o", "new"), "fgai.cli.train.hardened_copy"),
    "evaluate": (("planted-gat",), "fgai.cli.evaluate.evaluate_model"),
    "compare": (("planted-gat", "planted-fgai"), "fgai.cli.evaluate.compare_models"),
    "certify": (("planted-gat",), "fgai.cli.evaluate.certify_attention"),
    "attack": (("planted-gat",), "fgai.attacks.base.Attack.run"),
    "audit": (("planted-gat",), "fgai.cli.report.evaluate"),
    "report": (("planted-gat",), "fgai.reports.report"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_long_commands_say_what_they_cost(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, work = COMMANDS[name]
    monkeypatch.setattr(work, Mock(side_effect=InputError("far enough")))
    told = refused(name, *words, cwd=tmp_path)
    assert ESTIMATE.search(told) and told.rstrip().endswith("far enough")
    assert not ESTIMATE.search(refused(name, *words, "--quiet", cwd=tmp_path))


def said(capsys: pytest.CaptureFixture[str], model: nn.Module, graph: object, passes: float) -> list[str]:
    announce(Output(), "it begins", [model], graph, passes)
    return capsys.readouterr().err.splitlines()


def test_more_passes_take_longer(capsys: pytest.CaptureFixture[str]) -> None:
    graph = small_data()
    model = fgai.GAT(graph.num_features, graph.num_classes)
    first, estimate = said(capsys, model, graph, 1)
    assert first == "it begins" and ESTIMATE.fullmatch(estimate) and " 10 s " in estimate
    assert " min " in said(capsys, model, graph, 10**6)[1]


def test_nothing_is_changed_and_what_fails_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    graph = small_data()
    model = fgai.GAT(graph.num_features, graph.num_classes).train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    assert len(said(capsys, model, graph, 1)) == 2
    assert model.training and all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    wrong = fgai.GAT(graph.num_features + 1, graph.num_classes)
    assert said(capsys, wrong, graph, 1) == ["it begins"]
    assert said(capsys, model, "stored", 1) == said(capsys, model, graph, 0) == ["it begins"]


def test_passes_are_counted() -> None:
    assert training_passes("fgai", {"epochs": 10}, trained=True) == 10 * EPOCH["fgai"]
    assert training_passes("fgai", {"epochs": 10}) > training_passes("vanilla", {}) > 0
    graph, threat = small_data(), THREATS["standard"]
    attack = make_attack(threat, "prediction")
    plain = evaluation_passes(threat, graph, curves=False, nulls=False)
    assert plain >= 2 * attack.max_steps and evaluation_passes(threat, graph) > plain
