"""Graphs larger than memory: conversion, mini-batches and the exact pass, as the graph grows.

A directed graph with skewed degrees, ten edges per node (a few nodes get many thousands), is written to
`.npy` files and converted; then mini-batches are drawn from it and a GAT of two layers, eight heads of eight,
is evaluated on all nodes. Each size runs in a process of its own. Beside the seconds stand those of all its
threads on the processor, which other work on the machine does not stretch; rates are by these. Memory is what
the process holds apart from mapped files, above the start. Run:

    python benchmarks/streaming.py --edges 1e6 1e7 --width 128 --folder /a/large/disk
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import show

from fgai.datasets import convert
from fgai.models import GAT
from fgai.sampling import Batches, NeighbourSampler
from fgai.store import open_store
from fgai.streaming import observe_store

DEGREE, CLASSES, CHUNK, SEEDS = 10, 16, 1 << 20, 1024


def write_graph(folder: Path, edges: int, width: int) -> None:
    """Write `edges.npy` [2, E] and `x.npy` [N, F], part by part."""
    random, nodes = np.random.default_rng(0), edges // DEGREE
    ends = np.lib.format.open_memmap(folder / "edges.npy", "w+", np.int32, (2, edges))
    for first in range(0, edges, CHUNK):
        part = ends[:, first : first + CHUNK]
        part[0] = random.integers(0, nodes, part.shape[1])
        part[1] = random.random(part.shape[1]) ** 3 * nodes  # crowded at the low end
    x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (nodes, width))
    for first in range(0, nodes, CHUNK // width):
        part = x[first : first + CHUNK // width]
        part[:] = random.standard_normal(part.shape, np.float32)


def anonymous() -> int:
    """Bytes this process holds apart from mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Cost(NamedTuple):
    """Seconds, seconds on the processor, and the peak of memory above the start in MB."""

    seconds: float
    cpu: float
    memory: float

    def shown(self, count: float) -> str:
        """Seconds and rate in words."""
        return f"{self.seconds:.1f} s, {self.cpu:.1f} CPU ({count / self.cpu:,.0f})"


def measured(work: Callable[[], Any]) -> Cost:
    stop, start = threading.Event(), anonymous()
    top = [start]

    def watch() -> None:
        while not stop.wait(0.02):
            top[0] = max(top[0], anonymous())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began, used = time.perf_counter(), time.process_time()
    work()
    seconds, cpu = time.perf_counter() - began, time.process_time() - used
    stop.set()
    watcher.join()
    return Cost(seconds, cpu, (max(top[0], anonymous()) - start) / 2**20)


def batches(folder: Path, count: int) -> None:
    """Make some mini-batches with their features."""
    stored = open_store(folder)
    for _ in islice(Batches(stored, NeighbourSampler(stored, [10, 5]), batch_size=SEEDS), count):
        pass


def one(edges: int, width: int, folder: Path) -> dict[str, Any]:
    """Everything for one size."""
    model = GAT(width, CLASSES, hidden_channels=8, heads=8).eval()
    for size, name in ((2000, "warm"), (edges, "large")):
        (folder / name).mkdir()
        write_graph(folder / name, size, width)
        place = folder / name
        files = place / "edges.npy", place / "graph"
        converted = measured(lambda files=files, place=place: convert(*files, features=place / "x.npy"))
        sampled = measured(lambda place=place: batches(place / "graph", 20))
        stored = open_store(place / "graph")
        out = place / "seen"
        seen = measured(lambda stored=stored, out=out: observe_store(model, stored, out, heads="mean"))
    on_disk = sum(file.stat().st_size for file in (folder / "large" / "graph").iterdir())
    return {
        "edges": stored.num_edges,
        "convert": converted,
        "batches": sampled,
        "pass": seen,
        "disk": on_disk / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--edges", type=float, nargs="+", default=[1e6, 1e7])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--folder", type=Path, help="for the graphs; a temporary one by default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="print one size as JSON")
    given = parser.parse_args()
    if given.alone:
        torch.set_num_threads(given.threads)
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            print(json.dumps(one(int(given.edges[0]), given.width, Path(folder))))
        return
    rows = []
    for edges in given.edges:
        words = [sys.executable, __file__, "--alone", "--edges", str(edges), "--width", str(given.width)]
        words += ["--threads", str(given.threads)]
        words += [] if given.folder is None else ["--folder", str(given.folder)]
        found = json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        converted, sampled, seen = (Cost(*found[name]) for name in ("convert", "batches", "pass"))
        rows.append(
            [
                f"{found['edges']:,}",
                f"{found['disk']:.2f} GiB",
                converted.shown(found["edges"]),
                f"{converted.memory:.0f} MB",
                sampled.shown(20 * SEEDS),
                seen.shown(2 * found["edges"]),
                f"{seen.memory:.0f} MB",
            ]
        )
    columns = ["edges", "on disk", "convert (edges/s)", "memory", "20 batches (seeds/s)"]
    columns += ["exact pass (edges/s)", "memory"]
    show(f"stored graphs, {given.width} features, {given.threads} threads", columns, rows)


if __name__ == "__main__":
    main()
