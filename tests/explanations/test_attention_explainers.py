"""`FaithfulAttention` inside PyG's `Explainer`, and fgai's models called as PyG calls models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.explain import Explainer, GNNExplainer, fidelity
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv, global_mean_pool

import fgai
from fgai.errors import AttentionError, FgaiWarning, InputError
from fgai.explanations import AsPyG, FaithfulAttention
from fgai.explanations.attention_explainers import _at_edges
from fgai.graph import Graph
from fgai.models import GAT, GT, AttentionModel
from fgai.training import train, untrained_model
from support.forward import seen_by
from support.graph_cases import small_data

GRAPH = small_data()
DATA = GRAPH.to_data()


class Net(nn.Module):
    """A user's own two-layer model."""

    def __init__(self, layer: type[nn.Module] = GATConv, pooled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = layer(6, 4, heads=3, dropout=0.5)
        self.second = layer(12, 3, heads=1)
        self.pooled = pooled

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        out = self.second(self.first(x, edge_index).relu(), edge_index)
        return global_mean_pool(out, batch) if self.pooled else out


def explainer(model: nn.Module, task: str = "node", **options: Any) -> Explainer:
    config = {"mode": "multiclass_classification", "task_level": task, "return_type": "raw"}
    given = {"explanation_type": "model", "edge_mask_type": "object", "model_config": config, **options}
    algorithm = given.pop("algorithm", None) or FaithfulAttention()
    return Explainer(model, algorithm, **given)


def by_hand(conv: Any, x: Tensor, edge_index: Tensor) -> dict[tuple[int, int], float]:
    """Head-averaged attention of a GATConv by (source, destination), from PyG's own return value."""
    conv.eval()
    _, (edges, alpha) = conv(x, edge_index, return_attention_weights=True)
    return {
        (int(a), int(b)): float(w)
        for (a, b), w in zip(edges.t().tolist(), alpha.detach().mean(1), strict=True)
    }


class TestMask:
    @pytest.mark.parametrize("layer", [GATConv, GATv2Conv, TransformerConv])
    def test_values_stand_on_the_users_edges(self, layer: type[nn.Module]) -> None:
        """Edges in a shuffled order, some self-loops among them, as PyG's own explainer gets wrong."""
        loops = torch.tensor([[3, 7, 11], [3, 7, 11]])
        edges = torch.cat([loops[:, :1], DATA.edge_index, loops[:, 1:]], dim=1)
        edges = edges[:, torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(1))]
        model = Net(layer).eval()
        found = explainer(model, algorithm=FaithfulAttention(heads="mean"))(DATA.x, edges)
        first = by_hand(model.first, DATA.x, edges)
        second = by_hand(model.second, model.first(DATA.x, edges).relu(), edges)
        for spot, pair in enumerate(map(tuple, edges.t().tolist())):
            wanted = (first.get(pair, 0.0) + second.get(pair, 0.0)) / 2
            assert float(found.edge_mask[spot]) == pytest.approx(wanted, abs=1e-6), pair
        assert found.validate(raise_on_error=True)

    def test_reductions(self) -> None:
        model = Net().eval()
        x, edges = DATA.x, DATA.edge_index
        masks = {
            layer: explainer(model, algorithm=FaithfulAttention(layer=layer))(x, edges).edge_mask
            for layer in ("mean", "max", "last", 0, 1, -1)
        }
        torch.testing.assert_close(masks["mean"], (masks[0] + masks[1]) / 2)
        torch.testing.assert_close(masks["max"], torch.maximum(masks[0], masks[1]))
        torch.testing.assert_close(masks["last"], masks[1])
        torch.testing.assert_close(masks[-1], masks[1])
        strongest = explainer(model, algorithm=FaithfulAttention(layer=0, heads="max"))(x, edges).edge_mask
        assert (strongest >= masks[0]).all() and (strongest > masks[0]).any()

    def test_index_cuts_to_the_receptive_field(self) -> None:
        chain = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])
        found = explainer(Net())(DATA.x[:6], chain, index=3)
        assert (found.edge_mask > 0).tolist() == [False, True, True, False, False]
        shared = nn.Module()
        shared.conv = GATConv(6, 2, heads=3)  # type: ignore[assignment]
        shared.forward = lambda x, e: shared.conv(shared.conv(x, e), e)  # type: ignore
        found = explainer(shared)(DATA.x[:6], chain, index=3)
        assert (found.edge_mask > 0).tolist() == [False, True, True, False, False]

    def test_other_direction_of_flow(self) -> None:
        conv = GATConv(6, 3, flow="target_to_source").eval()
        edges = torch.tensor([[0, 0, 1], [1, 2, 4]])
        found = explainer(conv)(DATA.x[:5], edges, index=0)
        _, (used, alpha) = conv(DATA.x[:5], edges, return_attention_weights=True)
        wanted = {
            tuple(pair): float(w) for pair, w in zip(used.t().tolist(), alpha.detach()[:, 0], strict=True)
        }
        assert found.edge_mask.tolist() == pytest.approx([wanted[0, 1], wanted[0, 2], 0.0])

    def test_parallel_edges_keep_their_own_values(self) -> None:
        layer = fgai.attention.LayerAttention.from_edges(
            torch.tensor([[0.2], [0.3], [0.5]]), [1, 1, 2], [0, 0, 0], num_nodes=3
        )
        keys = torch.tensor([2, 1, 1, 1, 5])
        assert _at_edges(layer, keys).tolist() == pytest.approx([0.5, 0.2, 0.3, 0.3, 0.0])

    def test_graph_task(self) -> None:
        small = [Data(x=DATA.x[:n], edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]])) for n in (3, 5)]
        batch = Batch.from_data_list(small)
        found = explainer(Net(pooled=True), "graph")(batch.x, batch.edge_index, batch=batch.batch)
        assert found.validate() and found.edge_mask.shape == (6,) and (found.edge_mask > 0).all()
        plus, minus = fidelity(explainer(Net(pooled=True), "graph"), found)
        assert 0 <= plus <= 1 and 0 <= minus <= 1


class TestDoor:
    def test_refusals_say_why(self) -> None:
        with pytest.raises(ValueError, match="explanation_type='model'"):
            explainer(Net(), explanation_type="phenomenon")
        with pytest.raises(InputError, match="explains edges"):
            explainer(Net(), node_mask_type="object")
        with pytest.raises(InputError, match="`layer` must be one of mean, max, last"):
            FaithfulAttention(layer="first")
        with pytest.raises(InputError, match="`heads`"):
            FaithfulAttention(heads="min")
        with pytest.raises(InputError, match="heterogeneous"):
            FaithfulAttention()(Net(), {"a": DATA.x}, {}, target=DATA.y)
        with pytest.raises(AttentionError, match="layer 2"):
            explainer(Net(), algorithm=FaithfulAttention(layer=2))(DATA.x, DATA.edge_index)

    def test_model_comes_back_when_its_forward_raises(self) -> None:
        model = Net().train()
        with pytest.raises(RuntimeError):
            FaithfulAttention()(model, DATA.x[:, :2], DATA.edge_index, target=DATA.y)
        assert model.training and "edge_updater" not in model.first.__dict__
        assert not model.first._forward_pre_hooks

    def test_wrapper_refuses(self) -> None:
        with pytest.raises(InputError, match="PyG's own can be used"):
            AsPyG(Net())
        with pytest.raises(InputError, match="nodes or graphs"):
            AsPyG(GAT(6, 4, task="link"))


@pytest.fixture(scope="module")
def model() -> AttentionModel:
    return train(untrained_model("GAT", GRAPH, hidden_channels=2, heads=3), GRAPH, epochs=8, progress=False)


class TestFgaiModels:
    def test_same_logits_and_attention(self, model: AttentionModel) -> None:
        wrapped = AsPyG(model)
        torch.testing.assert_close(wrapped(DATA.x, DATA.edge_index), model(GRAPH))
        order = torch.randperm(DATA.edge_index.shape[1], generator=torch.Generator().manual_seed(2))
        found = explainer(wrapped)(DATA.x, DATA.edge_index[:, order])
        _, attention = seen_by(model, model.prepare(GRAPH))
        wanted = attention.detach().heads("log").restrict(GRAPH.keys).over_layers("mean").values[:, 0]
        torch.testing.assert_close(found.edge_mask, wanted[order])
        assert found.validate()

    def test_masks_act_as_removal(self, model: AttentionModel) -> None:
        """A hard mask leaves the messages of the kept edges, unscaled, as in PyG's layers."""
        wrapped, edges = AsPyG(model), DATA.edge_index
        explain = explainer(wrapped)
        everything = torch.ones(edges.shape[1])
        torch.testing.assert_close(
            explain.get_masked_prediction(DATA.x, edges, None, everything), model(GRAPH)
        )
        half = (torch.arange(edges.shape[1]) % 2).float()
        masked = explain.get_masked_prediction(DATA.x, edges, None, half)
        dropped = {
            (int(a), int(b)) for (a, b), keep in zip(edges.t().tolist(), half, strict=True) if not keep
        }

        def by_loop(index: int, attention: Tensor, source: Tensor, destination: Tensor) -> Tensor:
            pairs = zip(source.tolist(), destination.tolist(), strict=True)
            return attention * torch.tensor([0.0 if pair in dropped else 1.0 for pair in pairs])[:, None]

        with fgai.attention.record(model, perturb=by_loop):
            wanted = model(GRAPH)
        torch.testing.assert_close(masked, wanted)
        assert wrapped._edge_mask is None and not torch.allclose(masked, model(GRAPH))

    def test_fidelity_and_other_explainers(self, model: AttentionModel) -> None:
        nodes = GRAPH.test_mask.nonzero().flatten() if GRAPH.test_mask is not None else None
        explain = explainer(AsPyG(model), threshold_config=("topk_hard", 30))
        found = explain(DATA.x, DATA.edge_index, index=nodes)
        assert int((found.edge_mask > 0).sum()) == 30
        plus, minus = fidelity(explain, found)
        assert 0 <= plus <= 1 and 0 <= minus <= 1
        learned = explainer(AsPyG(model), algorithm=GNNExplainer(epochs=3))(DATA.x, DATA.edge_index, index=4)
        assert learned.validate() and (learned.edge_mask > 0).any()

    def test_graphs_and_transformers(self) -> None:
        graph = Graph.from_edges(
            torch.tensor([[0, 1, 3, 4], [1, 2, 4, 5]]),
            6,
            DATA.x[:6],
            undirected=True,
            batch=torch.tensor([0, 0, 0, 1, 1, 1]),
            graph_y=torch.tensor([0, 1]),
        )
        pooled = AsPyG(GAT(6, 2, task="graph", hidden_channels=2, heads=3).eval())
        found = explainer(pooled, "graph")(graph.to_data().x, graph.edge_index, batch=graph.batch)
        assert found.validate() and found.prediction.shape == (2, 2)
        transformer = untrained_model("GT", GRAPH, hidden_channels=16, heads=(2, 1)).eval()
        assert isinstance(transformer, GT)
        assert explainer(AsPyG(transformer))(DATA.x, DATA.edge_index, index=2).validate()

    def test_odd_edges(self, model: AttentionModel) -> None:
        wrapped = AsPyG(model)
        none = torch.zeros(2, 0, dtype=torch.long)
        found = explainer(wrapped)(DATA.x, none)
        assert found.edge_mask.shape == (0,) and fidelity(explainer(wrapped), found)[0] == 0.0
        with pytest.warns(FgaiWarning, match="duplicate"):
            found = explainer(wrapped)(DATA.x, torch.tensor([[0, 0, 1], [1, 1, 1]]))
        assert float(found.edge_mask[0]) == float(found.edge_mask[1]) > 0 and float(found.edge_mask[2]) > 0


SNIPPET = """
model = fgai.make_faithful(model, data)                            # 1. attention that stays put
explainer = Explainer(model, FaithfulAttention(), **settings)      # 2. and is read from the right edges
explanation = explainer(data.x, data.edge_index, index=7)
"""


def test_two_changed_lines() -> None:
    """What a PyG user changes, as the README shows it."""
    settings = {
        "explanation_type": "model",
        "edge_mask_type": "object",
        "model_config": {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"},
    }
    few = {"epochs": 1, "nodes": 2, "edges": 3, "progress": False}
    door = type("fgai", (), {"make_faithful": staticmethod(lambda m, d: fgai.make_faithful(m, d, **few))})
    scope: dict[str, Any] = {
        "fgai": door, "Explainer": Explainer, "FaithfulAttention": FaithfulAttention, "model": Net().eval(),
        "data": DATA, "settings": settings,
    }  # fmt: skip
    exec(SNIPPET, scope)
    assert scope["explanation"].validate() and scope["explanation"].edge_mask.shape == (DATA.num_edges,)
    assert len(fidelity(scope["explainer"], scope["explanation"])) == 2
