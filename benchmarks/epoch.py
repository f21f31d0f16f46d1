"""One epoch of training and one of faithful training on a graph that is never loaded, as it grows.

The graph of `streaming.py`. A tenth of its nodes have a label, the strongest of their first features; a
tenth of those train, and as many validate. A GAT of two layers, eight heads of eight, takes an epoch of
`fgai.train` over the training nodes and an epoch of `fgai.make_faithful` over a share of all nodes
(`--share`), in mini-batches of 1024 seeds with a fan-out of 10 and 5; then both models are evaluated on all
nodes, by exact passes.

Each size runs in a process of its own, after a small graph has warmed the kernels up. Seeds per second are
by the steps of an epoch; other seconds include the exact passes before and after it and the validation.
Growth is that of the seconds of all threads on the processor, as other work on the machine does not stretch
them. Memory is what the process holds apart from mapped files, above the start. The numbers in
docs/scale.md are those of

    python benchmarks/epoch.py --edges 1e6 1e7 1e8 --json benchmarks/epoch.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Cost, each_size, growth, measured, show, size_arguments
from streaming import CLASSES, SEEDS, write_graph
from torch import nn

import fgai
from fgai.large import StoredGraph, convert, evaluate_store
from fgai.training import history_of

FAN_OUT, LABELLED = (10, 5), 0.1
MODEL: dict[str, Any] = {"hidden_channels": 8, "heads": 8, "num_layers": 2}
TRAINING: dict[str, Any] = {
    "epochs": 1, "progress": False, "batch_size": SEEDS, "fan_out": FAN_OUT,
}  # fmt: skip


def write_labels(folder: Path) -> None:
    """Write `y.npy` [N]: which of the first features is the largest, of some nodes; -1 of the others."""
    x = np.load(folder / "x.npy", mmap_mode="r")
    known = np.flatnonzero(np.random.default_rng(2).random(len(x)) < LABELLED)
    y = np.full(len(x), -1)
    y[known] = x[known, :CLASSES].argmax(1)
    np.save(folder / "y.npy", y)


@dataclass
class Epochs:
    """What is measured on one graph, in this order; what one step makes the next ones read."""

    folder: Path
    edges: int
    given: argparse.Namespace
    made: dict[str, Any] = field(default_factory=dict)

    @property
    def stored(self) -> StoredGraph:
        """The graph, opened anew."""
        return StoredGraph(self.folder / "graph")

    def write(self) -> None:
        """Draw edges, features and labels."""
        write_graph(self.folder, self.edges, self.given.width)
        write_labels(self.folder)

    def convert(self) -> None:
        """Make a stored graph of them; what was read goes."""
        files = {"features": self.folder / "x.npy", "labels": self.folder / "y.npy"}
        convert(self.folder / "edges.npy", self.folder / "graph", **files)
        for file in self.folder.glob("*.npy"):
            file.unlink()

    def vanilla(self) -> None:
        """One epoch over the training nodes, from new weights."""
        stored = self.stored
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = fgai.GAT(stored.num_features, CLASSES, **MODEL).to(self.given.device)
        self.made["vanilla"] = fgai.train(model, stored, **TRAINING)

    def faithful(self) -> None:
        """One epoch over a share of all nodes."""
        stored = self.stored
        seeds = round(self.given.share * stored.num_nodes)
        self.made["faithful"] = fgai.make_faithful(self.made["vanilla"], stored, epoch_size=seeds, **TRAINING)

    def evaluate(self) -> None:
        """Exact passes with both models over all nodes."""
        found = evaluate_store(self.made["faithful"], self.stored, vanilla=self.made["vanilla"])
        self.made["evaluation"] = found.to_dict()

    def costs(self) -> dict[str, Cost]:
        """Do everything."""
        steps = [self.write, self.convert, self.vanilla, self.faithful]
        steps += [self.evaluate] if self.given.evaluate else []
        return {step.__name__: measured(step) for step in steps}


def epoch_of(model: nn.Module, seeds: int, cost: Cost) -> dict[str, float]:
    """The one epoch of a training: what its steps took, and everything with them."""
    steps = history_of(model).epoch_seconds[0]
    return {"seeds": seeds, "steps": steps, "seeds_per_second": seeds / steps, **cost._asdict()}


def one(edges: int, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Everything for one size, after a small graph has warmed the kernels up."""
    for size, place in ((30_000, folder / "warm"), (edges, folder / "large")):
        place.mkdir()
        if given.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        work = Epochs(place, size, given)
        costs = work.costs()
    stored = work.stored
    nodes, labels = stored.num_nodes, stored.array("y")
    train = round(0.1 * int((labels >= 0).sum()))
    seeds = {"vanilla": train, "faithful": round(given.share * nodes)}
    return {
        "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else "cpu",
        "threads": torch.get_num_threads(),
        "nodes": nodes,
        "edges": stored.num_edges,
        "features": stored.num_features,
        "share": given.share,
        **{name: cost._asdict() for name, cost in costs.items()},
        **{name: epoch_of(work.made[name], count, costs[name]) for name, count in seeds.items()},
        "device_memory": torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0,
        "evaluation": work.made.get("evaluation"),
    }


def row(found: dict[str, Any]) -> list[str]:
    """One size in words."""
    words = [f"{found['edges']:,}"]
    for name in ("convert", "vanilla", "faithful", "evaluate"):
        if (cost := found.get(name)) is None:
            words.append("")
            continue
        rate = f" ({cost['seeds_per_second']:,.0f} seeds/s)" if "seeds" in cost else ""
        words.append(f"{cost['seconds']:.1f} s, {cost['cpu']:.1f} CPU, {cost['memory']:.0f} MiB{rate}")
    return words


def slopes(sizes: list[dict[str, Any]]) -> list[str]:
    """How seconds on the processor grow with the edges."""
    edges, words = [found["edges"] for found in sizes], ["growth"]
    for name in ("convert", "vanilla", "faithful", "evaluate"):
        costs = [found[name]["cpu"] for found in sizes if name in found]
        words.append(f"{growth(edges, costs):.2f}" if len(costs) == len(edges) > 1 else "")
    return words


def main() -> None:
    parser = size_arguments(__doc__, (1e6, 1e7))
    parser.add_argument(
        "--share", type=float, default=0.1, help="of the nodes in an epoch of faithful training"
    )
    parser.add_argument("--device", default="cpu", help="where models train: cpu or cuda")
    parser.add_argument("--evaluate", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    if given.alone:
        torch.set_num_threads(given.threads)
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            # What training computes on the way goes there, too.
            tempfile.tempdir = folder
            print(json.dumps(one(int(given.edges[0]), Path(folder), given)))
        return
    sizes = each_size(given)
    title = f"one epoch, {given.width} features, {given.device}, {given.threads} threads"
    columns = ["edges", "conversion", "training", f"faithful, {given.share:.0%} of the nodes", "evaluation"]
    show(title, columns, [*map(row, sizes), slopes(sizes)])


if __name__ == "__main__":
    main()
