"""`fgai attack --explain-members`: the members, what they found, who won, and who is at work."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from fgai.attacks import THREATS, Ledger, Threat
from fgai.cli.evaluate import _members_of, _show_members
from fgai.training import save_model
from support import attack_cases as cases
from support.cli_cases import here

SMALL = Threat("ensemble", cases.SmallEnsemble, cases.BUDGETS[cases.SmallEnsemble], "small")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of a small dataset, and a small ensemble in the place of the whole one."""
    import fgai

    monkeypatch.setitem(THREATS, "ensemble", SMALL)
    graph = fgai.load_dataset("planted")
    trained = fgai.train("GAT", graph, epochs=2, progress=False)
    about = {"dataset": "planted", "split_seed": 0}
    return Path(save_model(trained, tmp_path / "gat.safetensors", about=about))


def test_members_are_listed_and_the_winner_is_marked(model: Path) -> None:
    words = ("attack", model.name, "--threat", "ensemble", "--explain-members")
    done = here(*words, "--json", cwd=model.parent)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    rows = found["members"]
    assert {row["endpoints"] for row in rows} == {"random", "cover"}
    assert {"plain sign", "polish", "evolution"} <= {row["member"] for row in rows}
    (winner,) = (row for row in rows if row["won"])
    assert winner["damage"] == max(found["ledger"]["damages"])
    table = here(*words, cwd=model.parent).stdout
    assert "Members" in table and table.count("won") == 1


def test_attacks_without_members_say_so() -> None:
    text = StringIO()
    _show_members(Console(file=text), _members_of(Ledger(damages=[0.1, 0.2], won=1)))
    assert "no members" in text.getvalue()


def test_noise_that_wins_leaves_no_winner() -> None:
    row = {"member": "sign", "endpoints": "random", "steps": 3, "seconds": 0.1}
    assert not _members_of(Ledger(members=[row], damages=[0.9, 0.2], won=0))[0]["won"]


def test_steps_are_told() -> None:
    seen: list[str] = []
    attack = cases.attack(cases.SmallEnsemble)
    with cases.quiet():
        attack.run(cases.trained("gat", "vanilla"), cases.tiny_graph(), on_step=seen.append)
    assert "cover endpoints: polish and polish momentum" in seen and "random endpoints: evolution" in seen
