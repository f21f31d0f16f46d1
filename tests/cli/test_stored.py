"""A converted folder serves the commands as a dataset's name does."""

from __future__ import annotations

from pathlib import Path

from fgai.training import read_header
from support.cli_cases import answer


def test_a_folder_is_trained_on_and_found_again(tmp_path: Path) -> None:
    stored = answer("data", "convert", "planted", "here/graph", cwd=tmp_path)
    assert (stored["nodes"], stored["edges"], stored["name"]) == (2000, 15914, "planted")
    made = answer("train", "-d", "here/graph", "--epochs", 1, cwd=tmp_path)
    assert made["output"] == "vanilla-gat-graph.safetensors"
    header = read_header(tmp_path / made["output"])
    assert header["about"]["dataset"] == "here/graph"
    assert header["data_fingerprint"] == stored["fingerprint"]
    answer("attack", made["output"], "-t", "random", cwd=tmp_path)
