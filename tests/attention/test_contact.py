"""First contact: a model that is not fgai's must answer here as it does by itself, or is refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATv2Conv

import fgai
from fgai.attention import call_model, prepared
from fgai.errors import InputError
from fgai.graph import Graph
from support.graph_cases import small_data

GRAPH = small_data()
WIDTH, CLASSES = GRAPH.num_features, GRAPH.num_classes


class Plain(nn.Module):
    """GATv2 as users write it, which counts how often it runs."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.runs = GATv2Conv(width, CLASSES, edge_dim=2), 0

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.runs += 1
        return self.conv(x, edge_index)


class KeepsEdgeValues(Plain):
    """Wrapped so that it takes `(x, edge_index)`, with the values of the edges inside."""

    def __init__(self, edge_attr: Tensor) -> None:
        super().__init__()
        self.register_buffer("edge_attr", edge_attr)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.conv(x, edge_index, self.edge_attr)


class TakesData(Plain):
    def forward(self, data: Data) -> Tensor:
        return super().forward(data.x, data.edge_index)


class NeedsEdgeValues(Plain):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.conv(x, edge_index, edge_attr)


class Noisy(Plain):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x + torch.rand_like(x), edge_index)


class NodeValues(Plain):
    """Keeps a row per node, so it cannot read a graph with more nodes."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x + torch.ones(GRAPH.num_nodes, 1), edge_index)


def shuffled_data() -> Data:
    """The same graph with its edges in the order a user happens to have."""
    data = GRAPH.to_data()
    order = torch.randperm(GRAPH.num_edges, generator=torch.Generator().manual_seed(3))
    data.edge_index = data.edge_index[:, order]
    return data


def keeping() -> KeepsEdgeValues:
    values = torch.rand(GRAPH.num_edges, 2, generator=torch.Generator().manual_seed(4))
    return KeepsEdgeValues(10 * values).eval()


DOORS: dict[str, Callable[[nn.Module, Data], Any]] = {
    "evaluate": lambda model, data: fgai.evaluate(model, data, "random", nodes=2, edges=3, k=2),
    "certify": lambda model, data: fgai.certify_attention(model, data, radius=0.01),
    "explain": lambda model, data: fgai.explain(model, data, 0, threat=None),
    "train": lambda model, data: fgai.train(model, data, epochs=1, progress=False),
    "make_faithful": lambda model, data: fgai.make_faithful(model, data, epochs=1, progress=False),
    "limit": fgai.limit,
}


@pytest.mark.parametrize("door", DOORS)
def test_values_kept_per_edge_are_refused_at_every_door(door: str) -> None:
    model, data = keeping(), shuffled_data()
    sorted_edges = Graph.from_data(data).edge_index
    with torch.no_grad():
        assert float((model(data.x, data.edge_index) - model(data.x, sorted_edges)).abs().max()) > 1
    words = r"KeepsEdgeValues gives other outputs .* in another order.*give them as `data.edge_attr`"
    with pytest.raises(InputError, match=words):
        DOORS[door](model, data)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("model", [TakesData, NeedsEdgeValues])
def test_other_arguments_are_refused_in_words(door: str, model: type[Plain]) -> None:
    words = rf"{model.__name__}.forward takes \(.*fgai calls it as model\(x, .*say how.*fgai.wrap"
    with pytest.raises(InputError, match=words):
        DOORS[door](model().eval(), GRAPH.to_data())


def test_an_argument_the_data_does_not_have_is_named() -> None:
    with pytest.raises(InputError, match=r"'graph' has no `edge_attr`, give `data.edge_attr`"):
        prepared(NeedsEdgeValues().eval(), Graph.from_data(GRAPH.to_data()))


@pytest.mark.parametrize("name", ["edge_attr", "edge_weight"])
@pytest.mark.parametrize("door", DOORS)
def test_values_a_model_would_not_see_are_refused(door: str, name: str) -> None:
    data = GRAPH.to_data()
    setattr(data, name, torch.rand(GRAPH.num_edges))
    words = rf"`{name}` of the graph is no argument of Plain.forward\(x.*set `data.{name} = None`"
    with pytest.raises(InputError, match=words):
        DOORS[door](Plain().eval(), data)


def test_counted_duplicates_are_refused_and_the_remedy_works() -> None:
    data = GRAPH.to_data()
    data.edge_index = torch.cat([data.edge_index, data.edge_index[:, :7]], dim=1)
    with pytest.warns(fgai.FgaiWarning, match="7 duplicate edges"):
        graph = Graph.from_data(data)
    with pytest.raises(InputError, match=r"counts the 7 duplicate edges of 'graph'.*coalesce"):
        prepared(Plain().eval(), graph)
    prepared(Plain().eval(), Graph.from_data(data.coalesce()))


def test_models_that_answer_the_same_pass_and_are_asked_once_per_graph() -> None:
    model, graph = Plain().train(), GRAPH.replace()
    prepared(model, graph)
    asked = model.runs
    assert asked == 2 and model.training
    for _ in range(3):
        assert prepared(model, graph) is graph
    assert model.runs == asked
    prepared(model, GRAPH.replace())
    assert model.runs == 2 * asked
    prepared(Plain(), graph)  # another model on a known graph is looked at, too
    assert model.runs == 2 * asked


def test_random_outputs_are_left_to_the_warning_about_them() -> None:
    model = Noisy().eval()
    state = torch.get_rng_state()
    prepared(model, GRAPH.replace())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("own", [True, False])
def test_features_of_another_type_are_refused(dtype: torch.dtype, own: bool) -> None:
    model = fgai.GAT.for_data(GRAPH).eval() if own else Plain().eval()
    data = GRAPH.to_data()
    data.x = data.x.to(dtype)
    with pytest.raises(InputError, match=rf"are {dtype}, .* torch.float32; use `data.x = data.x.to"):
        prepared(model, Graph.from_data(data))
    if own:
        with pytest.raises(InputError, match=f"are {dtype}"):
            model(data)


def test_values_on_edges_of_another_type_are_refused() -> None:
    data = GRAPH.to_data()
    data.edge_attr = torch.rand(GRAPH.num_edges, 2, dtype=torch.float64)
    with pytest.raises(InputError, match=r"attributes of edges .* torch.float64.*use `data.edge_attr = "):
        prepared(NeedsEdgeValues().eval(), Graph.from_data(data))


def test_what_fails_inside_a_model_is_said_with_its_cause() -> None:
    with pytest.raises(
        InputError, match=r"Plain failed .* x \[40, 6\], edge_index .*how many features"
    ) as caught:
        prepared(Plain(WIDTH + 1).eval(), GRAPH.replace())
    assert isinstance(caught.value.__cause__, RuntimeError)
    model = NodeValues().eval()
    attacked, _ = prepared(model, GRAPH.replace()).inject(torch.tensor([[0, 1]]))
    with pytest.raises(InputError, match=r"NodeValues failed .*nothing per node"):
        call_model(model, attacked)
