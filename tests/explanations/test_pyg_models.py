"""A GAT told in PyG's own layers: the same numbers, also under masks."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.nn import GATConv, GATv2Conv

import fgai
from fgai.errors import InputError
from fgai.explanations import AsPyG, GATConvs
from fgai.models import GAT
from fgai.training import untrained_model
from support.graph_cases import small_data

GRAPH = small_data()
DATA = GRAPH.to_data()


@pytest.mark.parametrize("name", ["GAT", "GATv2"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("split", [False, True])
def test_same_logits_and_masks(name: str, layers: int, split: bool) -> None:
    model = untrained_model(name, GRAPH, hidden_channels=2, heads=3, num_layers=layers).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4)))
    told = GATConvs(model, split_heads=split)
    kinds = [type(module) for module in told.modules() if isinstance(module, GATConv | GATv2Conv)]
    assert len(kinds) == (3 * (layers - 1) + 1 if split else layers)
    torch.testing.assert_close(told(DATA.x, DATA.edge_index), model(GRAPH), atol=1e-5, rtol=1e-4)
    mask = torch.rand(DATA.num_edges, generator=torch.Generator().manual_seed(1))
    masked = []
    for called in (told, AsPyG(model)):
        set_masks(called, mask, DATA.edge_index, apply_sigmoid=False)
        masked.append(called(DATA.x, DATA.edge_index))
        clear_masks(called)
    torch.testing.assert_close(*masked, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(masked[0], model(GRAPH), atol=1e-3)


def test_another_type() -> None:
    model = untrained_model("GATv2", GRAPH, hidden_channels=2, heads=3).double().eval()
    x = DATA.x.double()
    told, wanted = GATConvs(model)(x, DATA.edge_index), AsPyG(model)(x, DATA.edge_index)
    assert told.dtype == torch.float64
    torch.testing.assert_close(told, wanted, atol=1e-12, rtol=1e-10)


def test_the_model_is_left_alone() -> None:
    model = untrained_model("GAT", GRAPH, hidden_channels=2, heads=3).train()
    told = GATConvs(model)
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert not told.training and not any(parameter.requires_grad for parameter in told.parameters())


def test_refusals() -> None:
    plain = untrained_model("GAT", GRAPH, hidden_channels=2, heads=2)
    others = [
        untrained_model("GAT", GRAPH, hidden_channels=2, heads=2, norm="layer"),
        untrained_model("GT", GRAPH, hidden_channels=8, heads=(2, 1)),
        GAT(6, 4, task="link"),
        fgai.limit(plain, GRAPH, 0.0, shrink=0.0),
        type("Mine", (GAT,), {})(6, 3),
        torch.nn.Linear(2, 3),
    ]
    for model in others:
        with pytest.raises(InputError, match="plain GAT or GATv2"):
            GATConvs(model)
