"""Vanilla GAT training three ways: fgai, PyG on dense features, PyG on fgai's sparse projection.

An epoch is one full-graph training step, as `fgai.train` runs it: on the GPU captured in a CUDA graph and
replayed. PyG runs eagerly, as its users do. Validation is not counted. On the CPU each way runs in a process
of its own, so that its peak memory is its own. Run:

    python benchmarks/training.py --datasets amazon-photo coauthor-physics --epochs 20
"""

from __future__ import annotations

import argparse

import torch
from common import Measured, Peak, epoch_cost, median_seconds, show_ways, way_arguments
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, elu
from torch_geometric.nn import GATConv

import fgai
from fgai.attention import prepared
from fgai.models.layer import Projection
from fgai.ops import dropout as sparse_dropout
from fgai.training import VanillaRecipe

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
        hidden = dropout(x, 0.6) if self.project is None else self.project(sparse_dropout(x, 0.6))
        hidden = dropout(elu(self.first(hidden, edge_index)), 0.6)
        return self.second(hidden, edge_index)


def measure_fgai(graph: fgai.Graph, epochs: int, device: str) -> Measured:
    model = fgai.GAT.for_data(graph, hidden_channels=8, heads=8, num_layers=2).to(device)
    return epoch_cost(model, VanillaRecipe(prepared(model, graph)), epochs, device)


def measure_pyg(graph: fgai.Graph, epochs: int, device: str, *, sparse: bool) -> Measured:
    model: nn.Module = PyGAT(graph.num_features, graph.num_classes, sparse=sparse).to(device).train()
    graph = fgai.GAT.for_data(graph).prepare(graph).to(device)
    inputs = (graph.features if sparse else graph.features.to_dense(), graph.edge_index)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    nodes = graph.train_mask.nonzero().flatten()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(*inputs)[nodes], graph.y[nodes]).backward()
        optimizer.step()

    step()
    with Peak(device) as memory:
        seconds = median_seconds(step, epochs, device)
    return {"seconds": seconds, "bytes": memory.above}


def measure(given: argparse.Namespace, way: str, dataset: str) -> Measured:
    graph = fgai.load_dataset(dataset)
    if way == "fgai":
        return measure_fgai(graph, given.epochs, given.device)
    return measure_pyg(graph, given.epochs, given.device, sparse=way == "pyg-sparse")


def main() -> None:
    parser = way_arguments(__doc__, WAYS, ["amazon-photo", "coauthor-physics"])
    show_ways("Vanilla GAT training step", parser.parse_args(), measure)


if __name__ == "__main__":
    main()
