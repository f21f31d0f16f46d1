"""PyG models in which nodes also meet outside the recorded attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, GPSConv, GraphNorm

CLASSES, WIDTH = 3, 8


class Coupled(nn.Module):
    """Two GATConv, and between them what joins further nodes.

    Args:
        kind: `gps`, `norm` (over all nodes), `virtual` (a node that all others read), `gcn` (one more hop),
            `head` (the norm stands behind the attention), or `plain` for nothing.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.enter, self.first = nn.Linear(WIDTH, 8), GATConv(8, 8)
        if kind == "gps":
            self.first = GPSConv(8, self.first, heads=2)
        self.norm = GraphNorm(8) if kind in ("norm", "head") else nn.Identity()
        self.gcn = GCNConv(8, 8) if kind == "gcn" else None
        self.second, self.leave = GATConv(8, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.first(self.enter(x), edge_index)
        if self.kind == "virtual":
            h = h + h.mean(0, keepdim=True)
        if self.kind == "norm":
            h = self.norm(h)
        if self.gcn is not None:
            h = self.gcn(h, edge_index)
        h = self.second(torch.tanh(h), edge_index)
        return self.leave(self.norm(h) if self.kind == "head" else h)  # type: ignore[no-any-return]


def coupled_model(kind: str) -> Coupled:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Coupled(kind).eval()


def ring_data(nodes: int = 150) -> Data:
    """A ring with a few chords: an injected node reaches a few nodes in two hops."""
    generator = torch.Generator().manual_seed(1)
    ring = torch.arange(nodes)
    near = torch.stack([torch.cat([ring, ring]), torch.cat([(ring + 1) % nodes, (ring + 2) % nodes])])
    masks = torch.arange(nodes) % 3
    return Data(
        x=torch.randn(nodes, WIDTH, generator=generator),
        edge_index=torch.cat([near, near.flip(0)], 1),
        y=torch.randint(CLASSES, (nodes,), generator=generator),
        train_mask=masks == 0,
        val_mask=masks == 1,
        test_mask=masks == 2,
    )
