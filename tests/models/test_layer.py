"""The attention layer against PyG's own layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

from fgai.models import GAT, AttentionLayer, GATv2
from fgai.models import layer as layers
from fgai.ops import use_backend
from fgai.sparse import Adjacency
from support.graph_cases import Edge, edge_sets, edge_tensor, small_data

SCORES = ("additive", "dynamic", "dot")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
WIDTH, CHANNELS, NODES = 5, 3, 8
# (3, 3) and (0, 0) are loops, (0, 1) occurs twice and (4, 2) three times, nodes 6 and 7 have no incoming edge
# and node 7 no edge at all.
RAW = [(4, 2), (0, 1), (3, 3), (2, 1), (0, 1), (5, 4), (4, 2), (1, 0), (6, 5), (4, 2), (0, 0)]


def pair(score: str, heads: int, dtype: torch.dtype, concat: bool = True) -> tuple[AttentionLayer, nn.Module]:
    """Our layer and PyG's, with the same random weights."""
    generator = torch.Generator().manual_seed(heads + 10 * concat)
    ours = AttentionLayer(WIDTH, CHANNELS, heads, score=score, concat=concat, bias=score != "dot").to(dtype)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(0.6 * torch.randn(parameter.shape, generator=generator))
    options: dict[str, Any] = {"heads": heads, "concat": concat}
    pairs: list[tuple[nn.Module, Any]] = []
    if score == "additive":
        theirs: Any = GATConv(WIDTH, CHANNELS, add_self_loops=False, **options)
        pairs = [(theirs.lin, ours.value)]
        vectors = [(theirs.att_src, ours.source_weight), (theirs.att_dst, ours.destination_weight)]
    elif score == "dynamic":
        theirs = GATv2Conv(WIDTH, CHANNELS, add_self_loops=False, **options)
        pairs = [(theirs.lin_l, ours.value), (theirs.lin_r, ours.right)]
        vectors = [(theirs.att, ours.score_weight)]
    else:
        theirs = TransformerConv(WIDTH, CHANNELS, root_weight=False, **options)
        pairs = [(theirs.lin_value, ours.value), (theirs.lin_query, ours.query), (theirs.lin_key, ours.key)]
        vectors = []
    theirs = theirs.to(dtype)
    with torch.no_grad():
        for linear, projection in pairs:
            linear.weight.copy_(projection.weight.t())
            if projection.bias is not None:
                linear.bias.copy_(projection.bias)
        for vector, weight in vectors:
            vector.copy_(weight[None])
        if ours.bias is not None:
            theirs.bias.copy_(ours.bias)
    ours.partners = {  # type: ignore[assignment]
        **{id(projection.weight): (linear.weight, True) for linear, projection in pairs},
        **{id(p.bias): (linear.bias, False) for linear, p in pairs if p.bias is not None},
        **{id(weight): (vector, False) for vector, weight in vectors},
        **({id(ours.bias): (theirs.bias, False)} if ours.bias is not None else {}),
    }
    return ours, theirs


def assert_equal_layers(
    score: str, heads: int, dtype: torch.dtype, nodes: int, edges: list[Edge], **kw: Any
) -> None:
    ours, theirs = pair(score, heads, dtype, **kw)
    slack = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    generator = torch.Generator().manual_seed(nodes)
    x = torch.randn(nodes, WIDTH, generator=generator).to(dtype).requires_grad_()
    adjacency, order = Adjacency.build(edge_tensor(edges), nodes)
    seen: list[Tensor] = []
    ours.tap = lambda attention, *_, **options: seen.append(attention) or attention  # type: ignore[func-returns-value]
    out = ours(x, adjacency)
    wanted, (_, attention) = theirs(x, edge_tensor(edges), return_attention_weights=True)
    torch.testing.assert_close(out, wanted, **slack)
    torch.testing.assert_close(seen[0], attention[order], **slack)
    pull = torch.randn(out.shape, generator=generator).to(dtype)
    inside = [seen[0], x, *ours.parameters()]
    mine = torch.autograd.grad((out * pull).sum(), inside, retain_graph=True)
    attention_grad, x_grad, *_ = torch.autograd.grad((wanted * pull).sum(), [attention, x], retain_graph=True)
    torch.testing.assert_close(mine[0], attention_grad[order], **slack)
    torch.testing.assert_close(mine[1], x_grad, **slack)
    partners = [ours.partners[id(p)] for p in ours.parameters()]  # type: ignore[index]
    others = torch.autograd.grad((wanted * pull).sum(), [p for p, _ in partners])
    for ours_grad, their_grad, (_, transposed) in zip(mine[2:], others, partners, strict=True):
        moved = their_grad.t() if transposed else their_grad
        torch.testing.assert_close(ours_grad, moved.reshape(ours_grad.shape), **slack)


class TestAgainstPyG:
    @pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
    @pytest.mark.parametrize("heads", [1, 4])
    @pytest.mark.parametrize("score", SCORES)
    def test_layer_equals_pyg(self, score: str, heads: int, dtype: torch.dtype) -> None:
        assert_equal_layers(score, heads, dtype, NODES, RAW)

    @pytest.mark.parametrize("score", SCORES)
    def test_plain_path_equals_pyg(self, score: str) -> None:
        with use_backend("reference"):
            assert_equal_layers(score, 2, torch.float64, NODES, RAW)

    @pytest.mark.parametrize("score", SCORES)
    def test_averaged_heads_equal_pyg(self, score: str) -> None:
        assert_equal_layers(score, 4, torch.float64, NODES, RAW, concat=False)

    @pytest.mark.parametrize("score", SCORES)
    @settings(max_examples=15)
    @given(edge_sets(), st.data())
    def test_any_graph(self, score: str, sample: tuple[int, list[Edge]], data: st.DataObject) -> None:
        nodes, edges = sample
        if not edges:
            return  # PyG's softmax has nothing to reduce
        doubled = edges + data.draw(st.lists(st.sampled_from(edges), max_size=4))
        assert_equal_layers(score, 2, torch.float64, nodes, doubled)

    def test_no_edges_gives_the_bias(self) -> None:
        for score in SCORES:
            layer = AttentionLayer(WIDTH, CHANNELS, 2, score=score)
            assert layer.bias is not None
            nn.init.normal_(layer.bias)
            adjacency, _ = Adjacency.build(edge_tensor([]), 4)
            out = layer(torch.randn(4, WIDTH), adjacency)
            torch.testing.assert_close(out, layer.bias.expand(4, -1))

    @pytest.mark.parametrize(("ours", "theirs"), [(GAT, GATConv), (GATv2, GATv2Conv)])
    def test_model_equals_pyg_with_loops_added(self, ours: type[GAT], theirs: Any) -> None:
        graph = small_data()
        model = ours.for_data(graph, hidden_channels=2, heads=3).double().eval()
        convs = [theirs(6, 2, heads=3).double(), theirs(6, 3, heads=1, concat=False).double()]
        for mine, conv in zip(model.convs, convs, strict=True):
            with torch.no_grad():
                if ours is GAT:
                    conv.lin.weight.copy_(mine.value.weight.t())
                    conv.att_src.copy_(mine.source_weight[None])
                    conv.att_dst.copy_(mine.destination_weight[None])
                else:
                    for linear, projection in ((conv.lin_l, mine.value), (conv.lin_r, mine.right)):
                        linear.weight.copy_(projection.weight.t())
                        linear.bias.copy_(projection.bias)
                    conv.att.copy_(mine.score_weight[None])
                conv.bias.copy_(mine.bias)
        assert graph.features is not None
        doubled = graph.replace(features=graph.features.to("cpu", torch.float64))
        hidden = nn.functional.elu(convs[0](doubled.features.to_dense(), graph.edge_index))
        wanted = convs[1](hidden, graph.edge_index)
        torch.testing.assert_close(model(doubled), wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("at_once", [2**25, 3, 1], ids=["all heads", "a few", "one"])
@pytest.mark.parametrize("score", SCORES)
def test_mean_scores_are_added_up_head_by_head(
    score: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    edges = torch.tensor([[0, 1, 2, 3, 4, 1, 0], [1, 0, 1, 2, 0, 3, 4]])
    adjacency, _ = Adjacency.build(edges, 5)
    torch.manual_seed(0)
    layer = AttentionLayer(6, 3, score=score, heads=8)
    far, near, _ = layer.sides(torch.randn(5, 6))
    monkeypatch.setattr(layers, "MAX_SCORES", at_once * adjacency.num_edges if at_once < 8 else at_once)
    found = layer.mean_scores(far, near, adjacency)
    total = None
    for h in range(8):
        part = slice(h, h + 1)
        one = layer.score_edges(far[:, part], near[:, part], adjacency, part).squeeze(1)
        total = one if total is None else total + one
    assert total is not None
    assert torch.equal(found, total / 8)
    weights = list(layer.parameters())
    for ours, theirs in zip(
        *(
            torch.autograd.grad((out**2).sum(), weights, retain_graph=True, allow_unused=True)
            for out in (found, total / 8)
        ),
        strict=True,
    ):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
