"""Voting over groups of nodes: an injected node is heard in one group, whatever it does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv

import fgai
from fgai.attention import prepared
from fgai.certificates import vote
from fgai.certificates.voting import _counted, group_of, spoken_by
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import GAT, GT
from fgai.training import features_alone
from support import attack_cases as cases

GROUPS = 9


class Plain(nn.Module):
    """A user's model."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.first, self.second = GATConv(features, 4, heads=2), GATConv(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Joined(Plain):
    """A user's model with a norm over all nodes."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out = super().forward(x, edge_index)
        return out - out.mean(0)


@pytest.mark.parametrize("kind", ["gat", "gatv2", "gcn", "pyg"])
def test_no_injection_beats_the_certificate(kind: str) -> None:
    torch.manual_seed(0)
    graph = cases.tiny_graph()
    model = Plain(graph.num_features).eval() if kind == "pyg" else cases.trained(kind, "vanilla")
    found = vote(model, graph, groups=GROUPS)
    assert int(found.votes.sum(1).unique()) == GROUPS and found.share(0) == 1.0
    stream = torch.Generator().manual_seed(1)
    seen = 0
    for injected in (1, 2, 3):
        held = found.tolerated >= injected
        seen += int(held.sum())
        for _ in range(3):
            ends = torch.stack(
                [torch.randperm(graph.num_nodes, generator=stream)[:12] for _ in range(injected)]
            )
            loud = 50 * torch.randn(injected, graph.num_features, generator=stream)
            after = vote(model, graph.inject(ends, loud)[0], groups=GROUPS)
            old = slice(0, graph.num_nodes)
            assert torch.equal(after.classes[old][held], found.classes[held])
            moved = (after.votes[old] - found.votes).clamp(min=0).sum(1)
            assert int(moved.max()) <= injected
    assert seen > 0


def test_new_nodes_leave_the_others_in_their_groups() -> None:
    first, more = group_of(torch.arange(1000), 7, 3), group_of(torch.arange(1500), 7, 3)
    assert torch.equal(first, more[:1000])
    assert int(torch.bincount(more, minlength=7).min()) > 150
    assert not torch.equal(first, group_of(torch.arange(1000), 7, 4))


def test_only_speakers_are_heard() -> None:
    graph = cases.tiny_graph()
    speakers = torch.arange(graph.num_nodes) % 3 == 0
    heard = spoken_by(graph, speakers)
    assert bool(speakers[heard.adjacency.source].all())
    assert heard.num_edges == int(speakers[graph.adjacency.source].sum())


def test_margins_and_ties_by_hand() -> None:
    votes = torch.tensor([[5, 2, 2], [4, 4, 1], [1, 4, 4], [2, 7, 0], [0, 0, 9], [3, 6, 0]])
    found = _counted(votes, 9)
    assert found.classes.tolist() == [0, 0, 1, 1, 2, 1]
    assert found.tolerated.tolist() == [1, 0, 0, 2, 4, 1]  # a smaller class takes ties


def test_what_joins_all_nodes_is_refused() -> None:
    graph = cases.tiny_graph()
    with pytest.raises(InputError, match="other ways than along edges"):
        vote(Joined(graph.num_features).eval(), graph, groups=3)
    with pytest.raises(InputError, match="encodings of the whole graph"):
        vote(GT.for_data(graph).eval(), graph, groups=3)
    with pytest.raises(InputError, match="`groups`"):
        vote(GAT.for_data(graph), graph, groups=0)


def test_features_alone_see_no_edge() -> None:
    data = fgai.load_dataset("planted")
    stream = torch.Generator().manual_seed(0)
    edges = torch.randint(data.num_nodes, (2, 4000), generator=stream)
    other = Graph.from_edges(
        torch.unique(edges, dim=1),
        data.num_nodes,
        data.features.to_dense(),
        y=data.y,
        train_mask=data.train_mask,
        val_mask=data.val_mask,
        test_mask=data.test_mask,
    )
    scores = [features_alone(graph, epochs=4, progress=False) for graph in (data, other)]
    assert scores[0] == scores[1] and 0.1 < scores[0] < 1
    assert prepared(GAT.for_data(data), data).num_edges > 0
