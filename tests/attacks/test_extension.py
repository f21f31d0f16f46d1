"""An attack registered from outside the package is found by evaluate, tables, report and command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fgai
from fgai.attacks import THREATS, Attack, Budget, Judge, Ledger, Threat, draw_endpoints, register_threat
from fgai.graph import Graph, GraphChange
from support import attack_cases as cases
from support.cli_cases import answer, here


class Silence(Attack):
    """New nodes that say nothing: all features are 0."""

    name = "silence"

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        ends = draw_endpoints(nodes, self.budget.nodes, self.budget.edges, generator, graph.batch)
        yield GraphChange(endpoints=ends, features=torch.zeros(len(ends), graph.num_features))


@pytest.fixture
def silence() -> Iterator[Threat]:
    threat = Threat("silence", Silence, Budget(nodes=3, edges=4), "3 nodes × 4 edges without a word")
    yield register_threat(threat)
    del THREATS["silence"]


def test_evaluate_and_its_tables_know_it(silence: Threat) -> None:
    with cases.quiet():
        record = fgai.evaluate(
            cases.trained("gat", "vanilla"), cases.tiny_graph(), "silence", k=2, curves=False
        )
    assert record.threat["name"] == "silence" and record.threat["budget"]["nodes"] == 3
    assert 0 <= record.value("f1.attacked") <= 1
    assert "silence" in record.to_markdown()


def test_the_command_line_and_the_report_know_it(silence: Threat, tmp_path: Path) -> None:
    assert "without a word" in here("attack", "--list", cwd=tmp_path).stdout
    answer("train", "--epochs", 2, "-o", "gat.safetensors", cwd=tmp_path)
    done = here("attack", "gat.safetensors", "--threat", "silence", cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    page = here("report", "GAT=gat.safetensors", "--threat", "silence", "-o", "page.html", cwd=tmp_path)
    assert page.exit_code == 0, page.stderr
    assert "silence" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_name_is_given_once(silence: Threat) -> None:
    with pytest.raises(fgai.InputError, match="already"):
        register_threat(silence)
