"""Vanilla GAT training three ways: fgai, PyG on dense features, PyG on fgai's sparse projection.

Each way runs in a process of its own, so that its peak memory is its own. Run:

    python benchmarks/training.py --datasets amazon-photo coauthor-physics --epochs 20
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import torch
from common import PeakMemory, median_seconds, show
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, elu
from torch_geometric.nn import GATConv

import fgai
from fgai.models.layer import Projection

WAYS = ("fgai", "pyg-dense", "pyg-sparse")


class PyGAT(nn.Module):
    """The same two-layer network from PyG's layers; the first projection may be fgai's sparse one."""

    def __init__(self, width: int, classes: int, *, sparse: bool) -> None:
        super().__init__()
        self.project = Projection(width, 64, bias=False) if sparse else None
        self.first = GATConv(64 if sparse else width, 8, heads=8, add_self_loops=False)
        if sparse:
            self.first.lin = nn.Identity()
        self.second = GATConv(64, classes, heads=1, add_self_loops=False)

    def forward(self, x: object, edge_index: Tensor) -> Tensor:
        """Return the logits."""
        hidden = dropout(x, 0.6) if self.project is None else self.project(x.dropout(0.6))
        hidden = dropout(elu(self.first(hidden, edge_index)), 0.6)
        return self.second(hidden, edge_index)


def measure(way: str, dataset: str, epochs: int, device: str, threads: int) -> dict[str, float]:
    torch.set_num_threads(threads)
    graph = fgai.load(dataset)
    model: nn.Module = fgai.GAT.for_data(graph)
    graph = model.prepare(graph).to(device)
    if way == "fgai":
        inputs: tuple[object, ...] = (graph,)
    else:
        model = PyGAT(graph.num_features, graph.num_classes, sparse=way == "pyg-sparse")
        features = graph.features if way == "pyg-sparse" else graph.features.to_dense()
        inputs = (features, graph.edge_index)
    model = model.to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    nodes = graph.train_mask.nonzero().flatten()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(*inputs)[nodes], graph.y[nodes]).backward()
        optimizer.step()

    if way == "fgai":
        step()  # the kernels' one-time compilation is not training
    with PeakMemory(device) as memory:
        seconds = median_seconds(step, epochs, device)
    return {"seconds": seconds, "bytes": memory.above}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--datasets", nargs="+", default=["amazon-photo", "coauthor-physics"])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.way, args.datasets[0], args.epochs, args.device, args.threads)))
        return
    rows = []
    for dataset in args.datasets:
        found = {}
        for way in WAYS:
            command = [
                sys.executable,
                __file__,
                "--way",
                way,
                "--datasets",
                dataset,
                "--epochs",
                str(args.epochs),
            ]
            command += ["--device", args.device, "--threads", str(args.threads)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[way] = json.loads(done.stdout.splitlines()[-1])
        base = found["fgai"]
        for way, value in found.items():
            rows.append(
                [
                    f"{dataset} {way}",
                    f"{value['seconds'] * 1e3:.1f} ms",
                    f"{value['seconds'] / base['seconds']:.1f}×",
                    f"{value['bytes'] / 2**20:.0f} MiB",
                    f"{value['bytes'] / max(1, base['bytes']):.1f}×",
                ]
            )
    columns = ["way", "median epoch", "time ÷ fgai", "peak memory above baseline", "memory ÷ fgai"]
    show(f"Vanilla GAT, {args.epochs} epochs, {args.device}", columns, rows)


if __name__ == "__main__":
    main()
