"""Voting over groups of nodes: an injected node is heard in one group, whatever it does."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]
from torch_geometric.nn import GATConv
from torch_geometric.utils import degree

import fgai
from experiments.defences import GNNSVD
from fgai.attention import call_model, prepared
from fgai.certificates import VotingCertificate, vote
from fgai.certificates.locality import _output_marks
from fgai.certificates.voting import _edges_from, _hash_groups, _majority
from fgai.datasets import planted
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import GAT, GT
from fgai.training import accuracy_without_edges
from support import attack_cases as cases
from support.ordinary_cases import ORDINARY, ordinary

GROUPS = 9


class Plain(nn.Module):
    """A user's model."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.first, self.second = GATConv(features, 4, heads=2), GATConv(8, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(self.first(x, edge_index).relu(), edge_index)


class Joined(Plain):
    """A user's model whose nodes hear of each other by another way than along edges.

    Args:
        features: width.
        join: acts on the hidden state, with features, edges and state given.
    """

    def __init__(self, features: int, join: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__(features)
        self.join = join

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        state = self.first(x, edge_index).relu()
        return torch.as_tensor(self.second(state + self.join(x, edge_index, state), edge_index))


def _in_a_thread(function: Callable[[], Tensor]) -> Tensor:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def _written(h: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, 0] = h.sum()
    return 1e-4 * out


JOINS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean": lambda x, e, h: -h.mean(0),
    "filled": lambda x, e, h: 1e-7 * torch.zeros_like(h).index_fill(0, torch.arange(3), torch.tanh(h.max())),
    "maximum": lambda x, e, h: h.max(0, keepdim=True).values,
    "little of the maximum": lambda x, e, h: 1e-3 * h.amax(0),
    "clipped maximum": lambda x, e, h: 1e-7 * torch.tanh(h.amax(0) - 1e4),
    "a threshold out of reach": lambda x, e, h: torch.relu(x.sum() - 1e30),
    "sorted": lambda x, e, h: 1e-3 * h.sort(0).values[:1],
    "softmax over nodes": lambda x, e, h: torch.softmax(h, 0),
    "sum into one row": lambda x, e, h: h.new_zeros(1, h.shape[1]).index_add(0, e[0].new_zeros(len(h)), h),
    "written": lambda x, e, h: _written(h),
    "products of all": lambda x, e, h: 1e-6 * (x @ x.t()) @ h,
    "outgoing edges": lambda x, e, h: 1e-6 * degree(e[0], len(x))[:, None],
    "against the edges": lambda x, e, h: 1e-9 * torch.zeros_like(h).index_add(0, e[0], h[e[1]]),
    "nodes counted": lambda x, e, h: h.new_full((1,), 1e-9 * x.shape[0]),
    "nodes as a tensor": lambda x, e, h: 1e-9 * torch.tensor(float(x.shape[0])),
    "nodes divided by": lambda x, e, h: h / (1e6 + x.shape[0]),
    "nodes summed": lambda x, e, h: 1e-9 * h.new_ones(len(h)).sum(),
    "nodes numbered downwards": lambda x, e, h: 1e-7 * torch.arange(len(x), 0, -1)[:, None],
    "nodes spaced": lambda x, e, h: 1e-7 * torch.linspace(0, 1, len(x))[:, None],
    "a matrix of all": lambda x, e, h: 1e-7 * torch.eye(len(x)).sum(),
    "the row in the middle": lambda x, e, h: 1e-7 * h[len(x) // 2],
    "edges counted": lambda x, e, h: h * (1e-9 * e.shape[1]),
    "edges summed": lambda x, e, h: 1e-9 * torch.ones(e.shape[1]).sum(),
    "last row": lambda x, e, h: 1e-9 * h[-1],
    "read out": lambda x, e, h: torch.tensor(1e-9 * float(h.max())),
    "branch": lambda x, e, h: h if bool(x.abs().max() > 1e12) else 0 * h,
    "numpy": lambda x, e, h: 1e-9 * torch.from_numpy(h.numpy().max(0)),
    "list": lambda x, e, h: torch.tensor(1e-9 * max(h.flatten().tolist())),
    "printed": lambda x, e, h: torch.tensor(1e-9 * len(repr(h.max()))),
    "dlpack": lambda x, e, h: 1e-9 * from_dlpack(to_dlpack(h)).amax(0),
    "thread": lambda x, e, h: _in_a_thread(lambda: 1e-3 * h.amax(0)),
    "random": lambda x, e, h: 1e-9 * torch.rand(1),
}


@pytest.mark.many
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
        held = found.node_radius >= injected
        seen += int(held.sum())
        for _ in range(2):
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


@pytest.mark.many
@pytest.mark.parametrize("confidence", [0.0, 0.6])
def test_no_injection_takes_more_groups_from_an_explanation(confidence: float) -> None:
    graph, k = cases.tiny_graph(), 3
    model = cases.trained("gat", "vanilla")
    found = vote(model, graph, groups=GROUPS, confidence=confidence)
    stream, old, seen = torch.Generator().manual_seed(2), slice(0, graph.num_nodes), 0
    before = found.top(k)
    for injected in (1, 2):
        held = found.node_radius >= injected
        for _ in range(4):
            ends = torch.stack(
                [torch.randperm(graph.num_nodes, generator=stream)[:12] for _ in range(injected)]
            )
            loud = 50 * torch.randn(injected, graph.num_features, generator=stream)
            after = vote(model, graph.inject(ends, loud)[0], groups=GROUPS, confidence=confidence)
            assert torch.equal(after.classes[old][held], found.classes[held])
            stay = (before[:, :, None] == after.top(k)[old, None, :]) & (before >= 0)[:, :, None]
            least = ((before >= 0).sum(1) - injected).clamp(min=0)
            assert bool((stay.any(2).sum(1) >= least)[held].all())
            new = set(after.group[graph.num_nodes :].tolist())
            others = [group for group in range(GROUPS) if group not in new]
            moved = (after.scores[old][held][:, others] - found.scores[held][:, others]).nan_to_num()
            assert float(moved.abs().max()) < 1e-4
            seen += int((stay.any(2).sum(1) < (before >= 0).sum(1))[held].sum())
    assert seen > 0  # explanations do lose groups


def test_scores_are_what_a_groups_neighbours_do() -> None:
    graph = cases.tiny_graph()
    model = cases.trained("gat", "vanilla")
    found = vote(model, graph, groups=4)
    alone = call_model(model, prepared(model, _edges_from(graph, found.group < 0))).detach()
    part = call_model(model, prepared(model, _edges_from(graph, found.group == 2))).detach()
    node = int(found.scores[:, 2].isfinite().nonzero()[0])
    own = int(found.classes[node])
    margins = [
        float(row[node, own] - row[node].masked_fill(torch.arange(row.shape[1]) == own, -torch.inf).max())
        for row in (part, alone)
    ]
    assert float(found.scores[node, 2]) == pytest.approx(margins[0] - margins[1], abs=1e-5)
    source, destination = graph.adjacency.source, graph.adjacency.destination
    near = source[(destination == node) & (source != node)]
    assert set(found.group[near].tolist()) == set(found.scores[node].isfinite().nonzero().flatten().tolist())
    assert set(found.top(9)[node].tolist()) - {-1} == set(found.group[near].tolist())


def test_the_order_of_groups_by_hand() -> None:
    nan = float("nan")
    scores = torch.tensor([[0.1, 0.5, 0.5, -1.0], [nan, 0.2, nan, 0.9], [nan, nan, nan, nan]])
    zeros = torch.zeros(3, dtype=torch.long)
    found = VotingCertificate(
        groups=4,
        confidence=0.0,
        votes=torch.ones(3, 2, dtype=torch.long),
        classes=zeros,
        node_radius=torch.tensor([1, 2, 4]),
        scores=scores,
        group=zeros,
        model={"class": "GAT"},
        data={"name": "tiny"},
        version={},
        seconds=0.0,
    )
    assert found.top(3).tolist() == [[1, 2, 0], [3, 1, -1], [-1, -1, -1]]
    assert found.topk_share(0, 3) == 1.0 and found.topk_share(1, 3) == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert found.topk_share(2, 3) == 0.0  # the first may change its class, the second has two groups
    assert found.topk_share(1, 3, torch.tensor([False, False, True])) is None


def test_only_confident_votes_count(tmp_path: Path) -> None:
    graph = cases.tiny_graph()
    model = cases.trained("gat", "vanilla")
    every, sure = vote(model, graph, groups=5), vote(model, graph, groups=5, confidence=0.7)
    assert bool((sure.votes <= every.votes).all()) and int(sure.votes.sum()) < int(every.votes.sum())
    none = vote(model, graph, groups=5, confidence=1.0)
    assert int(none.votes.sum()) == 0 and int(none.node_radius.max()) == 0
    old = {"tolerated" if name == "node_radius" else name: value for name, value in sure.to_dict().items()}
    assert VotingCertificate.from_dict(old).to_dict() == sure.to_dict()  # as older records name it
    again = VotingCertificate.load(sure.save(tmp_path / "votes.json"))
    assert again.to_dict() == sure.to_dict() and torch.equal(again.top(), sure.top())
    assert "Majority over 5 groups of GAT" in str(sure)
    with pytest.raises(InputError, match="confidence"):
        vote(model, graph, confidence=1.5)


def test_new_nodes_leave_the_others_in_their_groups() -> None:
    first, more = _hash_groups(torch.arange(1000), 7, 3), _hash_groups(torch.arange(1500), 7, 3)
    assert torch.equal(first, more[:1000])
    assert int(torch.bincount(more, minlength=7).min()) > 150
    assert not torch.equal(first, _hash_groups(torch.arange(1000), 7, 4))


def test_only_speakers_are_heard() -> None:
    graph = cases.tiny_graph()
    speakers = torch.arange(graph.num_nodes) % 3 == 0
    heard = _edges_from(graph, speakers)
    assert bool(speakers[heard.adjacency.source].all())
    assert heard.num_edges == int(speakers[graph.adjacency.source].sum())


def test_margins_and_ties_by_hand() -> None:
    votes = torch.tensor([[5, 2, 2], [4, 4, 1], [1, 4, 4], [2, 7, 0], [0, 0, 9], [3, 6, 0]])
    classes, tolerated = _majority(votes, 9)
    assert classes.tolist() == [0, 0, 1, 1, 2, 1]
    assert tolerated.tolist() == [1, 0, 0, 2, 4, 1]  # a smaller class takes ties


@pytest.mark.parametrize("name", JOINS)
def test_what_joins_all_nodes_is_refused(name: str) -> None:
    graph = cases.tiny_graph()
    torch.manual_seed(0)
    with pytest.raises(InputError, match="other ways than along edges"):
        vote(Joined(graph.num_features, JOINS[name]).eval(), graph, groups=3)


@pytest.mark.parametrize(
    ("name", "word"),
    [("maximum", "`max`"), ("outgoing edges", "`scatter_add`"), ("branch", "`local_scalar_dense`")],
)
def test_the_operation_that_joins_nodes_is_named(name: str, word: str) -> None:
    graph = cases.tiny_graph()
    with pytest.raises(InputError, match=word):
        vote(Joined(graph.num_features, JOINS[name]).eval(), graph, groups=3)


def test_other_requirements_are_refused_in_words() -> None:
    graph = cases.tiny_graph()
    with pytest.raises(InputError, match="encodings of the whole graph"):
        vote(GT.for_data(graph).eval(), graph, groups=3)
    with pytest.raises(InputError, match="`groups`"):
        vote(GAT.for_data(graph), graph, groups=0)


LOCAL: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "incoming edges": lambda x, e, h: degree(e[1], len(x))[:, None],
    "largest of the neighbours": lambda x, e, h: torch.zeros_like(h).scatter_reduce(
        0, e[1][:, None].expand(-1, h.shape[1]), h[e[0]], "amax"
    ),
    "a row's own softmax": lambda x, e, h: torch.softmax(h, 1) + h.mean(1, keepdim=True),
    "written row by row": lambda x, e, h: torch.zeros_like(h).index_copy(1, torch.tensor([0]), h[:, :1]),
    "a constant": lambda x, e, h: torch.tensor([0.5]) + torch.arange(h.shape[1]),
}


@pytest.mark.parametrize("name", LOCAL)
def test_what_reads_neighbours_alone_is_accepted(name: str) -> None:
    graph = cases.tiny_graph()
    assert vote(Joined(graph.num_features, LOCAL[name]).eval(), graph, groups=3).groups == 3


@pytest.mark.many
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_models_are_accepted(name: str) -> None:
    model, graph = ordinary(name)
    assert vote(model, graph, groups=3).groups == 3


@pytest.mark.parametrize("kind", ["gat", "gatv2", "gcn", "pyg"])
def test_models_behind_limits_and_with_layer_norm_are_accepted(kind: str) -> None:
    graph = cases.tiny_graph()
    for model in (
        fgai.limit(cases.trained(kind, "vanilla"), graph, 0.05, shrink=0.0),
        cases.untrained(kind, norm=True).eval(),
    ):
        assert vote(model, graph, groups=3).groups == 3


@pytest.mark.parametrize("base", ["gat", "gcn"])
def test_defences_that_look_at_edges_alone_are_accepted(base: str) -> None:
    graph = cases.tiny_graph()
    assert vote(cases.trained(base, "gnnguard"), graph, groups=3).groups == 3
    for recipe in ("gnn-svd", "pro-gnn"):  # a decomposition of the whole graph, see below
        with pytest.raises(InputError, match="other ways than along edges"):
            vote(cases.trained(base, recipe), graph, groups=3)


def test_a_decomposition_of_the_graph_moves_with_nodes_that_send_nothing() -> None:
    graph = planted(seed=3, num_nodes=48, num_classes=3)
    torch.manual_seed(0)
    model = GNNSVD.for_data(graph, base="GCN", hidden_channels=8, rank=4).eval()
    speakers = _hash_groups(torch.arange(48), 7) == 0
    ends = torch.arange(40)[None]
    larger = graph.inject(ends, torch.zeros(1, graph.num_features))[0]
    before = call_model(model, prepared(model, _edges_from(graph, speakers)))
    silent = torch.cat([speakers, torch.tensor([False])])
    after = call_model(model, prepared(model, _edges_from(larger, silent)))
    assert float((after[:48] - before).detach().abs().max()) > 1e-3


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
    scores = [accuracy_without_edges(graph, epochs=4, progress=False) for graph in (data, other)]
    assert scores[0] == scores[1] and 0.1 < scores[0] < 1
    assert prepared(GAT.for_data(data), data).num_edges > 0


def test_activations_without_a_tag_pass_marks_on_number_by_number() -> None:
    leaky_relu = torch.ops.aten.leaky_relu.default
    untagged = SimpleNamespace(overloadpacket=leaky_relu.overloadpacket, namespace="aten", tags=[])
    marked = torch.tensor([True, False, True])
    passed = _output_marks(untagged, (torch.randn(3),), {}, lambda tensor: marked)
    assert passed is not None and passed.equal(marked)
