"""Tiny data and models of every task, for the suites that run over all three."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, global_mean_pool

from fgai.attention import prepared
from fgai.datasets import fold_split, link_split
from fgai.graph import Graph
from fgai.models import GAT, GT, GATv2
from fgai.tasks import task_of
from fgai.training import AdversarialRecipe, HardenSettings, make_faithful, train
from support import attack_cases as cases
from support.graph_cases import small_data

TASKS = ("node", "link", "graph")
MODELS: dict[str, Any] = {"gat": GAT, "gatv2": GATv2, "gt": GT}


@cache
def batch_of_graphs(count: int = 30, seed: int = 3, sparse: bool = False) -> Graph:
    """Small graphs of 5 to 8 nodes: rings of one class, stars of the other, features with noise."""
    draw = torch.Generator().manual_seed(seed)
    edges, batch, labels, start = [], [], [], 0
    for index in range(count):
        size = int(torch.randint(5, 9, (1,), generator=draw))
        label = index % 2
        ends = [(i, (i + 1) % size) for i in range(size)] if label else [(0, i) for i in range(1, size)]
        edges += [(start + a, start + b) for a, b in ends]
        batch += [index] * size
        labels.append(label)
        start += size
    y = torch.tensor(labels)
    of = torch.tensor(batch)
    features = torch.nn.functional.one_hot(y[of], 4).float() * 0.7
    features += 0.5 * torch.rand(start, 4, generator=draw)
    masks = {f"{name}_mask": mask[of] for name, mask in fold_split(y, 1, folds=5)._asdict().items()}
    given: Any = features
    if sparse:
        from scipy.sparse import csr_matrix

        given = csr_matrix((features * (features > 0.3)).numpy())
    return Graph.from_edges(
        torch.tensor(edges).t(), start, given, undirected=True, batch=of, graph_y=y, name="tiny", **masks
    )


@cache
def data(task: str) -> Graph:
    """30 nodes with classes, 40 nodes with hidden links, or 30 small graphs."""
    if task == "node":
        return cases.tiny_graph()
    if task == "link":
        return link_split(small_data(seed=2, nodes=40), 1, train=0.7, val=0.1)
    return batch_of_graphs()


class Mine(nn.Module):
    """A user's PyG model: embeddings or node logits, pooled when a batch is given."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.first, self.second = GATConv(width, 4, heads=3, dropout=0.2), GATConv(12, out, heads=1)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        out = self.second(torch.nn.functional.elu(self.first(x, edge_index)), edge_index)
        return out if batch is None else global_mean_pool(out, batch)


def untrained(task: str, model: str = "gat", **arguments: Any) -> nn.Module:
    """A small model with seeded weights."""
    graph = data(task)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        if model == "mine":
            return Mine(graph.num_features, 7 if task == "link" else graph.num_classes)
        sizes: dict[str, Any] = {"hidden_channels": 4, "heads": 3}
        if model == "gt":
            sizes = {"hidden_channels": 12, "heads": (3, 1), "encodings": 4}
        if task == "link":
            sizes["out_channels"] = 7
        return MODELS[model].for_data(graph, **sizes, **arguments)


@cache
def trained(task: str, recipe: str = "vanilla", model: str = "gat") -> nn.Module:
    """A model after a few epochs of a recipe; shared by tests, so none may change it."""
    graph = data(task)
    if recipe == "vanilla":
        return train(untrained(task, model), graph, epochs=15, lr=0.03, progress=False)
    vanilla = trained(task, "vanilla", model)
    if recipe == "faithful":
        return make_faithful(vanilla, graph, nodes=2, edges=3, epochs=3, progress=False)
    settings = HardenSettings(nodes=2, edges=3, attack_weight=0.5)
    against = AdversarialRecipe(prepared(vanilla, task_of(graph).view(graph, "fit")), settings)
    return train(vanilla, graph, recipe=against, epochs=3, progress=False)
