"""Our layers against PyG's with the same weights, the models against dense references, the read-outs."""

from __future__ import annotations

from typing import Any

import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import GAT, GT, AttentionLayer, AttentionModel, GATv2
from fgai.ops import use_backend
from fgai.sparse import Adjacency, Features
from fgai.tasks import pool
from support.forward import seen_by
from support.graph_cases import Edge, build, edge_sets, edge_tensor, small_data

SCORES = ("additive", "dynamic", "dot")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
WIDTH, CHANNELS, NODES = 5, 3, 8
# (3, 3) and (0, 0) are loops, (0, 1) occurs twice and (4, 2) three times, nodes 6 and 7 have no incoming edge
# and node 7 no edge at all.
RAW = [(4, 2), (0, 1), (3, 3), (2, 1), (0, 1), (5, 4), (4, 2), (1, 0), (6, 5), (4, 2), (0, 0)]


def twins(
    score: str, heads: int, dtype: torch.dtype, concat: bool = True
) -> tuple[AttentionLayer, nn.Module]:
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
    ours, theirs = twins(score, heads, dtype, **kw)
    slack = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    generator = torch.Generator().manual_seed(nodes)
    x = torch.randn(nodes, WIDTH, generator=generator).to(dtype).requires_grad_()
    adjacency, order = Adjacency.build(edge_tensor(edges), nodes)
    seen: list[Tensor] = []
    ours.tap = lambda attention, _: seen.append(attention) or attention  # type: ignore[func-returns-value]
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
        model = ours.for_data(graph, channels=2, heads=3).double().eval()
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


def doubled(graph: Graph) -> Graph:
    assert graph.features is not None
    return graph.replace(features=graph.features.to("cpu", torch.float64))


def sparse(graph: Graph) -> Graph:
    """The same graph with features in compressed rows (about half of them set to zero first)."""
    assert graph.features is not None
    dense = graph.features.to_dense()
    matrix = scipy.sparse.csr_matrix(torch.where(dense > 0, dense, 0.0).numpy())
    rows = (torch.from_numpy(a.astype("int64")) for a in (matrix.indptr, matrix.indices))
    values = torch.from_numpy(matrix.data)
    return graph.replace(features=Features.sparse(*rows, values, matrix.shape[1]))


def dense_attention(layer: AttentionLayer, x: Tensor, graph: Graph) -> Tensor:
    """One dot-product layer by plain loops over nodes."""
    q, k, v = (p(x).view(-1, layer.heads, layer.channels) for p in (layer.query, layer.key, layer.value))
    out = torch.zeros_like(v)
    for i in range(graph.num_nodes):
        neighbours = graph.adjacency.source[graph.adjacency.destination == i]
        if neighbours.numel():
            scores = torch.einsum("hc,nhc->nh", q[i], k[neighbours]) / layer.channels**0.5
            out[i] = torch.einsum("nh,nhc->hc", scores.softmax(0), v[neighbours])
    return out.flatten(1)


class TestNorm:
    @pytest.mark.parametrize("kind", ["dense", "sparse", "edited"])
    def test_layer_norm_equals_a_dense_one(self, kind: str) -> None:
        graph = doubled(small_data())
        if kind != "dense":
            graph = sparse(graph)
        assert graph.features is not None
        if kind == "edited":
            generator = torch.Generator().manual_seed(3)
            delta = torch.randn(2, 6, generator=generator, dtype=torch.float64)
            graph = graph.replace(features=graph.features.perturb(torch.tensor([4, 9]), delta))
            extra = torch.randn(3, 6, generator=generator, dtype=torch.float64)
            graph, _ = graph.inject(torch.tensor([[0, 4], [9, 2], [3, 1]]), extra)
        plain = GAT(6, 3, channels=2, heads=4).double().eval()
        normed = GAT(6, 3, channels=2, heads=4, norm="layer").double().eval()
        normed.load_state_dict(plain.state_dict(), strict=False)
        looped = normed.prepare(graph)
        assert looped.features is not None
        norms = [nn.LayerNorm(6).double(), nn.LayerNorm(8).double()]
        x = looped.features.to_dense()
        for conv, mine, norm, last in zip(plain.convs, normed.convs, norms, (False, True), strict=True):
            with torch.no_grad():
                for theirs, ours in (
                    (norm.weight, mine.input_norm.scale),
                    (norm.bias, mine.input_norm.shift),
                ):
                    ours.copy_(torch.randn(ours.shape, generator=torch.Generator().manual_seed(len(ours))))
                    theirs.copy_(ours)
            x = conv(norm(x), looped.adjacency)
            x = x if last else nn.functional.elu(x)
        torch.testing.assert_close(normed(graph), x, rtol=1e-9, atol=1e-9)

    def test_constant_rows_stay_finite(self) -> None:
        graph = build(4, [(0, 1), (2, 1)], width=6).replace(features=Features.dense(torch.full((4, 6), 1e4)))
        out = GAT(6, 3, norm="layer").eval()(graph)
        assert torch.isfinite(out).all()


class TestModels:
    @pytest.mark.parametrize("model", [GAT, GATv2, GT])
    def test_sizes_come_from_the_data(self, model: type[AttentionModel]) -> None:
        graph = small_data()
        made = model.for_data(graph)
        assert (made.config["in_channels"], made.config["out_channels"]) == (6, 3)
        assert made.eval()(graph).shape == (40, 3)
        assert model.for_data(graph, out_channels=7).eval()(graph).shape == (40, 7)
        assert model.for_data(graph.to_data()).config == made.config

    def test_paper_architectures(self) -> None:
        graph = small_data()
        gat, gt = GAT.for_data(graph), GT.for_data(graph)
        assert [(c.heads, c.channels) for c in gat.convs] == [(8, 8), (1, 3)]
        assert [(b.attention.heads, b.attention.channels) for b in gt.blocks] == [(8, 16), (1, 128)]
        edges = torch.tensor([[0, 1], [1, 2]])
        large = Graph.from_edges(edges, 100_000, torch.zeros(100_000, 2), y=torch.arange(100_000) % 4)
        assert [(c.heads, c.channels) for c in GATv2.for_data(large).convs] == [(8, 16), (8, 16), (1, 4)]

    @pytest.mark.parametrize("model", [GAT, GATv2, GT])
    def test_attention_sums_to_one(self, model: type[AttentionModel]) -> None:
        graph = small_data()
        made = model.for_data(graph).eval()
        logits, attention = seen_by(made, made.prepare(graph))
        torch.testing.assert_close(logits, made(graph))
        attention.check_sums()
        assert len(attention) == 2
        loops = made.prepare(graph).has_loops
        assert loops == (model is not GT)
        assert attention.last.num_edges == graph.num_edges + (40 if loops else 0)

    @pytest.mark.parametrize("model", [GAT, GATv2, GT])
    def test_relabelling_nodes_commutes(self, model: type[AttentionModel]) -> None:
        graph = doubled(small_data())
        made = model.for_data(graph, **({"encodings": 0} if model is GT else {})).double().eval()
        names = torch.randperm(40, generator=torch.Generator().manual_seed(5))
        assert graph.features is not None
        rows = torch.empty(40, 6, dtype=torch.float64)
        rows[names] = graph.features.to_dense()
        renamed = Graph.from_edges(names[graph.edge_index], 40, rows)
        torch.testing.assert_close(made(renamed)[names], made(graph), rtol=1e-10, atol=1e-10)

    @pytest.mark.parametrize("model", [GAT, GATv2, GT])
    def test_sparse_features_give_the_same(self, model: type[AttentionModel]) -> None:
        graph = sparse(doubled(small_data()))
        assert graph.features is not None and graph.features.is_sparse
        dense = graph.replace(features=Features.dense(graph.features.to_dense()))
        made = model.for_data(graph).double().eval()
        torch.testing.assert_close(made(graph), made(dense), rtol=1e-10, atol=1e-10)

    def test_logits_have_no_activation(self) -> None:
        graph = small_data()
        made = GAT.for_data(graph).eval()
        with torch.no_grad():
            made.convs[-1].bias.fill_(-50.0)
        assert made(graph).max() < -10

    def test_training_dropout_is_drawn_and_eval_is_not(self) -> None:
        graph = small_data()
        made = GAT.for_data(graph, attention_dropout=0.5)
        assert not torch.equal(made(graph), made(graph))
        made.eval()
        assert torch.equal(made(graph), made(graph))

    def test_isolated_node_sees_only_itself(self) -> None:
        graph = small_data()
        assert graph.features is not None
        for made in (GAT.for_data(graph).eval(), GT.for_data(graph, encodings=0).eval()):
            alone = Graph.from_edges(edge_tensor([]), 1, graph.features.to_dense()[-1:])
            torch.testing.assert_close(made(graph)[-1:], made(alone), rtol=1e-4, atol=1e-5)

    def test_gt_equals_a_dense_reference(self) -> None:
        graph = doubled(small_data())
        made = GT.for_data(graph, width=16, heads=(4, 2), encodings=3, dropout=0.3).double()
        with torch.no_grad():
            for module in made.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.running_mean.normal_(generator=torch.Generator().manual_seed(1))
                    module.running_var.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(2))
        made.eval()
        ready = made.prepare(graph)
        assert ready.positional is not None and ready.positional.shape == (40, 3)
        assert ready.features is not None
        x = made.input(ready.features.to_dense()) + made.encoding(ready.positional.double())
        for block in made.blocks:
            x = block.norm_attention(x + block.output(dense_attention(block.attention, x, ready)))
            x = block.norm_feed(x + block.narrow(torch.relu(block.wide(x))))
        torch.testing.assert_close(made(graph), made.head(x), rtol=1e-9, atol=1e-9)

    def test_gt_reads_its_encodings(self) -> None:
        graph = small_data()
        made = GT.for_data(graph).eval()
        ready = made.prepare(graph)
        assert ready.positional is not None
        shifted = ready.replace(positional=ready.positional + 1.0)
        assert not torch.allclose(made(ready), made(shifted))

    @pytest.mark.parametrize("norm", ["batch", "layer"])
    def test_gt_norms_train(self, norm: str) -> None:
        graph = small_data()
        made = GT.for_data(graph, norm=norm)
        made(graph).sum().backward()
        assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in made.parameters())


class TestReadOuts:
    def test_links_score_by_dot_product(self) -> None:
        graph = small_data()
        made = GAT.for_data(graph, task="link").eval()
        embedding = made(graph)
        assert embedding.shape == (40, 64)
        links = torch.tensor([[0, 4, 7], [1, 4, 39]])
        wanted = torch.stack([embedding[s] @ embedding[d] for s, d in links.t().tolist()])
        torch.testing.assert_close(made(graph, links), wanted)

    @pytest.mark.parametrize("pooling", ["mean", "max"])
    @pytest.mark.parametrize("model", [GAT, GT])
    def test_graphs_are_pooled(self, model: type[AttentionModel], pooling: str) -> None:
        batch = torch.tensor([0] * 11 + [1] * 22 + [2] * 7)
        graph = small_data().replace(batch=batch, graph_y=torch.tensor([0, 1, 4]))
        made = model.for_data(graph, task="graph", pooling=pooling).eval()
        out = made(graph)
        assert out.shape == (3, 5)
        nodes = made.embed(made.prepare(graph))
        pooled = torch.stack(
            [nodes[batch == g].mean(0) if pooling == "mean" else nodes[batch == g].amax(0) for g in range(3)]
        )
        torch.testing.assert_close(out, made.head(pooled) if isinstance(made, GT) else pooled)

    @pytest.mark.parametrize("how", ["mean", "max"])
    def test_a_graph_without_nodes_gives_zeros(self, how: str) -> None:
        nodes = torch.tensor([[-1.0, 2.0], [-3.0, 4.0], [5.0, -6.0]])
        out = pool(nodes, torch.tensor([0, 0, 2]), 3, how)
        wanted = (
            [[-2.0, 3.0], [0.0, 0.0], [5.0, -6.0]]
            if how == "mean"
            else [[-1.0, 4.0], [0.0, 0.0], [5.0, -6.0]]
        )
        assert out.tolist() == wanted

    def test_without_a_batch_there_is_one_graph(self) -> None:
        nodes = torch.arange(6.0).view(3, 2)
        assert pool(nodes, None, 1, "mean").tolist() == [[2.0, 3.0]]


class TestRefused:
    def test_words(self) -> None:
        for arguments, message in (
            ({"task": "nodes"}, "did you mean 'node'"),
            ({"pooling": "sum"}, "`pooling` must be one of"),
            ({"heads": 0}, "`heads` must be at least 1"),
            ({"norm": "batch"}, "`norm` must be one of"),
            ({"layers": 0}, "`layers` must be at least 1"),
        ):
            with pytest.raises(InputError, match=message):
                GAT(4, 2, **arguments)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="`norm` must be one of"):
            GT(4, 2, norm="none")
        with pytest.raises(InputError, match="divisible"):
            GT(4, 2, width=20, heads=(8, 1))
        with pytest.raises(InputError, match="`score` must be one of"):
            AttentionLayer(4, 2, score="cosine")

    def test_data_without_features_or_labels(self) -> None:
        graph = small_data()
        with pytest.raises(InputError, match="no node features"):
            GAT.for_data(graph.replace(features=None))
        with pytest.raises(InputError, match="no labels"):
            GT.for_data(Graph.from_edges(graph.edge_index, 40, torch.ones(40, 4)))
        with pytest.raises(InputError, match="Graph or a PyG Data, got list"):
            GAT.for_data([1, 2])

    def test_features_of_another_dataset(self) -> None:
        with pytest.raises(InputError, match="reads 9 features per node, 'small' has 6"):
            GAT(9, 3)(small_data())

    def test_rows_that_do_not_fit(self) -> None:
        adjacency, _ = Adjacency.build(edge_tensor([(0, 1)]), 3)
        with pytest.raises(InputError, match="4 rows of features for 3 nodes"):
            AttentionLayer(WIDTH, CHANNELS)(torch.ones(4, WIDTH), adjacency)
