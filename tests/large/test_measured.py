"""Numbers on the page about large graphs are those that were measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fgai.large import graph_size

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
SIZES: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "streaming.json").read_text())
RATES: dict[str, dict[str, float]] = json.loads((ROOT / "benchmarks" / "sampling.json").read_text())
GPU: dict[str, Any] = json.loads((ROOT / "benchmarks" / "epoch-gpu.json").read_text())[0]
EPOCHS: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "epoch.json").read_text())


SEEDS = ("vanilla", "faithful")


def test_sizes_and_seconds() -> None:
    assert [round(np.log10(found["edges"])) for found in SIZES] == [6, 7, 8]
    for found, epoch in zip(SIZES, EPOCHS, strict=True):
        seconds = [found["convert"]["cpu"], found["pass"]["cpu"], *(epoch[part]["cpu"] for part in SEEDS)]
        memory = max(
            part["memory"]
            for parts in (found, epoch)
            for part in parts.values()
            if isinstance(part, dict) and "memory" in part
        )
        cells = [f"{found['edges'] / 1e6:.0f} M", f"{found['disk'] / 2**30:.2g} GiB"]
        cells += [f"{value:,.1f} s" if value < 1 else f"{value:,.0f} s" for value in seconds]
        assert f"| {' | '.join([*cells, f'{memory:,.0f} MiB'])} |" in PAGE


def test_the_largest_is_as_large_as_foretold() -> None:
    for found in SIZES:
        stored = graph_size(found["nodes"], found["edges"], found["features"]).disk
        assert 0 < found["disk"] - stored < 2000  # headings and the manifest


def test_an_epoch_on_a_gpu() -> None:
    text = " ".join(PAGE.split())
    for words in (
        f"On one {GPU['device'].removeprefix('NVIDIA ')} with {GPU['threads']} cores",
        f"takes {GPU['vanilla']['seconds']:.1f} s for the epoch of training",
        f"{GPU['faithful']['seconds']:.1f} s for one of faithful training over {100 * GPU['share']:.0f} % of",
        f"{GPU['evaluate']['seconds']:.1f} s for the evaluation of both models",
    ):
        assert words in text


def test_samplers() -> None:
    gains = [found["fgai"] / found["k_hop_subgraph, all neighbours"] for found in RATES.values()]
    assert f"{min(gains):.0f} to {max(gains):.0f} times as fast as `k_hop_subgraph`" in PAGE
