"""Our layers against PyG's with the same weights, the models against dense references, the read-outs."""

from __future__ import annotations

import pytest
import scipy.sparse
import torch
from torch import Tensor, nn

from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import GAT, GT, AttentionLayer, AttentionModel, GATv2
from fgai.sparse import Adjacency, Features
from fgai.tasks import pool
from support.attention_cases import assert_sums
from support.forward import seen_by
from support.graph_cases import build, edge_tensor, small_data

WIDTH, CHANNELS, NODES = 5, 3, 8


def doubled(graph: Graph) -> Graph:
    assert graph.features is not None
    return graph.replace(features=graph.features.to("cpu", torch.float64))


def sparse(graph: Graph) -> Graph:
    """The same graph with features in compressed rows (about half of them set to zero first)."""
    assert graph.features is not None
    dense = graph.features.to_dense()
    matrix = scipy.sparse.csr_matrix(torch.where(dense > 0, dense, 0.0).numpy())
    rowptr, index = (torch.from_numpy(a.astype("int64")) for a in (matrix.indptr, matrix.indices))
    values = torch.from_numpy(matrix.data)
    return graph.replace(features=Features.sparse(rowptr, index, values, matrix.shape[1]))


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
        plain = GAT(6, 3, hidden_channels=2, heads=4).double().eval()
        normed = GAT(6, 3, hidden_channels=2, heads=4, norm="layer").double().eval()
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
        assert_sums(attention)
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
        made = GT.for_data(graph, hidden_channels=16, heads=(4, 2), encodings=3, dropout=0.3).double()
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


class TestCalls:
    @pytest.mark.parametrize("model", [GAT, GT])
    def test_features_and_edges_or_data_are_as_good_as_a_graph(self, model: type[AttentionModel]) -> None:
        graph = small_data()
        data, made = graph.to_data(), model.for_data(graph).eval()
        wanted = made(graph)
        order = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(1))
        data.edge_index = data.edge_index[:, order]
        for given in (made(data), made(data.x, data.edge_index), made(data.x, edge_index=data.edge_index)):
            assert torch.equal(given, wanted)
        with pytest.raises(InputError, match="`edge_index` is missing"):
            made(data.x)

    def test_a_batch_comes_third(self) -> None:
        batch = torch.tensor([0] * 11 + [1] * 22 + [2] * 7)
        graph = small_data().replace(batch=batch, graph_y=torch.tensor([0, 1, 4]))
        made = GAT.for_data(graph).eval()
        x = graph.features.to_dense()
        assert torch.equal(made(x, graph.edge_index, batch), made(graph))
        assert torch.equal(made(graph.to_data()), made(graph))


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
            ({"num_layers": 0}, "`num_layers` must be at least 1"),
        ):
            with pytest.raises(InputError, match=message):
                GAT(4, 2, **arguments)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="`norm` must be one of"):
            GT(4, 2, norm=None)
        with pytest.raises(InputError, match="divisible"):
            GT(4, 2, hidden_channels=20, heads=(8, 1))
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
