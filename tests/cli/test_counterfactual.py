"""`fgai explain --counterfactual` and `--save-change`: what is shown, and a file that changes the class."""

from __future__ import annotations

from pathlib import Path

import torch

import fgai
from fgai.attention import call_model, prepared
from fgai.graph import ChangeRecord
from support.cli_cases import answer, here, refused

WORDS = ("explain", "planted-gat", "--node", 8, "--threat", "none")


def test_the_smaller_change_is_written_and_replayed(tmp_path: Path) -> None:
    found = answer(*WORDS, "--save-change", "change.json", cwd=tmp_path)
    entries = found["counterfactual"].values()
    least = min(entry["size"] for entry in entries)
    change = ChangeRecord.load(tmp_path / "change.json")
    assert len(change.removed_edges) + len(change.injected) == least
    (chosen,) = [entry for entry in entries if entry["change"] == change.to_dict()]
    model, data = fgai.from_pretrained("planted-gat"), fgai.load_dataset("planted")
    with torch.no_grad():
        logits = call_model(model.eval(), prepared(model, change.apply(model, data)))
    assert int(logits[8].argmax()) == chosen["predicted"] != found["predicted"]
    told = refused(*WORDS, "--save-change", "change.json", cwd=tmp_path)
    assert "change.json exists; add --force" in told


def test_shown(tmp_path: Path) -> None:
    shown = " ".join(here(*WORDS, "--counterfactual", cwd=tmp_path).stdout.split())
    assert "without 3 of its neighbours: class 1: 212, 295, 1684; no fewer do" in shown
    assert "new neighbour" in shown and "leads class" in shown and "+2.283" in shown
    assert "supporting: itself" in shown and "opposing: 1890" in shown
