"""A converted folder serves the commands as a dataset's name does."""

from __future__ import annotations

from pathlib import Path

from fgai.training import read_header
from support.cli_cases import answer, here


def test_a_folder_is_trained_on_and_found_again(tmp_path: Path) -> None:
    stored = answer("data", "convert", "planted", "here/graph", cwd=tmp_path)
    assert (stored["nodes"], stored["edges"], stored["name"]) == (2000, 15914, "planted")
    made = answer("train", "-d", "here/graph", "--epochs", 1, cwd=tmp_path)
    assert made["output"] == "vanilla-gat-graph.safetensors"
    header = read_header(tmp_path / made["output"])
    assert header["about"]["dataset"] == "here/graph"
    assert header["data_fingerprint"] == stored["fingerprint"]
    answer("attack", made["output"], "-t", "random", cwd=tmp_path)


def test_a_folder_is_trained_on_in_batches_and_never_loaded(tmp_path: Path) -> None:
    answer("data", "convert", "planted", "graph", cwd=tmp_path)
    sizes = ("--batch-size", 400, "--fan-out", "4,3", "--epochs", 1)
    made = answer("train", "-d", "graph", *sizes, cwd=tmp_path)
    header = read_header(tmp_path / made["output"])
    assert header["about"]["batch_size"] == 400 and header["about"]["fan_out"] == "4,3"
    faithful = answer("faithful", made["output"], "--nodes", 3, "--edges", 4, *sizes, cwd=tmp_path)
    assert set(faithful["f1"]) == {"train", "val", "test"}
    found = answer("evaluate", faithful["output"], "--stored", "--vanilla", made["output"], cwd=tmp_path)
    assert found["f1"] == faithful["f1"] and len(found["overlap"]) == 2 and 0 < found["agreement"] <= 1
    assert not list(tmp_path.glob("*.partial"))


def test_what_batches_cannot_do_is_refused(tmp_path: Path) -> None:
    answer("data", "convert", "planted", "graph", cwd=tmp_path)
    for words, message in (
        (("--method", "at", "--batch-size", 9), "batch-size"),
        (("--batch-size", 9, "--fan-out", "many"), "--fan-out"),
        (("--batch-size", 9, "--fan-out", 0), "--fan-out"),
        (("--fan-out", 3), "--batch-size"),
        (("--batch-size", 9, "--task", "link"), "--task"),
        (("--batch-size", 9, "--model", "GCN"), "row by row"),
    ):
        done = here("train", "-d", "graph", "--epochs", 1, *words, cwd=tmp_path)
        assert done.exit_code == 2 and message in done.stderr, (words, done.stderr)
