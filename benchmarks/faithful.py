"""Faithful training against vanilla training: seconds and peak memory per epoch, side by side.

Both run as `fgai.train` and `fgai.make_faithful` run them, with their defaults; on the GPU
their steps are captured in CUDA graphs. Validation is not counted. Faithful epochs of different kinds (clean
graph, attacked graph) take turns, so times are means over pairs of epochs, and medians over those. On the CPU
each way runs in a process of its own. Run:

    python benchmarks/faithful.py --datasets amazon-photo coauthor-physics arxiv-tape --model GAT
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys

import torch
from common import PeakMemory, show

import fgai
from fgai.attention import add_limits, prepared
from fgai.training import FaithfulSettings, TrainConfig, Vanilla, fit, untrained
from fgai.training.faithful import Faithful

WAYS = ("vanilla", "fgai")
TRAINED = 20
"""Epochs of the vanilla model that the faithful one is made from: enough to have something to say."""


def measure(way: str, dataset: str, model: str, epochs: int, device: str, threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    graph = fgai.load_dataset(dataset)
    if way == "vanilla":
        network = untrained(model, graph).to(device)
        graph = prepared(network, graph)
        recipe: object = Vanilla(graph)
    else:
        graph = graph.to(device)
        vanilla = fgai.train(model, graph, epochs=TRAINED, progress=False).eval()
        graph = prepared(vanilla, graph)
        recipe = Faithful(vanilla, graph, FaithfulSettings())
        network = copy.deepcopy(vanilla)
        if recipe.settings.limits:
            add_limits(network)
    fit(network, recipe, TrainConfig(epochs=4, validate_every=999), progress=False)  # compiles
    # On the GPU the first 32 epochs, with the captures among them, are read in one go.
    more = 32 if device.startswith("cuda") else 4
    config = TrainConfig(epochs=epochs + more, validate_every=10_000, weight_decay=0.0)
    with PeakMemory(device) as memory:
        history = fit(network, recipe, config, progress=False)
    times = history.epoch_seconds[more:]
    pairs = [(a + b) / 2 for a, b in zip(times[::2], times[1::2], strict=False)]
    return {"seconds": statistics.median(pairs), "bytes": memory.above}


def in_process(args: argparse.Namespace, dataset: str, way: str) -> dict[str, float]:
    """Measure one way, on the CPU in a process of its own."""
    if args.device.startswith("cuda"):
        torch.cuda.empty_cache()
        return measure(way, dataset, args.model, args.epochs, args.device, args.threads)
    command = [sys.executable, __file__, "--way", way, "--datasets", dataset, "--model", args.model]
    command += ["--epochs", str(args.epochs), "--device", args.device, "--threads", str(args.threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--datasets", nargs="+", default=["amazon-photo", "coauthor-physics"])
    parser.add_argument("--model", default="GAT")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        found = measure(args.way, args.datasets[0], args.model, args.epochs, args.device, args.threads)
        print(json.dumps(found))
        return
    rows = []
    for dataset in args.datasets:
        one, two = (in_process(args, dataset, way) for way in WAYS)
        rows.append(
            [
                f"{args.model} {dataset}",
                f"{one['seconds'] * 1e3:.3f} ms",
                f"{two['seconds'] * 1e3:.3f} ms",
                f"{two['seconds'] / one['seconds']:.2f}×",
                f"{one['bytes'] / 2**20:.0f} MiB",
                f"{two['bytes'] / 2**20:.0f} MiB",
                f"{two['bytes'] / max(1, one['bytes']):.2f}×",
            ]
        )
    columns = [
        "model, data",
        "vanilla",
        "fgai",
        "time ratio",
        "vanilla memory",
        "fgai memory",
        "memory ratio",
    ]
    show(f"Per epoch, {args.device}", columns, rows)


if __name__ == "__main__":
    main()
