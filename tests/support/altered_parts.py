"""Models whose parts were changed: hooks in odd places, replaced methods, shared and limited layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize
from torch_geometric.nn import GATConv

import fgai
from experiments.defences import GNNSVD, GNNGuard, ProGNN
from fgai.datasets import planted
from fgai.graph import Graph
from fgai.models import GAT, GT, AttentionLayer, GATv2
from support.altered_cases import (
    BOUND,
    CASES,
    EXACT,
    REFUSED,
    UNKNOWN,
    Built,
    Case,
    Net,
    case,
    own,
    pyg,
    small_graph,
)

__all__ = ["CASES"]


@case(EXACT)
def untouched_gat() -> Built:
    return own()


@case(BOUND)
def untouched_transformer() -> Built:
    return own(GT)


@case(EXACT)
def hook_before_the_first_layer() -> Built:
    model, graph = own()
    model.convs[0].value.register_forward_hook(lambda module, inputs, output: torch.tanh(output))
    return model, graph


@case(EXACT)
def hook_that_changes_the_input() -> Built:
    model, graph = own()
    model.convs[-1].register_forward_pre_hook(lambda module, inputs: (torch.sin(inputs[0]), *inputs[1:]))
    return model, graph


@case(UNKNOWN)
def hook_on_the_model() -> Built:
    model, graph = own()
    model.register_forward_hook(lambda module, inputs, output: output.relu())
    return model, graph


@case(UNKNOWN)
def hook_with_keywords() -> Built:
    model, graph = own()
    model.convs[-1].register_forward_hook(lambda m, args, kwargs, out: out.sin(), with_kwargs=True)
    return model, graph


@case(EXACT)
def hook_on_gradients() -> Built:
    model, graph = own()
    model.convs[-1].register_full_backward_hook(lambda module, before, after: None)
    return model, graph


@case(UNKNOWN)
def hook_between_layers() -> Built:
    model, graph = own(num_layers=3)
    model.convs[1].register_forward_hook(lambda module, inputs, output: 5 * output)
    model.convs[2].register_forward_hook(lambda module, inputs, output: output.abs())
    return model, graph


def _everywhere() -> Any:
    def after(module: nn.Module, inputs: Any, output: Any) -> Any:
        return torch.tanh(output) if isinstance(module, AttentionLayer) else None

    class Registered:
        def __enter__(self) -> None:
            self.handle = register_module_forward_hook(after)

        def __exit__(self, *_: object) -> None:
            self.handle.remove()

    return Registered()


def _class_patched() -> Any:
    join = AttentionLayer.join
    return patch.object(AttentionLayer, "join", lambda layer, out: join(layer, out).sin())


CASES["hook on all modules"] = Case(UNKNOWN, own, _everywhere)
CASES["method of the class replaced"] = Case(UNKNOWN, own, _class_patched)


@case(EXACT)
def compiled() -> Built:
    model, graph = own()
    return torch.compile(model), graph  # type: ignore[return-value]


@case(EXACT)
def compiled_in_place() -> Built:
    model, graph = own()
    model.compile()
    return model, graph


@case(UNKNOWN)
def method_replaced() -> Built:
    model, graph = own()
    layer = model.convs[-1]
    layer.join = lambda out: torch.tanh(type(layer).join(layer, out))
    return model, graph


@case(UNKNOWN)
def forward_replaced() -> Built:
    model, graph = own()
    forward = model.forward
    model.forward = lambda graph: forward(graph).square()
    return model, graph


class _Squashed(AttentionLayer):
    def join(self, out: Tensor) -> Tensor:
        return super().join(out).tanh()


@case(UNKNOWN)
def layer_of_a_subclass() -> Built:
    model, graph = own()
    model.convs[-1].__class__ = _Squashed
    return model, graph


class _Bent(GAT):
    def read_out(self, nodes: Tensor, graph: Graph, links: Tensor | None = None) -> Tensor:
        return super().read_out(nodes, graph, links).sin()


@case(UNKNOWN)
def model_of_a_subclass() -> Built:
    return own(_Bent)


@case(UNKNOWN)
def a_head_on_nodes() -> Built:
    model, graph = own()
    model.head = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)).double()
    return model, graph


class _Tanh(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


@case(EXACT)
def weight_parametrised() -> Built:
    model, graph = own()
    parametrize.register_parametrization(model.convs[-1].value, "weight", _Tanh())
    return model, graph


@case(EXACT)
def weight_normed() -> Built:
    model, graph = pyg()
    parametrizations.weight_norm(model.last.lin)  # type: ignore[arg-type]
    return model, graph


@case(EXACT)
def guarded() -> Built:
    model, graph = own(num_layers=3)
    trust = GNNGuard.for_data(graph).double().eval().trust
    model.guard = lambda x, given: trust(x, given.adjacency)
    return model, graph


@case(EXACT)
def guard_around() -> Built:
    return own(GNNGuard)


@case(EXACT)
def low_rank_around() -> Built:
    return own(GNNSVD, rank=5)


@case(EXACT)
def structure_learned() -> Built:
    return own(ProGNN, rank=5)


@case(UNKNOWN)
def guard_around_and_hook() -> Built:
    model, graph = own(GNNGuard)
    model.model.convs[-1].register_forward_hook(lambda module, inputs, output: output.tanh())
    return model, graph


def _transformer(change: Callable[[Any], object]) -> Built:
    model, graph = own(GT)
    change(model)
    return model, graph


TRANSFORMER: dict[str, tuple[str, Callable[[Any], object]]] = {
    "another activation": (UNKNOWN, lambda model: model.head.__setitem__(1, nn.Tanh())),
    "one more layer": (UNKNOWN, lambda model: model.head.append(nn.ReLU())),
    "block hooked": (UNKNOWN, lambda m: m.blocks[-1].wide.register_forward_hook(lambda *a: a[2].sin())),
    "update replaced": (UNKNOWN, lambda m: setattr(m.blocks[-1], "update", lambda x, y: (x + y).tanh())),
    "norm replaced": (UNKNOWN, lambda m: setattr(m.blocks[-1], "norm_feed", nn.LayerNorm(12).double())),
    "no bias": (BOUND, lambda model: setattr(model.head[0], "bias", None)),
}
for what, (best, change) in TRANSFORMER.items():
    CASES[f"GT: {what}"] = Case(best, lambda change=change: _transformer(change))  # type: ignore[misc]


class _Squared(GATConv):
    def message(self, x_j: Tensor, alpha: Tensor) -> Tensor:
        return super().message(x_j, alpha.square())


@case(UNKNOWN)
def message_of_a_subclass() -> Built:
    return pyg(last=_Squared(6, 3, heads=2, concat=False))


@case(UNKNOWN)
def largest_message() -> Built:
    return pyg(last=GATConv(6, 3, heads=2, concat=False, aggr="max"))


class _Twice(Net):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        hidden = self.first(x, edge_index).relu()
        return self.last(hidden, edge_index) + self.last(hidden.sin(), edge_index)


@case(EXACT)
def a_layer_used_twice() -> Built:
    torch.manual_seed(11)
    graph = small_graph()
    return _Twice(graph, lambda y: y).double().eval(), graph


@case(EXACT)
def layers_shared() -> Built:
    model, graph = own(num_layers=3)
    model.convs.insert(1, model.convs[1])
    return model, graph


class _Stubborn(nn.BatchNorm1d):
    def train(self, mode: bool = True) -> _Stubborn:
        return super().train(True)


@case(UNKNOWN)
def batch_norm_that_keeps_training() -> Built:
    model, graph = pyg()
    model.after = _Stubborn(3, track_running_stats=False).double().train()
    return model, graph


@case(EXACT)
def limited() -> Built:
    model, graph = own()
    return fgai.limit(model, graph, 0.0, shrink=0.0), graph


@case(EXACT)
def limited_softly() -> Built:
    model, graph = own(GATv2)
    return fgai.limit(model, graph, 0.05, shrink=0.4), graph


@case(EXACT)
def limited_pyg() -> Built:
    model, graph = pyg()
    return fgai.limit(model, graph, 0.0, shrink=0.0), graph


@case(UNKNOWN)
def limited_and_hooked() -> Built:
    model, graph = own()
    limited = fgai.limit(model, graph, 0.0, shrink=0.0)
    limited.convs[-1].register_forward_hook(lambda module, inputs, output: output.tanh())  # type: ignore[union-attr,index]
    return limited, graph


@case(EXACT)
def edge_weights() -> Built:
    model, graph = own()
    weights = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(1)).double() + 0.1
    return model, graph.replace(edge_weight=weights)


@case(REFUSED)
def half_precision() -> Built:
    model, _ = own()
    return model.bfloat16(), planted(seed=3, num_nodes=48, num_classes=3)


@case(REFUSED)
def weights_that_are_nan() -> Built:
    model, graph = own()
    model.convs[-1].value.weight.data[0] = torch.nan
    return model, graph


@case(REFUSED)
def dropout_that_never_stops() -> Built:
    return pyg(lambda y: torch.nn.functional.dropout(y, 0.3))
