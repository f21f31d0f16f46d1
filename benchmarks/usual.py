"""Faithful training the usual way against fgai's: seconds per epoch, side by side.

The usual way, written afresh here: PyG's layers on dense features; every epoch two attacks from a cold start,
one on the predictions and one on the attention, each of ten full forward and backward passes on the graph
with the injected nodes; then one loss over the clean and both attacked graphs. fgai: `FaithfulRecipe` with
its preset. Both inject as many nodes with as many edges; each way runs in a process of its own. Run:

    python benchmarks/usual.py --datasets amazon-photo --epochs 3
    python benchmarks/usual.py --datasets coauthor-physics --epochs 1
"""

from __future__ import annotations

import argparse
import itertools

import torch
from common import Measured, Peak, epoch_cost, median_seconds, show_ways, way_arguments
from torch import Tensor, nn
from torch.nn.functional import elu
from torch_geometric.nn import GATConv, GATv2Conv

import fgai
from fgai.attacks import draw_endpoints
from fgai.attention import prepared
from fgai.graph import Graph
from fgai.training import FaithfulSettings, untrained_model
from fgai.training.faithful import FaithfulRecipe

WAYS = ("fgai", "usual")
STEPS, STEP_SIZE, TOP = 10, 0.1, 5


class Usual(nn.Module):
    """Two attention layers of PyG; also gives the attention of the last."""

    def __init__(self, kind: str, width: int, classes: int) -> None:
        super().__init__()
        layer = {"GAT": GATConv, "GATv2": GATv2Conv}[kind]
        self.first = layer(width, 8, heads=8, add_self_loops=False)
        self.second = layer(64, classes, heads=1, add_self_loops=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and the last layer's attention [E]."""
        hidden = elu(self.first(x, edge_index))
        logits, (_, attention) = self.second(hidden, edge_index, return_attention_weights=True)
        return logits, attention.mean(1)


class UsualTraining:
    """Closeness, similarity and both stabilities, with two cold attacks an epoch."""

    def __init__(self, kind: str, graph: Graph, nodes: int, edges: int) -> None:
        assert graph.features is not None
        self.x, self.edge_index = graph.features.to_dense(), graph.edge_index
        self.count, self.nodes, self.edges = graph.num_nodes, nodes, edges
        self.pool = torch.arange(graph.num_nodes)
        self.vanilla = Usual(kind, graph.num_features, graph.num_classes).eval()
        self.model = Usual(kind, graph.num_features, graph.num_classes)
        with torch.no_grad():
            self.target, self.attention = self.vanilla(self.x, self.edge_index)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003)

    def epoch(self, number: int) -> None:
        """One step of training."""
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            clean = self.model(self.x, self.edge_index)
        hits = [self.attack(clean, generator, explain=explain) for explain in (False, True)]
        logits, attention = self.model(self.x, self.edge_index)
        loss = distance(logits, self.target) + overlap(attention, self.attention)
        for hit in hits:
            moved, weights = self.model(*hit)
            loss = loss + distance(logits, moved[: self.count])
            loss = loss + overlap(attention, weights[: len(attention)])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def attack(
        self, clean: tuple[Tensor, Tensor], generator: torch.Generator, *, explain: bool
    ) -> tuple[Tensor, Tensor]:
        """Return features and edges with new nodes that climbed for ten steps from a random start."""
        ends = draw_endpoints(self.pool, self.nodes, self.edges, generator)
        new = self.count + torch.arange(self.nodes)
        near, far = new[:, None].expand_as(ends).flatten(), ends.flatten()
        joined = torch.stack([torch.cat([near, far, new]), torch.cat([far, near, new])])
        edge_index = torch.cat([self.edge_index, joined], dim=1)
        rows = 2 * torch.rand(self.nodes, self.x.shape[1], generator=generator) - 1
        for _ in range(STEPS):
            rows = rows.detach().requires_grad_()
            logits, attention = self.model(torch.cat([self.x, rows]), edge_index)
            if explain:
                value = overlap(clean[1], attention[: len(clean[1])])
            else:
                value = distance(clean[0], logits[: self.count])
            (gradient,) = torch.autograd.grad(value, rows)
            rows = (rows + STEP_SIZE * gradient.sign()).clamp(-1, 1)
        return torch.cat([self.x, rows.detach()]), edge_index


def distance(one: Tensor, two: Tensor) -> Tensor:
    """Total variation of logits, mean over nodes."""
    return (one - two).abs().sum(1).mean() / 2


def overlap(one: Tensor, two: Tensor) -> Tensor:
    """The surrogate of top-k overlap over all edges: l1 on the largest of one and on those of the other."""
    count = TOP * 1000
    first, second = (t.detach().topk(min(count, len(t))).indices for t in (one, two))
    return ((one - two).abs()[first].sum() + (one - two).abs()[second].sum()) / (2 * count)


def measure(given: argparse.Namespace, way: str, dataset: str) -> Measured:
    graph = fgai.load_dataset(dataset)
    model = untrained_model(given.model, graph)
    graph = prepared(model, graph)
    config = FaithfulSettings()
    if way == "usual":
        training = UsualTraining(given.model, graph, config.nodes, config.edges)
        numbers = itertools.count()
        with Peak("cpu") as memory:
            seconds = median_seconds(lambda: training.epoch(next(numbers)), given.epochs, "cpu", warm_up=0)
        return {"seconds": seconds, "bytes": memory.above}
    recipe, faithful = FaithfulRecipe(model.eval(), graph, config), untrained_model(given.model, graph)
    return epoch_cost(faithful, recipe, 20, "cpu")


def main() -> None:
    parser = way_arguments(__doc__, WAYS, ["amazon-photo"])
    parser.set_defaults(epochs=3)  # of the usual way; fgai's are always 20
    show_ways("One epoch of faithful training", parser.parse_args(), measure)


if __name__ == "__main__":
    main()
