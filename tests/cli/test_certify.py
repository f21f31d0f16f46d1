"""`fgai certify`: budgets of an attacker, and votes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.cli_cases import here, refused


def test_a_budget_is_certified(tmp_path: Path) -> None:
    words = ("certify", "planted-fgai", "--budget", "1x2", "--budget", "2x2", "--json")
    done = here(*words, "--output", "proof.json", cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(one["nodes"], one["edges"]) for one in found["budgets"]] == [(1, 2), (2, 2)]
    assert found["known"] and found["kind"] == "budget-certificate"
    assert json.loads((tmp_path / "proof.json").read_text())["budgets"] == found["budgets"]


def test_votes_are_counted(tmp_path: Path) -> None:
    done = here("certify", "planted-gat", "--votes", 3, "--confidence", 0.5, cwd=tmp_path)
    assert done.exit_code == 0, done.stderr
    assert "Majority over 3 groups" in done.stdout and "top 5 groups" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--budget", "20"), "--budget"),
        (("--budget", "1x1", "--votes", 3), "different certificates"),
        (("--injected", 1, "--votes", 3), "different certificates"),
        (("--confidence", 0.5), "--votes"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, words: tuple[object, ...], reason: str) -> None:
    assert reason in refused("certify", "planted-gat", *words, cwd=tmp_path)
