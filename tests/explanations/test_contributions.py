"""Signed contributions: they sum to the margin, are the terms of a loop, and keep their certified signs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

import fgai
from fgai.attention import observe, prepared
from fgai.errors import FgaiWarning
from fgai.explanations import edge_explainer, explain
from fgai.explanations.contributions import SignedMargins
from fgai.graph import Graph
from fgai.models import GAT, GATv2
from support.graph_cases import edge_sets, edge_tensor, small_data

GRAPH = small_data()
CLASSES = 3
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


class Net(nn.Module):
    """Two layers of PyG; the last one averages its heads, or joins them before a linear map."""

    def __init__(self, conv: Callable[..., nn.Module], width: int, *, joined: bool, residual: bool) -> None:
        super().__init__()
        self.joined, self.first = joined, conv(width, 4, heads=2)
        self.last = conv(8, 4 if joined else CLASSES, heads=3, concat=joined, residual=residual)
        self.out = nn.Linear(12, CLASSES) if joined else nn.Identity()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return torch.as_tensor(self.out(self.last(self.first(x, edge_index).relu(), edge_index)))

    def terms(self, x: Tensor, edge_index: Tensor, node: int) -> tuple[dict[int, Tensor], Tensor]:
        """What every source adds to the logits of a node, and what nothing on an edge adds, by a loop."""
        conv, width = self.last, self.last.out_channels
        hidden = self.first(x, edge_index).relu()
        _, (ends, alpha) = conv(hidden, edge_index, return_attention_weights=True)
        values = (conv.lin if isinstance(conv, GATConv) else conv.lin_l)(hidden).view(-1, 3, width)
        weight = self.out.weight if self.joined else torch.eye(CLASSES)
        added: dict[int, Tensor] = {}
        for edge, (source, destination) in enumerate(ends.t().tolist()):
            if destination == node:
                heads = alpha[edge][:, None] * values[source]
                state = heads.flatten() if self.joined else heads.mean(0)
                added[source] = added.get(source, torch.zeros(CLASSES)) + weight @ state
        rest = conv.bias + (conv.res(hidden)[node] if conv.res is not None else 0)
        return added, weight @ rest + (self.out.bias if self.joined else 0)


def margins_of(model: nn.Module, data: Any) -> tuple[SignedMargins, Graph]:
    graph = prepared(model, data if isinstance(data, Graph) else Graph.from_data(data))
    return SignedMargins(model, observe(model, graph, inputs=True)), graph


@st.composite
def graphs(draw: st.DrawFn, duplicates: int = 3) -> Data:
    """Loops, isolated nodes and duplicate edges, random features and classes."""
    nodes, edges = draw(edge_sets(3))
    edges += edges[: draw(st.integers(0, duplicates))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.randn(nodes, 5, generator=generator)
    return Data(x=x, edge_index=edge_tensor(edges), y=torch.arange(nodes) % CLASSES)


@pytest.mark.filterwarnings("ignore::fgai.errors.FgaiWarning")
@given(graphs(), st.sampled_from([GAT, GATv2]), st.booleans())
def test_own_models_sum_to_the_margin(data: Data, kind: type[GAT], limited: bool) -> None:
    """With the bias of the layer itself as the only other term, behind limits too."""
    torch.manual_seed(1)
    model: nn.Module = kind(5, CLASSES, hidden_channels=2, heads=3).eval()
    with torch.no_grad():
        model.convs[-1].bias.normal_()
    if limited:
        model = fgai.limit(model, data, clip_share=0.2, shrink=0.3)
    margins, graph = margins_of(model, data)
    bias = model.convs[-1].bias.detach().double()
    for node in range(graph.num_nodes):
        signed = margins.of(node)
        logits = margins.observation.logits[node].double()
        margin = logits[signed.top] - logits[signed.second]
        rest = bias[signed.top] - bias[signed.second]
        assert signed.top == int(logits.argmax()) and bool((logits <= logits[signed.second]).sum() >= 2)
        torch.testing.assert_close(signed.contributions.sum() + rest, margin, **CLOSE)
        assert signed.rest == pytest.approx(float(rest), rel=1e-5, abs=1e-5)
        assert node in signed.sources.tolist() and len(set(signed.sources.tolist())) == len(signed.sources)


@settings(max_examples=10)
@given(
    conv=st.sampled_from([GATConv, GATv2Conv]),
    joined=st.booleans(),
    residual=st.booleans(),
    data=graphs(duplicates=0),
)
def test_models_of_pyg_give_the_terms_of_a_loop(
    conv: Callable[..., nn.Module], joined: bool, residual: bool, data: Data
) -> None:
    """Heads averaged, or joined before a linear map."""
    torch.manual_seed(2)
    model = Net(conv, 5, joined=joined, residual=residual).eval()
    torch.nn.init.normal_(model.last.bias)
    margins, graph = margins_of(model, data)
    for node in range(min(4, graph.num_nodes)):
        signed = margins.of(node)
        with torch.no_grad():
            added, rest = model.terms(data.x, graph.edge_index, node)
        expected = [float(added[s][signed.top] - added[s][signed.second]) for s in signed.sources.tolist()]
        assert sorted(added) == sorted(signed.sources.tolist())
        assert signed.contributions.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert signed.rest == pytest.approx(float(rest[signed.top] - rest[signed.second]), rel=1e-4, abs=1e-5)
        assert sum(expected) + signed.rest == pytest.approx(signed.margin, rel=1e-5, abs=1e-5)


@pytest.fixture(scope="module")
def margins() -> SignedMargins:
    torch.manual_seed(3)
    return margins_of(Net(GATConv, 6, joined=False, residual=False).eval(), GRAPH)[0]


class TestCertifiedSigns:
    def moved(self, margins: SignedMargins, node: int, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Contributions and logits with other weights [K, H] of the last attention, values fixed."""
        last, signed = margins.observation.attention.last, margins.of(node)
        first, end = last.rowptr[node : node + 2].tolist()
        values = margins.read_out.values[margins.read_out.index[first:end]]
        lead = values[:, :, signed.top] - values[:, :, signed.second]
        change = weights - last.values[first:end].double()
        logits = margins.observation.logits[node].double() + torch.einsum("kh,khc->c", change, values)
        return (weights * lead).sum(1), logits

    def test_no_attention_in_the_ball_changes_what_is_certified(self, margins: SignedMargins) -> None:
        """A move of one weight is the worst of an l1 ball; infinite radii hold for any weights at all."""
        generator = torch.Generator().manual_seed(0)
        always = sometimes = 0
        for node in range(39):
            signed, last = margins.of(node), margins.observation.attention.last
            first, end = last.rowptr[node : node + 2].tolist()
            weights = last.values[first:end].double()
            radii = torch.where(signed.radii.isfinite(), signed.radii, 9.0)
            for place, radius in enumerate(radii.tolist()):
                for sign in (-1.0, 1.0):
                    other = weights.clone()
                    other[place] = (other[place] + sign * 0.999 * radius).clamp(min=0)
                    part = self.moved(margins, node, other)[0][place]
                    assert float(part * signed.contributions[place]) >= 0
            fixed = signed.radii.isinf()
            drawn = self.moved(margins, node, torch.rand(weights.shape, generator=generator).double())[0]
            assert bool((drawn * signed.contributions >= 0)[fixed].all())
            always, sometimes = always + int(fixed.sum()), sometimes + int((~fixed).sum())
        assert always > 20 and sometimes > 20

    def test_the_pair_of_classes_stays_up_to_its_radius_and_no_further(self, margins: SignedMargins) -> None:
        for node in range(39):
            signed, last = margins.of(node), margins.observation.attention.last
            first, end = last.rowptr[node : node + 2].tolist()
            weights, heads = last.values[first:end].double(), last.num_heads
            values = margins.read_out.values[margins.read_out.index[first:end]]
            pairs = [(signed.top, c) for c in range(CLASSES) if c != signed.top]
            pairs += [(signed.second, c) for c in range(CLASSES) if c not in (signed.top, signed.second)]
            for share, stays in ((0.999, True), (1.001, False)):
                kept = []
                for ahead, behind in pairs:
                    apart = values[:, :, ahead] - values[:, :, behind]
                    worst, other = apart.abs().argmax(0), weights.clone()
                    for h in range(heads):
                        step = share * signed.pair_radius * float(apart[worst[h], h].sign())
                        other[worst[h], h] -= step
                    order = self.moved(margins, node, other)[1].argsort(descending=True).tolist()
                    kept.append(order[:2] == [signed.top, signed.second])
                assert all(kept) is stays


@pytest.mark.parametrize("conv", [TransformerConv, GATConv])
def test_the_part_of_edge_features(conv: Callable[..., nn.Module]) -> None:
    """A transformer adds them to the values, GAT reads them in its scores alone."""

    class OnEdges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.first = conv(6, 4, heads=2, edge_dim=2)
            self.last = conv(8, CLASSES, heads=3, concat=False, edge_dim=2)

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
            return torch.as_tensor(
                self.last(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)
            )

    model, generator = OnEdges().eval(), torch.Generator().manual_seed(0)
    graph = GRAPH.replace(edge_attr=torch.randn(GRAPH.num_edges, 2, generator=generator))
    signed = margins_of(model, graph)[0].of(4)
    if conv is GATConv:
        assert signed.edge_contributions is None
        return
    data = graph.to_data()
    with torch.no_grad():
        hidden = model.first(data.x, data.edge_index, data.edge_attr).relu()
        _, (ends, alpha) = model.last(hidden, data.edge_index, data.edge_attr, return_attention_weights=True)
        into = (ends[1] == 4).nonzero().flatten()
        added = model.last.lin_edge(data.edge_attr).view(-1, 3, CLASSES)[into]
        expected = (alpha[into][:, :, None] * added).mean(1)
    assert signed.edge_contributions is not None and signed.sources.tolist() == ends[0][into].tolist()
    assert signed.edge_contributions.tolist() == pytest.approx(
        (expected[:, signed.top] - expected[:, signed.second]).tolist(), rel=1e-4, abs=1e-6
    )
    assert float(signed.edge_contributions.abs().max()) > 1e-3
    assert not any(module._forward_hooks for module in model.modules())
    record = explain(model, graph, 4, threat=None, certificate=False)
    assert "(edge " in " ".join(record.tables()[0].notes)


class TestUnavailable:
    def test_behind_an_activation(self) -> None:
        class Bent(Net):
            def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
                return super().forward(x, edge_index).relu()

        model = Bent(GATConv, 6, joined=False, residual=False).eval()
        record = explain(model, GRAPH, 4, threat=None, certificate=False)
        assert record.contributions is not None and "relu" in record.contributions["reason"]
        assert "contributions: not available: `relu`" in " ".join(record.tables()[0].notes)
        with pytest.raises(fgai.errors.InputError, match="no signed contributions: `relu`"):
            edge_explainer("signed-contributions", model, GRAPH)(GRAPH, [4])

    def test_of_links(self) -> None:
        data = fgai.load_dataset("planted", task="link")
        model = fgai.GAT.for_data(data)
        record = explain(model, data, 4, threat=None, certificate=False)
        assert record.contributions is not None and "links" in str(record.contributions["reason"])


def test_the_record_lists_supporters_first_and_reads_back() -> None:
    model = fgai.train(GAT(6, CLASSES, hidden_channels=2, heads=3), GRAPH, epochs=8, progress=False)
    record = explain(model, GRAPH, 4, threat=None, certificate=False)
    signed = record.contributions
    assert signed is not None and signed["reason"] is None and signed["top"] == record.predicted
    parts = [entry["contribution"] for entry in signed["neighbours"]]
    assert parts == sorted(parts, reverse=True) and min(parts) < 0 < max(parts)
    assert sum(parts) + signed["rest"] == pytest.approx(signed["margin"])
    assert {entry["node"] for entry in signed["neighbours"]} == {e["node"] for e in record.neighbours}
    notes = " ".join(record.tables()[0].notes)
    assert "supporting" in notes and "opposing" in notes and "proved with the values fixed" in notes
    assert type(record).from_dict(record.to_dict()) == record
    older = {k: v for k, v in record.to_dict().items() if k not in ("contributions", "counterfactual")}
    assert type(record).from_dict(older).contributions is None


def test_the_explainer_scores_edges_into_the_node() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FgaiWarning)
        model = GATv2(6, CLASSES, hidden_channels=2, heads=3).eval()
    (scores,) = edge_explainer("signed-contributions", model, GRAPH)(GRAPH, [4])
    signed = explain(model, GRAPH, 4, threat=None, certificate=False).contributions
    assert signed is not None
    into = GRAPH.adjacency.destination == 4
    found = dict(
        zip(GRAPH.adjacency.source[into].tolist(), scores.on(GRAPH.keys[into]).tolist(), strict=True)
    )
    expected = {e["node"]: e["contribution"] for e in signed["neighbours"] if not e["itself"]}
    assert found == pytest.approx(expected)
    assert int((scores.values != 0).sum()) == len(expected)
