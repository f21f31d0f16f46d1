"""Heterogeneous graphs and models: three types of nodes, five of edges, one of which has no edges."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import elu
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, GATv2Conv, HANConv, HeteroConv, HGTConv, TransformerConv, to_hetero

WRITES = ("author", "writes", "paper")
WRITTEN = ("paper", "written_by", "author")
CITES = ("paper", "cites", "paper")
HOSTS = ("venue", "hosts", "paper")
DRAFTS = ("author", "drafts", "paper")
SHOWS = ("paper", "shown_at", "venue")
KINDS = [WRITES, WRITTEN, CITES, HOSTS, DRAFTS, SHOWS]
PAPERS, AUTHORS, VENUES, CLASSES = 60, 24, 7, 3
WIDTHS = {"paper": 6, "author": 8, "venue": 5}
LAYERS = {"gat": GATConv, "gatv2": GATv2Conv, "transformer": TransformerConv}


def hetero_data(seed: int = 0) -> HeteroData:
    """Papers whose authors and citations tell their class; paper 0 has no author, and nobody drafts."""
    draw = torch.Generator().manual_seed(seed)
    data = HeteroData()
    y = torch.randint(CLASSES, (PAPERS,), generator=draw)
    group = torch.arange(AUTHORS) % CLASSES
    data["paper"].x = _noisy(y, WIDTHS["paper"], 1.0, draw)
    data["author"].x = _noisy(group, WIDTHS["author"], 0.3, draw)
    data["venue"].x = torch.randn(VENUES, WIDTHS["venue"], generator=draw)
    data["paper"].y = y
    order = torch.randperm(PAPERS, generator=draw)
    for name, part in (("train", order[:24]), ("val", order[24:34]), ("test", order[34:])):
        data["paper"][f"{name}_mask"] = torch.zeros(PAPERS, dtype=torch.bool).index_fill_(0, part, True)
    chances = torch.where(group[:, None] == y[None], 0.7, 0.08)
    chances[:, 0] = 0.0
    writes = (torch.rand(AUTHORS, PAPERS, generator=draw) < chances).nonzero().T
    data[WRITES].edge_index = writes[:, torch.randperm(writes.shape[1], generator=draw)]
    data[WRITTEN].edge_index = writes.flip(0)
    alike = torch.where(y[:, None] == y[None], 0.25, 0.02)
    cites = (torch.rand(PAPERS, PAPERS, generator=draw) < alike).nonzero().T
    data[CITES].edge_index = cites[:, cites[0] != cites[1]]
    data[HOSTS].edge_index = torch.stack([torch.arange(PAPERS) % VENUES, torch.arange(PAPERS)])
    data[DRAFTS].edge_index = torch.zeros(2, 0, dtype=torch.long)
    data[SHOWS].edge_index = data[HOSTS].edge_index.flip(0)
    return data


def _noisy(group: Tensor, width: int, noise: float, draw: torch.Generator) -> Tensor:
    centres = torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(5))
    return centres[group] + noise * torch.randn(len(group), width, generator=draw)


class TwoLayers(nn.Module):
    """What `to_hetero` is given: two layers of attention, widths left to the first call."""

    def __init__(self, kind: str, heads: int = 2) -> None:
        super().__init__()
        options = {} if kind == "transformer" else {"add_self_loops": False}
        self.conv1 = LAYERS[kind]((-1, -1), 8, heads=heads, **options)
        self.conv2 = LAYERS[kind]((-1, -1), CLASSES, heads=1, **options)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv2(elu(self.conv1(x, edge_index)), edge_index)


class TwoHetero(nn.Module):
    """Two heterogeneous layers and a classifier of papers, whose logits it returns alone."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.conv1, self.conv2 = make(WIDTHS, 8), make(8, 8)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: dict[str, Tensor], edges: dict[tuple[str, str, str], Tensor]) -> Tensor:
        hidden = {name: elu(h) for name, h in self.conv1(x, edges).items() if h is not None}
        return self.out(self.conv2(hidden, edges)["paper"])


def hetero_model(kind: str, data: HeteroData, seed: int = 0) -> nn.Module:
    """A model by name: `gat`, `gatv2`, `transformer` by `to_hetero`, `heteroconv`, `han` or `hgt`."""
    torch.manual_seed(seed)
    if kind in LAYERS:
        model: nn.Module = to_hetero(TwoLayers(kind), data.metadata())
    elif kind == "heteroconv":
        model = TwoHetero(
            lambda _, width: HeteroConv(
                {one: GATConv((-1, -1), width // 2, heads=2, add_self_loops=False) for one in KINDS}
            )
        )
    else:
        layer = HANConv if kind == "han" else HGTConv
        model = TwoHetero(lambda widths, width: layer(widths, width, data.metadata(), heads=2))
    with torch.no_grad():
        model(data.x_dict, data.edge_index_dict)
    return model.eval()


def trained(kind: str, data: HeteroData, epochs: int = 60, seed: int = 0) -> nn.Module:
    """The same, trained on the papers of the training mask."""
    model = hetero_model(kind, data, seed).train()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    mask = data["paper"].train_mask
    for _ in range(epochs):
        optimiser.zero_grad()
        found = model(data.x_dict, data.edge_index_dict)
        logits = found["paper"] if isinstance(found, dict) else found
        nn.functional.cross_entropy(logits[mask], data["paper"].y[mask]).backward()
        optimiser.step()
    return model.eval()
