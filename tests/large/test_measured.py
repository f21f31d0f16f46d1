"""Numbers on the page about large graphs are those that were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fgai.large import graph_size

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
SIZES: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "streaming.json").read_text())
EPOCHS: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "epoch.json").read_text())
GPU: dict[str, Any] = json.loads((ROOT / "benchmarks" / "epoch-gpu.json").read_text())[0]
RATES: dict[str, dict[str, float]] = json.loads((ROOT / "benchmarks" / "sampling.json").read_text())
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.endswith(" MiB |")]


def test_every_size_has_its_row() -> None:
    assert [row[0] for row in ROWS] == [f"{round(size['edges'] / 1e6)} M" for size in SIZES]
    assert [size["edges"] for size in SIZES] == [epoch["edges"] for epoch in EPOCHS]


@pytest.mark.parametrize("index", range(3))
def test_rows_are_measured(index: int) -> None:
    size, epoch, (_, disk, *seconds, memory) = SIZES[index], EPOCHS[index], ROWS[index]
    costs = [size["convert"], size["pass"], epoch["vanilla"], epoch["faithful"]]
    assert float(disk.removesuffix(" GiB")) == pytest.approx(size["disk"] / 2**30, rel=0.05)
    for word, cost in zip(seconds, costs, strict=True):
        digits = 1 if "." in word else 0
        assert word == f"{cost['cpu']:,.{digits}f} s"
    most = max(cost["memory"] for cost in [*costs, epoch["evaluate"]])
    assert memory == f"{most:,.0f} MiB"


def test_the_largest_is_as_large_as_foretold() -> None:
    for found in SIZES:
        stored = graph_size(found["nodes"], found["edges"], found["features"]).stored
        assert 0 < found["disk"] - stored < 2000  # headings and the manifest


def test_an_epoch_on_a_gpu() -> None:
    text = " ".join(PAGE.split())
    assert f"On one {GPU['device'].removeprefix('NVIDIA ')} with {GPU['threads']} cores" in text
    for words in (
        f"{GPU['vanilla']['seconds']:.1f} s for the epoch of training",
        f"{GPU['faithful']['seconds']:.1f} s for one of faithful training over {100 * GPU['share']:.0f} %",
        f"{GPU['evaluate']['seconds']:.1f} s for the evaluation",
    ):
        assert words in text


def test_sampling() -> None:
    ratios = [rates["fgai"] / rates["k_hop_subgraph, all neighbours"] for rates in RATES.values()]
    assert f"Sampling is {min(ratios):.0f} to {max(ratios):.0f} times as fast as `k_hop_subgraph`" in PAGE
