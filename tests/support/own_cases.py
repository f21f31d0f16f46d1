"""A user's own model with edge features, and the data it was trained on."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, elu
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

from support.graph_cases import small_data

WIDTH, CLASSES, EDGE_DIM = 6, 3, 2
CONVS: dict[str, type[nn.Module]] = {
    "GATv2Conv": GATv2Conv,
    "GATConv": GATConv,
    "TransformerConv": TransformerConv,
}


class OwnNet(nn.Module):
    """Two attention layers that read edge features, as in PyG's examples."""

    def __init__(self, conv: str = "GATv2Conv", width: int = WIDTH, classes: int = CLASSES) -> None:
        super().__init__()
        self.first = CONVS[conv](width, 4, heads=2, edge_dim=EDGE_DIM)
        self.second = CONVS[conv](8, classes, edge_dim=EDGE_DIM)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.second(elu(self.first(x, edge_index, edge_attr)), edge_index, edge_attr)


MODULE = """
import torch
from torch.nn.functional import elu
from torch_geometric.nn import GATv2Conv
import fgai

class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = GATv2Conv(6, 4, heads=2, edge_dim=2)
        self.second = GATv2Conv(8, 3, edge_dim=2)

    def forward(self, x, edge_index, edge_attr):
        return self.second(elu(self.first(x, edge_index, edge_attr)), edge_index, edge_attr)

class Nested(Mine):
    def forward(self, g):
        return super().forward(g.x, g.edge_index, g.edge_attr)

def call(model, g):
    return model(g)

def wrapped():
    return fgai.wrap(Nested(), call)

def number():
    return 3
"""


def write_own(folder: Path, name: str) -> Path:
    """Write a module of the user's with `OwnNet` in it, and the weights of `own_model` as `w.pt`."""
    (folder / f"{name}.py").write_text(MODULE)
    torch.save(own_model().state_dict(), folder / "w.pt")
    return folder


def own_net() -> OwnNet:
    """What `tests.support.own_cases:own_net` names."""
    return OwnNet()


def own_data(seed: int = 3) -> Data:
    """Small data whose edges come in a random order; their features tell whether they join equals."""
    data = small_data().to_data()
    generator = torch.Generator().manual_seed(seed)
    data.edge_index = data.edge_index[:, torch.randperm(data.num_edges, generator=generator)]
    same = (data.y[data.edge_index[0]] == data.y[data.edge_index[1]]).float()
    data.edge_attr = torch.stack([same, torch.rand(data.num_edges, generator=generator)], dim=1)
    return data


def reordered(data: Data, seed: int) -> Data:
    """The same edges, with what they carry, in another order."""
    order = torch.randperm(data.num_edges, generator=torch.Generator().manual_seed(seed))
    other = data.clone()
    other.edge_index, other.edge_attr = data.edge_index[:, order], data.edge_attr[order]
    return other


@cache
def own_model(conv: str = "GATv2Conv") -> OwnNet:
    """Trained by the user's own loop; shared by tests, so none may change it."""
    data = own_data()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = OwnNet(conv)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(30):
        optimiser.zero_grad()
        logits = model(data.x, data.edge_index, data.edge_attr)
        cross_entropy(logits[data.train_mask], data.y[data.train_mask]).backward()
        optimiser.step()
    return model.eval()


@torch.no_grad()
def own_accuracy(model: nn.Module, data: Data) -> float:
    """As a user computes it."""
    right = model(data.x, data.edge_index, data.edge_attr).argmax(1) == data.y
    return float(right[data.test_mask].double().mean())
