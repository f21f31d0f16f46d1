"""What the benchmarks share: peak memory above a baseline, medians, growth over sizes, and a table."""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

# Scripts are started from anywhere; the experiments lie beside this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from experiments.memory import PeakMemory
from fgai.training import TrainConfig, fit

Peak = partial(PeakMemory, every=0.002)
"""Of the benchmarks: memory is sampled more often than in cells."""


def anonymous() -> int:
    """Bytes this process holds apart from mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


class Cost(NamedTuple):
    """Seconds, seconds on the processor, and the peak of memory above the start in MiB."""

    seconds: float
    cpu: float
    memory: float


def measured(work: Callable[[], object]) -> Cost:
    """Do some work and say what it took."""
    with PeakMemory("cpu", every=0.02, size=anonymous) as memory:
        began, used = time.perf_counter(), time.process_time()
        work()
        seconds, cpu = time.perf_counter() - began, time.process_time() - used
    return Cost(seconds, cpu, memory.above / 2**20)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a script's docstring, with the number of threads."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    return parser


def size_arguments(doc: str | None, sizes: Sequence[float]) -> argparse.ArgumentParser:
    """Return the arguments of a benchmark over graphs of several sizes, each in a process of its own."""
    parser = arguments(doc)
    parser.add_argument("--edges", type=float, nargs="+", default=list(sizes))
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--folder", type=Path, help="for the graphs; a temporary one by default")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    parser.add_argument("--alone", action="store_true", help="print one size as JSON")
    return parser


def run_alone(*words: str) -> Any:
    """Run a script in a process of its own, and return the JSON in its last line."""
    done = subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def each_size(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the script once more for each size, alone, and write down what is there after each."""
    found: list[dict[str, Any]] = []
    for edges in given.edges:
        found.append(run_alone(*sys.argv, "--edges", str(edges), "--alone"))
        if given.json is not None:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    return found


Measured = dict[str, float]


def way_arguments(doc: str | None, ways: Sequence[str], datasets: Sequence[str]) -> argparse.ArgumentParser:
    """Return the arguments of a benchmark that measures the same work in several ways."""
    parser = arguments(doc)
    parser.add_argument("--datasets", nargs="+", default=list(datasets))
    parser.add_argument("--model", default="GAT")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--ways", nargs="+", default=list(ways), choices=ways)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    return parser


def each_way(
    given: argparse.Namespace, measure: Callable[[argparse.Namespace, str, str], Measured]
) -> Iterator[tuple[str, dict[str, Measured]]]:
    """Yield what `measure(given, way, dataset)` returns by way for each dataset, alone on the CPU.

    There every way runs in a process of its own, so that its peak memory is its own.
    """
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    if given.alone:
        print(json.dumps(measure(given, given.ways[0], given.datasets[0])))
        return
    for dataset in given.datasets:
        found: dict[str, Measured] = {}
        for way in given.ways:
            if given.device.startswith("cuda"):
                gc.collect()
                torch.cuda.empty_cache()
                found[way] = measure(given, way, dataset)
                continue
            found[way] = run_alone(*sys.argv, "--ways", way, "--datasets", dataset, "--alone")
        yield dataset, found


def show_ways(
    title: str, given: argparse.Namespace, measure: Callable[[argparse.Namespace, str, str], Measured]
) -> None:
    """Measure every way on every dataset; print time and memory, and their ratios to the first way."""
    rows = []
    for dataset, found in each_way(given, measure):
        base = found[given.ways[0]]
        for way, value in found.items():
            ratios = (value[name] / max(base[name], 1e-9) for name in ("seconds", "bytes"))
            speed, memory = (f"{ratio:.1f}×" for ratio in ratios)
            took, peak = milliseconds(value["seconds"]), mebibytes(value["bytes"])
            rows.append([f"{dataset} {way}", took, speed, peak, memory])
    first = given.ways[0]
    columns = ["way", "median step", f"time ÷ {first}", "peak memory above baseline", f"memory ÷ {first}"]
    if rows:
        show(f"{title}, {given.device}, {given.threads} threads", columns, rows)


def epoch_cost(model: nn.Module, recipe: Any, epochs: int, device: str, **options: Any) -> Measured:
    """Return the median seconds of an epoch of `fit`, without validation, and its peak memory.

    The first epochs compile; on the GPU the first 32, with the captures among them, are read in one go.
    Epochs of different kinds may take turns, so times are means over pairs of epochs.
    """
    first = 32 if device.startswith("cuda") and not options else 8
    config = TrainConfig(epochs=epochs + first, validate_every=10_000, weight_decay=0.0)
    fit(model, recipe, TrainConfig(epochs=4, validate_every=10_000), progress=False)
    with Peak(device) as memory:
        history = fit(model, recipe, config, progress=False, **options)
    times = history.epoch_seconds[first:]
    pairs = [(a + b) / 2 for a, b in zip(times[::2], times[1::2], strict=False)]
    return {"seconds": statistics.median(pairs), "bytes": memory.above}


def milliseconds(seconds: float) -> str:
    """Write a time."""
    return f"{seconds * 1e3:.3f} ms"


def mebibytes(size: float) -> str:
    """Write a size."""
    return f"{size / 2**20:.0f} MiB"


def growth(amounts: Sequence[float], costs: Sequence[float]) -> float:
    """Slope of log cost over log amount: 1 is linear; NaN for fewer than two."""
    if len(amounts) < 2:
        return math.nan
    return float(np.polyfit(np.log(amounts), np.log(costs), 1)[0])


def median_seconds(step: Callable[[], object], repeats: int, device: str, warm_up: int = 2) -> float:
    """Median time of `step` over `repeats`, after a warm-up; on the GPU between events on its stream."""
    times = []
    if device.startswith("cuda"):
        for _ in range(warm_up):
            step()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        torch.cuda.synchronize()
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)) / 1e3
    for index in range(warm_up + repeats):
        began = time.perf_counter()
        step()
        if index >= warm_up:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def captured(step: Callable[[], object]) -> Callable[[], None]:
    """Return a replay of `step`, captured in a CUDA graph after a warm-up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def copy_bandwidth(device: str) -> float:
    """Return the bytes per second of a large copy, reads and writes counted."""
    size = 2**28 if device.startswith("cuda") else 2**26
    source, target = (torch.ones(size, device=device) for _ in range(2))
    return 2 * 4 * size / median_seconds(lambda: target.copy_(source), 9, device)


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table."""
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    Console(width=150).print(table)
