"""Explainers behind one call: aligned edges, own copies, seeds, and references from PyG and from loops."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.explain import CaptumExplainer, Explainer
from torch_geometric.nn import GATConv, GCNConv

from fgai.attention import observe, prepared
from fgai.errors import AttentionError, InputError, MissingExtraError
from fgai.explanations import (
    EDGE_EXPLAINERS,
    AsPyG,
    EdgeExplainer,
    EdgeScores,
    FaithfulAttention,
    edge_explainer,
)
from fgai.explanations.posthoc import _ReceptiveFields
from fgai.graph import Graph
from fgai.metrics import overlap, overlap_chance
from fgai.models import AttentionModel
from fgai.sparse import edge_keys, key_ends
from fgai.training import train, untrained_model
from support.graph_cases import build, small_data

GRAPH = small_data()
DATA = GRAPH.to_data()
CONFIG = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
NODES = [11, 4]


@pytest.fixture(scope="module")
def model() -> AttentionModel:
    return train(untrained_model("GAT", GRAPH, hidden_channels=2, heads=3), GRAPH, epochs=8, progress=False)


def injected(graph: Graph) -> Graph:
    """Two loud nodes more."""
    loud = 9 * torch.randn(2, graph.num_features, generator=torch.Generator().manual_seed(1))
    return graph.inject(torch.tensor([[4, 11, 7], [2, 4, 9]]), loud)[0]


class Plain(nn.Module):
    """A user's model without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(6, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index)


def field_by_loop(graph: Graph, node: int, hops: int) -> set[tuple[int, int]]:
    """The edges on paths of at most `hops` steps to a node, loops left out."""
    edges = [(a, b) for a, b in graph.edge_index.t().tolist() if a != b]
    near, found = {node}, set[tuple[int, int]]()
    for _ in range(hops):
        found |= {(a, b) for a, b in edges if b in near}
        near |= {a for a, _ in found}
    return found


def pairs(keys: Tensor) -> list[tuple[int, int]]:
    source, destination = key_ends(keys)
    return list(zip(source.tolist(), destination.tolist(), strict=True))


class TestEveryExplainer:
    @pytest.mark.parametrize("name", EDGE_EXPLAINERS)
    def test_one_score_per_edge_of_the_field(self, model: AttentionModel, name: str) -> None:
        """On the clean graph and on an attacked one: old edges keep their identity among new ones."""
        before = {key: value.clone() for key, value in model.state_dict().items()}
        state = torch.random.get_rng_state()
        model.train()
        explain = edge_explainer(name, model, GRAPH, epochs=1)
        for graph in (GRAPH, injected(GRAPH)):
            found = explain(graph, NODES)
            assert [one.node for one in found] == NODES
            for one in found:
                assert set(pairs(one.keys)) == field_by_loop(graph, one.node, 2)
                assert one.keys.shape == one.values.shape and torch.isfinite(one.values).all()
                assert (one.keys.diff() > 0).all()
        assert model.training and torch.equal(state, torch.random.get_rng_state())
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key])
        assert all(parameter.requires_grad for parameter in model.parameters())
        model.eval()

    @pytest.mark.parametrize("name", EDGE_EXPLAINERS)
    def test_seeds(self, model: AttentionModel, name: str) -> None:
        """The same seed says the same, another one something else, if the explainer draws at all."""
        one, same, other = (
            edge_explainer(name, model, GRAPH, seed=seed, epochs=1)(GRAPH, [4])[0].values
            for seed in (1, 1, 2)
        )
        assert torch.equal(one, same)
        assert torch.equal(one, other) != EDGE_EXPLAINERS[name].draws

    @pytest.mark.parametrize("name", EDGE_EXPLAINERS)
    def test_a_node_without_neighbours(self, model: AttentionModel, name: str) -> None:
        (found,) = edge_explainer(name, model, GRAPH, epochs=1)(GRAPH, [GRAPH.num_nodes - 1])
        assert found.keys.numel() == found.values.numel() == 0

    @pytest.mark.parametrize("name", ["gnn-explainer", "saliency", "attention-log"])
    def test_other_models(self, name: str) -> None:
        """A transformer goes through `AsPyG`, a user's own model as it is."""

        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(3)
                self.first, self.second = GATConv(6, 4, heads=3, concat=False), GATConv(4, 3)

            def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
                return self.second(self.first(x, edge_index).relu(), edge_index)

        for given in (untrained_model("GT", GRAPH, hidden_channels=8, heads=(2, 1)), Net()):
            (found,) = edge_explainer(name, given, DATA, epochs=2)(DATA, torch.tensor([4]))
            assert set(pairs(found.keys)) == field_by_loop(GRAPH, 4, 2)


class TestReferences:
    @pytest.mark.parametrize("name", ["saliency", "integrated-gradients"])
    def test_captum_on_the_whole_graph(self, model: AttentionModel, name: str) -> None:
        """On the receptive field, through PyG's layers, the numbers are those of the whole graph."""
        method, options = {
            "saliency": ("Saliency", {}),
            "integrated-gradients": ("IntegratedGradients", {"n_steps": 7}),
        }[name]
        whole = Explainer(
            AsPyG(model),
            CaptumExplainer(method, **options),
            explanation_type="model",
            edge_mask_type="object",
            model_config=CONFIG,
        )(DATA.x, DATA.edge_index, index=4)
        (found,) = edge_explainer(name, model, GRAPH, epochs=7)(GRAPH, [4])
        wanted = whole.edge_mask[torch.isin(GRAPH.keys, found.keys)]
        torch.testing.assert_close(found.values, wanted, atol=1e-5, rtol=1e-4)
        assert float(wanted.abs().max()) > 1e-3

    @pytest.mark.parametrize(("name", "heads"), [("attention-mean", "mean"), ("attention-log", "log")])
    def test_attention_is_what_pyg_users_see(self, model: AttentionModel, name: str, heads: str) -> None:
        explainer = Explainer(
            AsPyG(model),
            FaithfulAttention(heads=heads),
            explanation_type="model",
            edge_mask_type="object",
            model_config=CONFIG,
        )
        (found,) = edge_explainer(name, model, GRAPH)(GRAPH, [11])
        mask = explainer(DATA.x, DATA.edge_index, index=11).edge_mask
        torch.testing.assert_close(found.values, mask[torch.isin(GRAPH.keys, found.keys)])

    @pytest.mark.parametrize(("name", "heads"), [("attention-mean", "mean"), ("attention-log", "log")])
    def test_overlap_is_the_metric_of_the_evaluation(
        self, model: AttentionModel, name: str, heads: str
    ) -> None:
        """Old edges only, matched by their ends."""
        attacked = injected(GRAPH)
        maps = [observe(model, prepared(model, g)).attention.detach() for g in (GRAPH, attacked)]
        before, after = (m.heads(heads).restrict(GRAPH.keys).over_layers("mean") for m in maps)
        k = 2
        wanted = overlap(before.values[:, 0], after.values[:, 0], GRAPH.adjacency.rowptr, k)
        explain = edge_explainer(name, model, GRAPH)
        every = range(GRAPH.num_nodes)
        destination = GRAPH.adjacency.destination
        values = [
            torch.cat([one.on(GRAPH.keys[destination == one.node]) for one in explain(graph, every)])
            for graph in (GRAPH, attacked)
        ]
        assert overlap(values[0], values[1], GRAPH.adjacency.rowptr, k) == wanted < 1

    def test_random_keeps_what_chance_keeps(self, model: AttentionModel) -> None:
        explain = edge_explainer("random", model, GRAPH)
        destination, rowptr, k = GRAPH.adjacency.destination, GRAPH.adjacency.rowptr, 2
        drawn = [
            torch.cat([one.on(GRAPH.keys[destination == one.node]) for one in explain(GRAPH, range(40))])
            for _ in range(60)
        ]
        shares = [overlap(a, b, rowptr, k) for a, b in zip(drawn[::2], drawn[1::2], strict=True)]
        assert sum(shares) / 30 == pytest.approx(overlap_chance(rowptr, k), abs=0.03)

    def test_the_whole_graph_where_the_field_is_not_enough(self) -> None:
        """GCN's degrees reach one step further than its messages."""

        class Mixed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(1)
                self.first, self.second = GCNConv(6, 4), GATConv(4, 3)

            def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
                return self.second(self.first(x, edge_index).relu(), edge_index)

        given = Mixed().eval()
        (found,) = edge_explainer("saliency", given, GRAPH)(GRAPH, [4])
        assert set(pairs(found.keys)) == field_by_loop(GRAPH, 4, 2)
        whole = Explainer(
            Mixed().eval(),
            CaptumExplainer("Saliency"),
            explanation_type="model",
            edge_mask_type="object",
            model_config=CONFIG,
        )(DATA.x, DATA.edge_index, index=4)
        torch.testing.assert_close(found.values, whole.edge_mask[torch.isin(GRAPH.keys, found.keys)])


class TestFields:
    def test_against_a_loop(self) -> None:
        graph = build(7, [(0, 1), (1, 2), (2, 3), (4, 3), (5, 4), (3, 3), (6, 5)])
        for node in range(7):
            for hops in (1, 2, 3):
                field = _ReceptiveFields(graph, hops).around(node)
                assert set(pairs(field.keys)) == field_by_loop(graph, node, hops)
                ends = field.x[field.edge_index][:, :, 0] / 10  # features say which node a row is
                assert ends.t().tolist() == [list(map(float, pair)) for pair in pairs(field.keys)]
                assert field.x[field.index, 0] == 10 * node


class TestDoor:
    def test_no_captum(self, model: AttentionModel, monkeypatch: pytest.MonkeyPatch) -> None:
        """Said before the model is touched."""
        monkeypatch.setitem(sys.modules, "captum", None)

        class Untouched(nn.Module):
            def forward(self, *_: Any) -> Tensor:
                raise AssertionError("called")

        for name in ("saliency", "integrated-gradients"):
            with pytest.raises(MissingExtraError, match=r"fgai\[explainers\]"):
                edge_explainer(name, Untouched(), GRAPH)
        assert edge_explainer("attention-log", model, GRAPH)(GRAPH, [4])

    def test_refusals(self, model: AttentionModel) -> None:
        with pytest.raises(InputError, match="did you mean 'saliency'"):
            edge_explainer("salience", model, GRAPH)
        with pytest.raises(InputError, match="`epochs`"):
            edge_explainer("gnn-explainer", model, GRAPH, epochs=0)
        with pytest.raises(InputError, match="`seed`"):
            edge_explainer("random", model, GRAPH, seed=-1)
        with pytest.raises(AttentionError):
            edge_explainer("saliency", Plain(), GRAPH)
        pooled = GRAPH.replace(batch=torch.zeros(40, dtype=torch.long), graph_y=torch.tensor([1]))
        with pytest.raises(InputError, match="nodes are classified"):
            edge_explainer("random", model, pooled)
        explain = edge_explainer("attention-log", model, GRAPH)
        for nodes in ([40], [-1], [[1, 2]], [0.5], torch.tensor([True, False])):
            with pytest.raises(InputError, match="`nodes`"):
                explain(GRAPH, nodes)
        assert explain(GRAPH, []) == []

    def test_explainers_that_do_not_run_say_which(self) -> None:
        """GraphMask and PyG's attention look for PyG's layers."""
        given = untrained_model("GAT", GRAPH, hidden_channels=2, heads=2, norm="layer")
        for name, called in (("graph-mask", "GraphMaskExplainer"), ("pyg-attention", "AttentionExplainer")):
            with pytest.raises(InputError, match=f"{called} does not run on this GAT"):
                edge_explainer(name, given, GRAPH, epochs=1)(GRAPH, [4])

    def test_models_that_read_more_of_the_graph(self, model: AttentionModel) -> None:
        """PyG's explainers hand no weights of edges on; attention has read them."""
        weighted = GRAPH.replace(edge_weight=torch.linspace(0.1, 9.0, GRAPH.num_edges))
        with pytest.raises(InputError, match="returns other logits"):
            edge_explainer("saliency", model, weighted)(weighted, [4])
        (found,) = edge_explainer("attention-log", model, weighted)(weighted, [4])
        (plain,) = edge_explainer("attention-log", model, GRAPH)(GRAPH, [4])
        assert not torch.allclose(found.values, plain.values)

    def test_models_that_cannot_be_called_so(self) -> None:
        class Attributed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = GATConv(6, 3, edge_dim=2)

            def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
                return self.conv(x, edge_index, edge_attr)

        graph = GRAPH.replace(edge_attr=torch.ones(GRAPH.num_edges, 2))
        with pytest.raises(InputError, match=r"does not run on this Attributed: .*edge_attr"):
            edge_explainer("saliency", Attributed(), graph)(graph, [4])
        assert edge_explainer("attention-mean", Attributed(), graph)(graph, [4])
        bare = GRAPH.replace(features=None)
        with pytest.raises(InputError, match="features"):
            _ReceptiveFields(bare, 2)

    def test_scores(self) -> None:
        keys = edge_keys(torch.tensor([0, 3]), torch.tensor([2, 2]))
        found = EdgeScores(2, keys, torch.tensor([0.5, 0.75]))
        assert found.on(keys.flip(0)).tolist() == [0.75, 0.5]
        with pytest.raises(InputError, match=r"1 → 2 is not in the receptive field of node 2"):
            found.on(edge_keys(torch.tensor([1]), torch.tensor([2])))
        with pytest.raises(InputError, match="int64"):
            found.on(keys.float())

    def test_an_explainer_of_ones_own(self, model: AttentionModel) -> None:
        class ByDegree(EdgeExplainer):
            def explain(self, graph: Graph, nodes: list[int]) -> list[EdgeScores]:
                fields = _ReceptiveFields(graph, 1)
                used = [fields.edges(node) for node in nodes]
                degree = graph.adjacency.degree.double()
                return [
                    EdgeScores(n, fields.keys[u], degree[fields.edge_index[0, u]])
                    for n, u in zip(nodes, used, strict=True)
                ]

        (found,) = ByDegree(model)(DATA, [4])
        assert found.values.numel() == int(GRAPH.adjacency.degree[4])
