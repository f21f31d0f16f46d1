"""How commands start: what they import, what they say before the work, and where they compute."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from fgai import datasets
from fgai.cli import app
from fgai.cli.files import _write_model
from fgai.training import untrained_model
from support.cli_cases import commands, environment, here, refused

HEAVY = {"torch", "torch_geometric", "numpy", "numba", "matplotlib", "plotly", "experiments"}
COMPUTING = (
    "demo",
    "explain",
    "report",
    "train",
    "faithful",
    "limit",
    "attack",
    "evaluate",
    "compare",
    "certify",
)


def imported_by(*words: str, cwd: Path) -> set[str]:
    """The packages that a command imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fgai", *words],
        cwd=cwd, env=environment(), capture_output=True, text=True, check=True,
    )  # fmt: skip
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "fgai.cli.app" in imported and done.stdout
    return {name.partition(".")[0] for name in imported}


@pytest.mark.parametrize("word", ["--version", "--help"])
def test_nothing_heavy_is_imported(word: str, tmp_path: Path) -> None:
    assert imported_by(word, cwd=tmp_path) & HEAVY == set()


def test_the_demo_starts_without_pyg(tmp_path: Path) -> None:
    assert imported_by("demo", "--help", cwd=tmp_path) & HEAVY == {"torch", "numpy", "numba"}


def test_help_lists_every_command_by_its_own_first_sentence() -> None:
    text = " ".join(here("--help", cwd=Path()).stdout.replace("│", " ").split())
    group: Any = get_command(app)
    for name, later in group.commands.items():
        first = later.loaded.help.partition("\n\n")[0].replace("\n", " ")
        assert f"{name} {first}" in text, name


@pytest.mark.parametrize("name", COMPUTING)
def test_the_device_can_be_chosen(name: str) -> None:
    assert [found for found in commands()[name].params if "--device" in found.opts]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("start")
    graph = datasets.load_dataset("planted", seed=0)
    about = {"dataset": "planted", "split_seed": 0, "seed": 0, "method": "vanilla", "settings": {}}
    _write_model(untrained_model("GAT", graph), folder / "gat.safetensors", graph, about)
    return folder


@pytest.mark.parametrize("name", COMPUTING)
def test_a_device_that_is_not_there_is_refused_first(name: str, folder: Path) -> None:
    words = [] if name in ("demo", "train") else ["gat.safetensors"]
    words += ["--node", "1"] if name == "explain" else []
    before = set(folder.iterdir())
    assert "`--device` must exist, got cuda:99" in refused(name, *words, "--device", "cuda:99", cwd=folder)
    assert "must be a device of torch" in refused(name, *words, "--device", "abacus", cwd=folder)
    assert set(folder.iterdir()) == before


def test_a_log_is_checked_first(folder: Path) -> None:
    for words in (("train",), ("faithful", "gat.safetensors"), ("attack", "gat.safetensors")):
        assert "`--log` must be *.csv or *.jsonl" in refused(*words, "--log", "log.txt", cwd=folder)


def test_every_epoch_is_logged(folder: Path) -> None:
    words = ("--epochs", 2, "--log", "log.csv", "-o", "new.safetensors", "-q")
    assert here("train", *words, cwd=folder).exit_code == 0
    words = ("--threat", "random", "--log", "log.csv", "-q")
    assert here("attack", "gat.safetensors", *words, cwd=folder).exit_code == 0
    head, *rows = (folder / "log.csv").read_text().splitlines()
    assert head.startswith("run,epoch,") and {"total", "score", "value"} <= set(head.split(","))
    assert [row.split(",")[:2] for row in rows[:2]] == [["vanilla", "0"], ["vanilla", "1"]]
    assert rows[2].startswith("prediction attack,0,")
