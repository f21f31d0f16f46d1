"""The command line on links: the model's file knows its task."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from fgai.cli import app
from fgai.training import read_header


def answer(*words: object, cwd: Path) -> dict[str, Any]:
    with contextlib.chdir(cwd):
        done = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert done.exit_code == 0, (done.stdout, done.stderr)
    return json.loads(done.stdout)


def test_links_are_trained_made_faithful_and_attacked(tmp_path: Path) -> None:
    small = ("--set", "hidden_channels=3", "--set", "heads=2")
    made = answer("train", "--task", "link", "--epochs", 2, *small, cwd=tmp_path)
    assert made["task"] == "link" and set(made["roc_auc"]) == {"val", "test"}
    path = tmp_path / made["output"]
    assert path.name == "vanilla-gat-planted-link.safetensors"
    assert read_header(path)["about"]["task"] == "link"
    faithful = answer("faithful", path.name, "--epochs", 1, "--set", "nodes=4", cwd=tmp_path)
    assert 0 <= faithful["roc_auc"]["test"] <= 1
    hit = answer("attack", faithful["output"], "--threat", "random", cwd=tmp_path)
    assert 0 <= hit["roc_auc"]["attacked"] <= 1 and "f1" not in hit


def test_a_task_the_data_is_not_for_is_refused(tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        done = CliRunner().invoke(app, ["train", "--task", "graph"])
    assert done.exit_code == 2 and "node or link tasks" in done.stderr
