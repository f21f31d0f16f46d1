"""A training step of a PyG model: PyG eager, PyG compiled, and `fgai.accelerate`.

Three layers of 4 × 64 channels on 64 random features per node, in float32, without dropout. Every way runs
in a process of its own; compilation is not counted. Run:

    python benchmarks/accelerate.py --datasets arxiv-tape --epochs 3
    python benchmarks/accelerate.py --model GATv2 --datasets coauthor-physics
"""

from __future__ import annotations

import argparse

import torch
from common import Measured, Peak, median_seconds, show_ways, way_arguments
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, elu
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

import fgai

WAYS = ("accelerated", "eager", "compiled")
LAYERS = {"GAT": GATConv, "GATv2": GATv2Conv, "GT": TransformerConv}
WIDTH, CHANNELS, HEADS = 64, 64, 4


class Net(nn.Module):
    """Three attention layers of PyG, as its users write them."""

    def __init__(self, kind: str, classes: int) -> None:
        super().__init__()
        sizes = WIDTH, CHANNELS * HEADS, CHANNELS * HEADS
        self.layers = nn.ModuleList(LAYERS[kind](size, CHANNELS, heads=HEADS) for size in sizes)
        self.out = nn.Linear(CHANNELS * HEADS, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return the logits."""
        for layer in self.layers:
            x = elu(layer(x, edge_index))
        return self.out(x)


def measure(given: argparse.Namespace, way: str, dataset: str) -> Measured:
    graph = fgai.load_dataset(dataset)
    torch.manual_seed(0)
    model: nn.Module = Net(given.model, graph.num_classes)
    if way == "accelerated":
        model = fgai.accelerate(model)
    model = model.to(given.device).train()
    run = torch.compile(model) if way == "compiled" else model
    x = torch.randn(graph.num_nodes, WIDTH, device=given.device)
    edge_index, labels = graph.edge_index.to(given.device), graph.y.clamp(min=0).to(given.device)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(run(x, edge_index), labels).backward()
        optimizer.step()

    step()
    with Peak(given.device) as memory:
        seconds = median_seconds(step, given.epochs, given.device)
    return {"seconds": seconds, "bytes": memory.above}


def main() -> None:
    given = way_arguments(__doc__, WAYS, ["arxiv-tape"]).parse_args()
    show_ways(f"Training step of {given.model}, three layers of PyG", given, measure)


if __name__ == "__main__":
    main()
