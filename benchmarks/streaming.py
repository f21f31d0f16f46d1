"""Graphs larger than memory: conversion, mini-batches and the exact pass, as the graph grows.

A directed graph whose in-degrees follow a power law of exponent 5/2, ten edges per node, is written to `.npy`
files part by part and converted; then mini-batches are drawn from it and a GAT of two layers, eight heads of
eight, is evaluated on all nodes. Each size runs in a process of its own. Beside the seconds stand those of
all its threads on the processor, which other work on the machine does not stretch; rates are by these. Memory
is what the process holds apart from mapped files, above the start. The numbers in docs/scale.md are those of

    python benchmarks/streaming.py --edges 1e6 1e7 1e8 --threads 1 --json benchmarks/streaming.json
"""

from __future__ import annotations

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Cost, each_size, measured, show, size_arguments

from fgai.large import Batches, NeighbourSampler, StoredGraph, convert, observe_store
from fgai.models import GAT

DEGREE, CLASSES, CHUNK, SEEDS, BATCHES = 10, 16, 1 << 20, 1024, 40


def write_graph(folder: Path, edges: int, width: int) -> None:
    """Write `edges.npy` [2, E] and `x.npy` [N, F], part by part."""
    random, nodes = np.random.default_rng(0), edges // DEGREE
    ends = np.lib.format.open_memmap(folder / "edges.npy", "w+", np.int32, (2, edges))
    for first in range(0, edges, CHUNK):
        part = ends[:, first : first + CHUNK]
        part[0] = random.integers(0, nodes, part.shape[1])
        # The cube makes the degree of node i fall like i^(-2/3): a power law of exponent 1 + 3/2.
        part[1] = random.random(part.shape[1]) ** 3 * nodes
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (nodes, width))

    def draw(first: int) -> None:
        part = x[first : first + CHUNK // width]
        part[:] = np.random.default_rng([1, first]).standard_normal(part.shape, np.float32)

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(draw, range(0, nodes, CHUNK // width)))


class Sampling:
    """Mini-batches with their features: what it takes to begin, and then some of them."""

    def begin(self, folder: Path) -> None:
        """Look at all indices, draw the order of the seeds, and make the first batch."""
        stored = StoredGraph(folder)
        self._batches = iter(Batches(stored, NeighbourSampler(stored, [10, 5]), batch_size=SEEDS))
        next(self._batches, None)

    def go_on(self) -> None:
        """Make more of them."""
        for _ in islice(self._batches, BATCHES):
            pass


def one(edges: int, width: int, folder: Path) -> dict[str, Any]:
    """Everything for one size, after a small graph has warmed the kernels up."""
    model = GAT(width, CLASSES, hidden_channels=8, heads=8).eval()
    found: dict[str, Cost] = {}
    for size, place in ((2000, folder / "warm"), (edges, folder / "large")):
        place.mkdir()
        sampling, graph = Sampling(), place / "graph"
        steps = {
            "write": lambda size=size, place=place: write_graph(place, size, width),
            "convert": lambda place=place, graph=graph: convert(
                place / "edges.npy", graph, features=place / "x.npy"
            ),
            "begin": lambda sampling=sampling, graph=graph: sampling.begin(graph),
            "batches": sampling.go_on,
            "pass": lambda place=place, graph=graph: observe_store(
                model, StoredGraph(graph), place / "seen", heads="mean"
            ),
        }
        found = {name: measured(step) for name, step in steps.items()}
    stored = StoredGraph(graph)
    return {
        "nodes": stored.num_nodes,
        "edges": stored.num_edges,
        "features": width,
        "largest_degree": int(np.diff(stored.rows().rowptr).max()),
        "disk": sum(file.stat().st_size for file in graph.iterdir()),
        "seeds": min(BATCHES * SEEDS, max(0, stored.num_nodes - SEEDS)),
        **{name: cost._asdict() for name, cost in found.items()},
    }


def row(found: dict[str, Any]) -> list[str]:
    """One size in words."""
    amounts = {"convert": found["edges"], "batches": found["seeds"], "pass": 2 * found["edges"]}
    words = {
        name: f"{found[name]['seconds']:.1f} s, {found[name]['cpu']:.1f} CPU"
        f" ({amount / found[name]['cpu']:,.0f}), {found[name]['memory']:.0f} MiB"
        for name, amount in amounts.items()
    }
    return [f"{found['edges']:,}", f"{found['disk'] / 2**30:.2f} GiB", *words.values()]


def main() -> None:
    given = size_arguments(__doc__, (1e6, 1e7)).parse_args()
    if given.alone:
        torch.set_num_threads(given.threads)
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            print(json.dumps(one(int(given.edges[0]), given.width, Path(folder))))
        return
    sizes = each_size(given)
    columns = ["edges", "on disk", "convert (edges/s)", f"{BATCHES} batches (seeds/s)"]
    columns += ["exact pass (edges × layers/s)"]
    title = f"stored graphs, {given.width} features, {given.threads} threads"
    show(title, columns, [row(found) for found in sizes])


if __name__ == "__main__":
    main()
