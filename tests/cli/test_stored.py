"""A converted folder serves the commands as a dataset's name does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fgai.large import StoredGraph
from fgai.training import read_header
from support import own_cases as own
from support.cli_cases import answer, here


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in graph as a converted folder, `here/graph`."""
    folder = tmp_path_factory.mktemp("stored")
    found = answer("data", "convert", "planted", "here/graph", cwd=folder)
    assert (found["nodes"], found["edges"], found["name"]) == (2000, 15914, "planted")
    return folder


def test_a_folder_is_trained_on_and_found_again(stored: Path) -> None:
    made = answer("train", "-d", "here/graph", "--epochs", 1, cwd=stored)
    assert made["output"] == "vanilla-gat-graph.safetensors"
    header = read_header(stored / made["output"])
    assert header["about"]["dataset"] == "here/graph"
    assert header["data_fingerprint"] == StoredGraph(stored / "here" / "graph").fingerprint
    answer("attack", made["output"], "-t", "random", cwd=stored)


def test_a_folder_is_trained_on_in_batches_and_never_loaded(stored: Path) -> None:
    sizes = ("--batch-size", 400, "--fan-out", "4,3", "--epochs", 1)
    made = answer("train", "-d", "here/graph", *sizes, "-o", "batches.safetensors", cwd=stored)
    header = read_header(stored / made["output"])
    assert header["about"]["batch_size"] == 400 and header["about"]["fan_out"] == "4,3"
    faithful = answer("faithful", made["output"], "--nodes", 3, "--edges", 4, *sizes, cwd=stored)
    assert set(faithful["f1"]) == {"train", "val", "test"}
    found = answer("evaluate", faithful["output"], "--stored", "--vanilla", made["output"], cwd=stored)
    assert found["f1"] == faithful["f1"] and len(found["overlap"]) == 2 and 0 < found["agreement"] <= 1
    assert not list(stored.glob("*.partial"))


def test_what_batches_cannot_do_is_refused(stored: Path) -> None:
    for words, message in (
        (("--method", "limits", "--batch-size", 9), "batch-size"),
        (("--batch-size", 9, "--fan-out", "many"), "--fan-out"),
        (("--batch-size", 9, "--fan-out", 0), "--fan-out"),
        (("--fan-out", 3), "--batch-size"),
        (("--batch-size", 9, "--task", "link"), "--task"),
        (("--batch-size", 9, "--model", "GCN"), "row by row"),
    ):
        done = here("train", "-d", "here/graph", "--epochs", 1, *words, "--force", cwd=stored)
        assert done.exit_code == 2 and message in done.stderr, (words, done.stderr)


def test_an_own_model_goes_all_the_way_on_a_folder(tmp_path: Path) -> None:
    own.write_own(tmp_path, "mine_stored")
    data = own.own_data()
    torch.save(data, tmp_path / "data.pt")
    answer("data", "convert", "data.pt", "graph", cwd=tmp_path)
    mine = ("--model", "mine_stored:Mine", "--data", "graph")
    sizes = ("--batch-size", 15, "--fan-out", "4,3", "--epochs", 2, "--nodes", 2, "--edges", 3)
    plain = answer("evaluate", *mine, "--weights", "w.pt", "--stored", cwd=tmp_path)
    assert np.isclose(plain["f1"]["test"], own.own_accuracy(own.own_model(), data))
    steps = (("faithful", "faithful-w", ("--epoch-size", 30)), ("harden", "hardened-w", ()))
    for command, stem, more in steps:
        made = answer(command, *mine, "--weights", "w.pt", *sizes, *more, cwd=tmp_path)
        assert made["output"] == f"{stem}.safetensors" and made["batch_size"] == 15
        words = ("--weights", made["output"], "--stored", "--vanilla", "w.pt")
        found = answer("evaluate", *mine, *words, cwd=tmp_path)
        assert found["f1"] == made["f1"] and 0 < found["agreement"] <= 1 and len(found["overlap"]) == 2
    assert not list(tmp_path.glob("*.partial"))
