"""Seeds per second of mini-batches: fgai's sampler against what PyG does without pyg-lib and torch-sparse.

PyG's own `NeighborLoader` does not run without one of them. What is left to its users is `k_hop_subgraph`
(all neighbours); it stands beside fgai's sampler in the same `NodeLoader`, which also gathers 64 features per
node. The graph is drawn with skewed degrees. All ways make their batches in turns, so that other work on the
machine meets them alike; without workers the clock is the processor's. Run:

    python benchmarks/sampling.py --edges 1e6 1e7 --threads 1 --json benchmarks/sampling.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from common import arguments, show
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput
from torch_geometric.utils import k_hop_subgraph

from fgai.large import NeighbourSampler

DEGREE, WIDTH = 16, 64
LEAST = "k_hop_subgraph, all neighbours"


class KHop(BaseSampler):
    """All neighbours, by PyG's `k_hop_subgraph`."""

    def __init__(self, data: Data, hops: int) -> None:
        self.data, self.hops = data, hops

    def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput:
        """Everything within reach of the batch's nodes."""
        nodes, edges, _, mask = k_hop_subgraph(
            index.node, self.hops, self.data.edge_index, True, self.data.num_nodes
        )
        found = SamplerOutput(nodes, edges[0], edges[1], mask.nonzero().flatten())
        found.metadata = (index.input_id, index.time)
        return found

    def sample_from_edges(self, *_: Any) -> SamplerOutput:
        """Refuse: PyG asks for links of every sampler, too."""
        raise TypeError("KHop samples around nodes, not around links")


def skewed(edges: int) -> Data:
    generator = torch.Generator().manual_seed(0)
    nodes = max(64, edges // DEGREE)
    ends = (torch.rand(2, edges, generator=generator, dtype=torch.float64) ** 2 * nodes).long()
    ends[0] = torch.randperm(nodes, generator=generator)[ends[0]]
    return Data(torch.randn(nodes, WIDTH, generator=generator), ends, num_nodes=nodes)


def seeds_per_second(
    loaders: dict[str, Iterable[Any]], most: int, clock: Callable[[], float]
) -> dict[str, float]:
    """Medians over the batches but the first, which starts workers and compiles kernels."""
    batches = {name: iter(loader) for name, loader in loaders.items()}
    rates: dict[str, list[float]] = {name: [] for name in loaders}
    for number in range(most + 1):
        for name, made in batches.items():
            began = clock()
            batch = next(made, None)
            if number and batch is not None:
                rates[name].append(batch.batch_size / (clock() - began))
    return {name: statistics.median(found) for name, found in rates.items()}


def measure(edges: int, given: argparse.Namespace) -> dict[str, float]:
    """Seeds per second of every way on a graph of one size."""
    data, fan_out = skewed(edges), given.fan_out
    seeds = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(1))
    options = {"input_nodes": seeds, "batch_size": given.batch_size, "num_workers": given.workers}

    def loader(sampler: BaseSampler) -> NodeLoader:
        return NodeLoader(data, node_sampler=sampler, **options)

    ways: dict[str, Iterable[Any]] = {
        LEAST: loader(KHop(data, len(fan_out))),
        "fgai, all neighbours": loader(NeighbourSampler(data, [-1] * len(fan_out))),
        "fgai": loader(NeighbourSampler(data, fan_out)),
    }
    return seeds_per_second(ways, given.batches, time.perf_counter if given.workers else time.process_time)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--edges", type=float, nargs="+", default=[1e6])
    parser.add_argument("--fan-out", type=int, nargs="+", default=[10, 5])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    sizes = {}
    for edges in given.edges:
        found = sizes[f"{edges:.0e}"] = measure(int(edges), given)
        rows = [[name, f"{rate:,.0f}", f"{rate / found[LEAST]:.1f}×"] for name, rate in found.items()]
        title = (
            f"{edges:,.0f} edges, fan-out {given.fan_out}, {given.batch_size} seeds, {given.workers} workers"
        )
        show(title, ["sampler", "seeds per second", "it ÷ k_hop_subgraph"], rows)
    if given.json is not None:
        given.json.write_text(json.dumps(sizes, indent=1) + "\n")


if __name__ == "__main__":
    main()
