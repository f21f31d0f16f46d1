"""Graphs larger than memory: conversion, mini-batches and the exact pass, as the graph grows.

A directed graph with skewed degrees, ten edges per node (a few nodes get many thousands), is written to
`.npy` files and converted; then mini-batches are drawn from it and a GAT of two layers, eight heads of eight,
is evaluated on all nodes. Each size runs in a process of its own. Memory is what the process holds apart from
mapped files, above the start. Run:

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
from typing import Any

import numpy as np
import torch
from common import show

from fgai.datasets import convert
from fgai.models import GAT
from fgai.sampling import Batches, NeighbourSampler
from fgai.store import open_store
from fgai.streaming import observe_store

DEGREE, CLASSES, CHUNK = 10, 16, 1 << 20


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


def measured(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and the peak of memory above the start in MB."""
    stop, start = threading.Event(), anonymous()
    top = [start]

    def watch() -> None:
        while not stop.wait(0.005):
            top[0] = max(top[0], anonymous())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began = time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    stop.set()
    watcher.join()
    return seconds, (max(top[0], anonymous()) - start) / 2**20


def batches(folder: Path, count: int) -> int:
    """Make some mini-batches with their features; return how many seeds they had."""
    stored = open_store(folder)
    made = Batches(stored, NeighbourSampler(stored, [10, 5]), batch_size=1024)
    return sum(batch.num_seeds for batch in islice(made, count))


def one(edges: int, width: int, folder: Path) -> dict[str, float]:
    """Everything for one size."""
    model = GAT(width, CLASSES, hidden_channels=8, heads=8).eval()
    for size, name in ((2000, "warm"), (edges, "large")):
        (folder / name).mkdir()
        write_graph(folder / name, size, width)
        place = folder / name
        files = place / "edges.npy", place / "graph"
        converted = measured(lambda files=files, place=place: convert(*files, features=place / "x.npy"))
        seeds = batches(place / "graph", 1)
        began = time.perf_counter()
        seeds = batches(place / "graph", 20)
        sampled = time.perf_counter() - began
        stored = open_store(place / "graph")
        out = place / "seen"
        seen = measured(lambda stored=stored, out=out: observe_store(model, stored, out, heads="mean"))
    on_disk = sum(file.stat().st_size for file in (folder / "large" / "graph").iterdir())
    return {
        "edges": stored.num_edges,
        "convert": converted[0],
        "convert MB": converted[1],
        "seeds": seeds / sampled,
        "pass": seen[0],
        "pass MB": seen[1],
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
        million = found["edges"] / 1e6
        rows.append(
            [
                f"{found['edges']:,}",
                f"{found['disk']:.2f} GiB",
                f"{found['convert']:.1f} s ({million / found['convert']:.1f} M/s)",
                f"{found['convert MB']:.0f} MB",
                f"{found['seeds']:,.0f}",
                f"{found['pass']:.1f} s ({2 * million / found['pass']:.1f} M/s)",
                f"{found['pass MB']:.0f} MB",
            ]
        )
    columns = ["edges", "on disk", "convert (edges/s)", "memory", "seeds/s", "exact pass (edges/s)", "memory"]
    show(f"stored graphs, {given.width} features, {given.threads} threads", columns, rows)


if __name__ == "__main__":
    main()
