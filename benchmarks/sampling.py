"""Seeds per second of mini-batches: fgai's sampler against what PyG does without pyg-lib and torch-sparse.

PyG's own `NeighborLoader` does not run without one of them. What is left to its users is `k_hop_subgraph`
(all neighbours), or a sampler of their own in torch operations; both stand beside fgai's here, all in the
same `NodeLoader`, which also gathers 64 features per node. If pyg-lib or torch-sparse can be imported,
`NeighborLoader` is measured, too. The graph is drawn with skewed degrees. All ways make their batches in
turns, so that other work on the machine meets them alike; without workers the clock is the processor's. Run:

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
from common import show
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader, NodeLoader
from torch_geometric.sampler import BaseSampler, NodeSamplerInput, SamplerOutput
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
from torch_geometric.utils import k_hop_subgraph

from fgai.large import NeighbourSampler

DEGREE, WIDTH = 16, 64
LEAST = "k_hop_subgraph, all neighbours"


class OfNodes(BaseSampler):
    """PyG asks for links of every sampler; these draw around nodes alone."""

    def sample_from_edges(self, *_: Any) -> SamplerOutput:
        """Refuse, in words."""
        raise TypeError(f"{type(self).__name__} samples around nodes, not around links")


class KHop(OfNodes):
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


class Vectorised(OfNodes):
    """Neighbours drawn with replacement by torch operations over all nodes of a hop."""

    def __init__(self, data: Data, fan_out: list[int]) -> None:
        self.fan_out = fan_out
        self.order = torch.argsort(data.edge_index[1], stable=True)
        self.source = data.edge_index[0][self.order]
        self.degree = torch.bincount(data.edge_index[1], minlength=data.num_nodes)
        self.first = self.degree.cumsum(0) - self.degree

    def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput:
        """Some of what is within reach of the batch's nodes."""
        frontier, sources, targets, edges = index.node, [], [], []
        for count in self.fan_out:
            there = frontier[self.degree[frontier] > 0]
            place = (torch.rand(len(there), count) * self.degree[there][:, None]).long()
            place = (place + self.first[there][:, None]).flatten()
            edges.append(place)
            targets.append(there.repeat_interleave(count))
            sources.append(self.source[place])
            frontier = sources[-1].unique()
        every = torch.cat([index.node, torch.cat(sources)])
        nodes, inverse = every.unique(return_inverse=True)
        where = torch.empty(int(nodes.max()) + 1, dtype=torch.long)
        where[nodes] = torch.arange(len(nodes))
        column = where[torch.cat(targets)]
        found = SamplerOutput(nodes, inverse[len(index.node) :], column, torch.cat(edges))
        found.metadata = (index.input_id, index.time)
        return found

    @property
    def edge_permutation(self) -> Tensor:
        """The order by destination."""
        return self.order


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
        "torch operations, with replacement": loader(Vectorised(data, fan_out)),
        "fgai": loader(NeighbourSampler(data, fan_out)),
        "fgai, with replacement": loader(NeighbourSampler(data, fan_out, replace=True)),
    }
    if WITH_PYG_LIB or WITH_TORCH_SPARSE:
        ways["NeighborLoader"] = NeighborLoader(data, fan_out, **options)
    return seeds_per_second(ways, given.batches, time.perf_counter if given.workers else time.process_time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--edges", type=float, nargs="+", default=[1e6])
    parser.add_argument("--fan-out", type=int, nargs="+", default=[10, 5])
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
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
