"""Faithful training against vanilla training: seconds and peak memory per epoch, side by side.

Both use fgai's kernels. Each runs in a process of its own; validation is not counted. Run:

    python benchmarks/faithful.py --datasets amazon-photo coauthor-physics --model GAT
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

import torch
from common import PeakMemory, show

import fgai
from fgai.training import FaithfulConfig, TrainConfig, Vanilla, fit, prepared, preset, untrained
from fgai.training.faithful import Faithful

WAYS = ("vanilla", "fgai")


def measure(way: str, dataset: str, model: str, epochs: int, device: str, threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    graph = fgai.load(dataset)
    network = untrained(model, graph).to(device)
    graph = prepared(network, graph)
    config = TrainConfig(epochs=epochs, validate_every=10 * epochs, weight_decay=0.0)
    if way == "vanilla":
        recipe: object = Vanilla(graph)
    else:
        network.eval()
        changes = preset("fgai", model, dataset)
        recipe = Faithful(network, graph, FaithfulConfig().replace(**changes))
    twin = untrained(model, graph).to(device)
    fit(twin, recipe, TrainConfig(epochs=2, validate_every=20), progress=False)
    with PeakMemory(device) as memory:
        history = fit(twin, recipe, config, progress=False)
    return {"seconds": statistics.median(history.epoch_seconds[2:]), "bytes": memory.above}


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
        found = {}
        for way in WAYS:
            command = [sys.executable, __file__, "--way", way, "--datasets", dataset, "--model", args.model]
            command += ["--epochs", str(args.epochs), "--device", args.device, "--threads", str(args.threads)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[way] = json.loads(done.stdout.splitlines()[-1])
        one, two = found["vanilla"], found["fgai"]
        rows.append(
            [
                f"{args.model} {dataset}",
                f"{one['seconds'] * 1e3:.1f} ms",
                f"{two['seconds'] * 1e3:.1f} ms",
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
