"""Numbers on the page about large graphs are those that were measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from fgai.large import graph_size, pass_size
from fgai.models import GAT

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
SIZES: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "streaming.json").read_text())
RATES: dict[str, dict[str, float]] = json.loads((ROOT / "benchmarks" / "sampling.json").read_text())
GPU: dict[str, Any] = json.loads((ROOT / "benchmarks" / "epoch-gpu.json").read_text())[0]
EPOCHS: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "epoch.json").read_text())
NAMES = {
    "k_hop_subgraph, all neighbours": "`k_hop_subgraph`, all neighbours",
    "fgai, all neighbours": "fgai, all neighbours",
    "torch operations, with replacement": "a sampler in torch operations, with replacement, 10 and 5",
    "fgai": "fgai, without replacement, 10 and 5",
    "fgai, with replacement": "fgai, with replacement, 10 and 5",
}


def three(value: float) -> str:
    """Three digits that count."""
    return f"{float(f'{value:.3g}'):,.0f}"


def rate(found: dict[str, Any], part: str) -> float:
    amount = {"convert": found["edges"], "batches": found["seeds"], "pass": 2 * found["edges"]}[part]
    return float(amount / found[part]["cpu"])


def row(found: dict[str, Any]) -> str:
    cells = [
        f"{found['edges'] / 1e6:.1f} M",
        f"{found['largest_degree']:,}",
        f"{found['disk'] / 2**30:.2f} GiB",
        three(rate(found, "convert")),
        f"{found['convert']['memory']:.0f} MiB",
        three(rate(found, "batches")),
        three(rate(found, "pass")),
        f"{found['pass']['memory']:.0f} MiB",
    ]
    return f"| {' | '.join(cells)} |"


def slope(part: str, sizes: list[dict[str, Any]] = SIZES) -> float:
    """Of log seconds on the processor over log edges: 1 is linear."""
    logs = np.log([[found["edges"], found[part]["cpu"]] for found in sizes])
    return float(np.polyfit(logs[:, 0], logs[:, 1], 1)[0])


def test_sizes_and_rates() -> None:
    assert [round(np.log10(found["edges"])) for found in SIZES] == [6, 7, 8]
    for found in SIZES:
        assert row(found) in PAGE
    assert (
        f"the slope is {slope('convert'):.2f} for the conversion and {slope('pass'):.2f} for the pass" in PAGE
    )


def test_seconds_of_the_largest() -> None:
    seconds = {part: f"{SIZES[-1][part]['cpu']:.0f}" for part in ("convert", "begin", "pass")}
    assert (
        f"{seconds['convert']} seconds of one core to convert, {seconds['begin']} before the first mini-batch"
        f", {seconds['pass']} for the exact pass"
    ) in PAGE


def test_the_largest_is_as_large_as_foretold() -> None:
    for found in SIZES:
        stored = graph_size(found["nodes"], found["edges"], found["features"]).stored
        assert 0 < found["disk"] - stored < 2000  # headings and the manifest


def test_epochs() -> None:
    assert [round(np.log10(found["edges"])) for found in EPOCHS] == [6, 7, 8]
    for found in EPOCHS:
        cells = [f"{found['edges'] / 1e6:.1f} M"]
        for part in ("vanilla", "faithful"):
            cost = found[part]
            cells += [f"{cost['seeds']:,}", three(cost["seeds_per_second"]), f"{cost['cpu']:.1f} s"]
            cells += [f"{cost['memory']:.0f} MiB"]
        cells += [f"{found['evaluate']['cpu']:.1f} s", f"{found['evaluate']['memory']:.0f} MiB"]
        assert f"| {' | '.join(cells)} |" in PAGE
    slopes = [f"{slope(part, EPOCHS):.2f}" for part in ("faithful", "evaluate")]
    assert f"the slope is {slopes[0]} for faithful training and {slopes[1]} for the evaluation" in PAGE
    largest = EPOCHS[-1]
    words = [f"{largest[part]['seconds']:,.0f}" for part in ("convert", "vanilla", "faithful", "evaluate")]
    assert (
        f"{words[0]} seconds to convert, {words[1]} for the epoch of training, {words[2]} for that of"
        f" faithful training and {words[3]} for the evaluation" in PAGE
    )


def test_an_epoch_on_a_gpu() -> None:
    train, faithful, other = GPU["vanilla"], GPU["faithful"], GPU["evaluate"]
    assert f"On one {GPU['device']} with {GPU['threads']} cores" in PAGE
    said = " ".join(PAGE.split())
    memory = max(part["memory"] for part in (train, faithful, other))
    for words in (
        f"{train['seconds']:.1f} seconds for the epoch of training ({three(train['seeds_per_second'])} seeds",
        f"{faithful['seconds']:.1f} for one of faithful training over {GPU['share']:.0%} of".replace(
            "%", " %"
        ),
        f"({three(faithful['seeds_per_second'])} seeds a second; its steps take {faithful['steps']:.1f}",
        f"{other['seconds']:.1f} for the evaluation of both models",
        f"{memory:.0f} MiB at the most, the GPU {GPU['device_memory'] / 1024:.1f} GiB",
    ):
        assert words in said


def test_samplers() -> None:
    for name, words in NAMES.items():
        cells = [f"{found[name] / found['k_hop_subgraph, all neighbours']:.1f}" for found in RATES.values()]
        assert f"| {words} | {' | '.join(cells)} |" in PAGE


def test_papers100m_on_paper() -> None:
    nodes, edges, features, classes = 111_059_956, 1_615_685_872, 128, 172
    size, gib = graph_size(nodes, edges, features, labels=True), 1 << 30
    model = GAT(features, classes, hidden_channels=8, heads=8)
    seen = pass_size(model, nodes, edges + nodes, features, heads="mean")
    largest = SIZES[-1]
    hours = {
        "convert": edges / rate(largest, "convert") / 3600,
        "pass": 2 * (edges + nodes) / rate(largest, "pass") / 3600,
    }
    cells = {
        "the folder": f"{size.stored / gib:.0f} GiB on disk",
        "conversion": f"{size.converting / gib:.0f} GiB on disk, {size.converting_memory / gib:.1f} GiB of"
        f" memory, {hours['convert']:.1f} hours of one core",
        "as a `Graph` in memory": f"{size.loaded / gib:.0f} GiB",
        "exact pass": f"{seen.running / gib:.0f} GiB on disk, {hours['pass']:.1f} hours of one core",
    }
    read = [nodes * width * 4 / gib for width in (8 * 8, classes)]
    assert f"{read[0]:.0f} GiB in the first layer and {read[1]:.0f} GiB in the second" in PAGE
    for what, words in cells.items():
        assert re.search(rf"^\| {re.escape(what)}[^|]*\| {re.escape(words)}", PAGE, re.MULTILINE), words
