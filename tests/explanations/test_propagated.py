"""Attention along paths, against a walk over every path and against products of dense matrices."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.explain import Explainer
from torch_geometric.nn import GATConv

from fgai.attention import record
from fgai.errors import InputError
from fgai.explanations import AsPyG, PropagatedAttention, edge_explainer
from fgai.models import GAT
from support.graph_cases import small_data

GRAPH = small_data(nodes=13)
DATA = GRAPH.to_data()
CONFIG = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}


def explainer(model: nn.Module, algorithm: PropagatedAttention | None = None, **options: object) -> Explainer:
    given = {"explanation_type": "model", "edge_mask_type": "object", "model_config": CONFIG, **options}
    return Explainer(model, algorithm or PropagatedAttention(), **given)


def dense(model: GAT) -> list[Tensor]:
    """[N, N] per layer, the mean over heads; the row is the destination."""
    with torch.no_grad(), record(model) as tape:
        model(GRAPH)
    found = []
    for layer in tape.attention:
        matrix = torch.zeros(GRAPH.num_nodes, GRAPH.num_nodes)
        matrix[layer.destination, layer.source] = layer.values.mean(1)
        found.append(matrix)
    return found


def by_walking(layers: list[Tensor], node: int, edge: tuple[int, int]) -> float:
    """Every walk of as many steps as layers that ends at the node: its product up to and with the edge."""
    total, count = 0.0, len(layers)
    for place in range(count):  # the layer in which the edge is met
        for rest in itertools.product(range(GRAPH.num_nodes), repeat=count - 1 - place):
            walk = [*rest, node]  # the states after this layer, up to the last
            if walk[0] != edge[1]:
                continue
            product = float(layers[place][edge[1], edge[0]])
            for step, (source, destination) in enumerate(itertools.pairwise(walk)):
                product *= float(layers[place + 1 + step][destination, source])
            total += product
    return total


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_path_counts(count: int) -> None:
    torch.manual_seed(2)
    model = GAT(6, 3, hidden_channels=2, heads=3, num_layers=count).eval()
    layers = dense(model)
    found = explainer(AsPyG(model))(DATA.x, DATA.edge_index, index=4).edge_mask
    chosen = torch.randperm(DATA.num_edges, generator=torch.Generator().manual_seed(0))[:12].tolist()
    chosen += (DATA.edge_index[1] == 4).nonzero().flatten().tolist()
    for spot in chosen:
        edge = (int(DATA.edge_index[0, spot]), int(DATA.edge_index[1, spot]))
        assert float(found[spot]) == pytest.approx(by_walking(layers, 4, edge), abs=1e-6)
    assert float(found.sum()) < count  # the rest went through self-loops


def test_masks_of_nodes_add_up() -> None:
    model = AsPyG(GAT(6, 3, hidden_channels=2, heads=3).eval())
    explain = explainer(model)
    single = [explain(DATA.x, DATA.edge_index, index=node).edge_mask for node in (1, 4)]
    both = explain(DATA.x, DATA.edge_index, index=torch.tensor([1, 4])).edge_mask
    torch.testing.assert_close(both, single[0] + single[1])
    every = explain(DATA.x, DATA.edge_index).edge_mask
    assert (every >= both - 1e-6).all()


def test_one_layer_is_attention_itself() -> None:
    conv = GATConv(6, 3, heads=2, concat=False).eval()
    _, (edges, alpha) = conv(DATA.x, DATA.edge_index, return_attention_weights=True)
    found = explainer(conv)(DATA.x, DATA.edge_index, index=3).edge_mask
    wanted = alpha.detach().mean(1)[: DATA.num_edges] * (DATA.edge_index[1] == 3)
    assert torch.equal(edges[:, : DATA.num_edges], DATA.edge_index)
    torch.testing.assert_close(found, wanted)


def test_the_same_by_name() -> None:
    model = GAT(6, 3, hidden_channels=2, heads=3).eval()
    (found,) = edge_explainer("propagated-attention", model, GRAPH)(GRAPH, [4])
    mask = explainer(AsPyG(model))(DATA.x, DATA.edge_index, index=4).edge_mask
    torch.testing.assert_close(found.values, mask[torch.isin(GRAPH.keys, found.keys)])
    assert float(mask.sum() - found.values.sum()) == pytest.approx(0, abs=1e-5)


def test_refusals() -> None:
    with pytest.raises(InputError, match="explains edges"):
        explainer(GATConv(6, 3), node_mask_type="object")
    with pytest.raises(InputError, match="heterogeneous"):
        PropagatedAttention()(GATConv(6, 3), {"a": DATA.x}, {}, target=DATA.y)
