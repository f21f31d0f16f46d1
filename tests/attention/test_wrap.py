"""`fgai.wrap`: any call, tried on the user's data, and explained where it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

import fgai
from fgai.attention import call_model, find_layers, model_name, prepared, record
from fgai.errors import InputError
from fgai.graph import Graph
from support import attack_cases as cases
from support import own_cases as own


class Odd(own.OwnNet):
    """Called in a way of its own, with a pair as its answer."""

    def forward(self, edges: tuple[Tensor, Tensor], *, nodes: Tensor, scale: float) -> tuple[Tensor, str]:
        return scale * super().forward(nodes, *edges), "more"


def odd_call(model: nn.Module, g: Any) -> Tensor:
    return model((g.edge_index, g.edge_attr), nodes=g.x, scale=2.0)[0]


def odd_model() -> Odd:
    model = Odd().eval()
    model.load_state_dict(own.own_model().state_dict())
    return model


def test_a_wrapped_model_is_taken_where_a_model_is_taken() -> None:
    data, model = own.own_data(), odd_model()
    wrapped = fgai.wrap(model, odd_call, data)
    graph = prepared(wrapped, Graph.from_data(data))
    plain = own.own_model()
    assert wrapped.model is model and model_name(wrapped) == "Odd"
    assert list(find_layers(wrapped)) == ["first", "second"]
    assert torch.equal(fgai.wrap(model, odd_call, graph)(graph), call_model(wrapped, graph))
    torch.testing.assert_close(wrapped(data), 2 * plain(data.x, data.edge_index, data.edge_attr))
    with record(wrapped) as tape:
        call_model(wrapped, graph)
    assert [layer.name for layer in tape.attention] == ["first", "second"]
    options = {"nodes": 2, "edges": 3, "k": 2, "curves": False, "nulls": False}
    with cases.quiet():
        found = fgai.evaluate(wrapped, data, "standard", **options)
        assert fgai.certify_attention(wrapped, data, radius=0.01).layer().prediction.class_status == "exact"
    assert found.metrics["f1"]["clean"] == own.own_accuracy(plain, data)
    assert found.model["class"] == "Odd" == found.name
    assert fgai.explain(wrapped, data, 3, threat=None, certificate=False).neighbours


def test_what_is_made_of_it_is_wrapped_and_leaves_it_alone() -> None:
    data, model = own.own_data(), odd_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrapped = fgai.wrap(model, odd_call)
    faithful = fgai.make_faithful(wrapped, data, epochs=2, nodes=2, edges=3, progress=False)
    limited, trained = (
        fgai.limit(wrapped, data, 0.0, shrink=0.0),
        fgai.train(wrapped, data, epochs=2, progress=False),
    )
    for made in (faithful, limited, trained):
        assert made(data).shape == (40, 3) and type(made.model) is Odd and made.model is not model
    assert torch.equal(limited(data), wrapped(data)) and not torch.equal(faithful(data), wrapped(data))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_models_that_take_a_data_object_or_a_batch() -> None:
    class TakesData(own.OwnNet):
        def forward(self, data: Data) -> Tensor:
            return super().forward(data.x, data.edge_index, data.edge_attr)

    class Pooled(own.OwnNet):
        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
            rows = super().forward(x, edge_index, edge_attr)
            return torch.zeros(int(batch.max()) + 1, own.CLASSES).index_add(0, batch, rows)

    data = own.own_data()
    fgai.wrap(TakesData().eval(), lambda m, g: m(g), data)
    pair = [data.clone(), own.own_data(4)]
    small = [one.update({"y": torch.tensor([number])}) for number, one in enumerate(pair)]
    both = Graph.from_data(Batch.from_data_list(small))
    model = Pooled().eval()  # needs no wrapping: its arguments have the names of the fields
    wrapped = fgai.wrap(model, lambda m, g: m(g.x, g.edge_index, g.edge_attr, g.batch))
    found = [call_model(one, prepared(one, both.replace())) for one in (model, wrapped)]
    assert found[0].shape == (2, own.CLASSES) and torch.equal(*found)


def _closed_over(m: nn.Module, g: Any) -> Tensor:
    return own.own_model()(g.x, g.edge_index, g.edge_attr)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "another shape": (lambda m, g: odd_call(m, g)[:, 0], r"must return logits \[40, classes\].*got \(40,\)"),
    "fewer rows": (lambda m, g: odd_call(m, g)[g.edge_index[0]], r"a row per node, got \(\d+, 3\) from Odd"),
    "a pair": (lambda m, g: (odd_call(m, g), 1), r"Odd must return one tensor of logits, got tuple"),
    "wrong arguments": (
        lambda m, g: m(g.x, g.edge_index),
        r"Odd failed on 'graph' with x \[40, 6\].*edge_attr",
    ),
    "no such field": (lambda m, g: odd_call(m, g) + g.pos, r"Odd failed .*check how it is called"),
    "the order of edges": (
        lambda m, g: odd_call(m, g) * g.edge_attr[0, 1],
        r"Odd gives other outputs .* in another order",
    ),
    "something else": (
        lambda m, g: odd_call(m, g) + (0 if g.y is None else 1),
        r"returns other logits for `data` than for the fields fgai keeps of it \(x, edge_index, edge_attr\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_call_that_does_not_fit_is_explained(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises(InputError, match=words):
        fgai.wrap(odd_model(), call, own.own_data())
    if case != "something else":  # only a comparison with the data itself can show it
        with pytest.raises(InputError, match=words):
            fgai.explain(fgai.wrap(odd_model(), call), own.own_data(), 0, threat=None, certificate=False)


def test_a_call_that_uses_another_model_is_refused() -> None:
    wrapped = fgai.wrap(odd_model(), _closed_over)
    with pytest.raises(fgai.AttentionError, match="none of its attention layers"):
        fgai.explain(wrapped, own.own_data(), 0, threat=None, certificate=False)


def test_what_needs_no_wrapping_is_refused() -> None:
    data = own.own_data()
    bare = data.clone()
    bare.edge_attr = None
    with pytest.raises(InputError, match="`call` must be a function"):
        fgai.wrap(odd_model(), None)
    with pytest.raises(InputError, match="GAT needs no `wrap`"):
        fgai.wrap(fgai.GAT.for_data(bare), odd_call)
    with pytest.raises(InputError, match="Wrapped needs no `wrap`"):
        fgai.wrap(fgai.wrap(odd_model(), odd_call), odd_call)
