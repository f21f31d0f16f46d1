"""Models that were changed after they were made: hooks, wrappers, replaced parts, hidden nonlinearities.

Each case builds a model and a graph anew, and says what a certificate of the last layer may be at best.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations, parametrize
from torch_geometric.nn import GATConv

import fgai
from fgai.attention import GraphModel
from fgai.datasets import planted
from fgai.graph import Graph
from fgai.models import GAT, GNNSVD, GT, AttentionLayer, GATv2, GNNGuard, ProGNN
from fgai.sparse import Features

EXACT, BOUND, UNKNOWN, REFUSED = "exact", "bound", "unknown", "refused"
Built = tuple[nn.Module, Graph]


class Case(NamedTuple):
    """A model to certify.

    Attributes:
        status: of the last layer's class radius, or `refused`.
        build: makes model and graph.
        during: what must be in force while the model runs.
    """

    status: str
    build: Callable[[], Built]
    during: Callable[[], AbstractContextManager[Any]] = nullcontext


CASES: dict[str, Case] = {}


def case(status: str, name: str = "") -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Add a case under the name of the function that builds it."""

    def added(build: Callable[[], Built]) -> Callable[[], Built]:
        CASES[name or build.__name__] = Case(status, build)
        return build

    return added


def small_graph() -> Graph:
    """A small graph with dense float64 features."""
    graph = planted(seed=3, num_nodes=48, num_classes=3)
    assert graph.features is not None
    return graph.replace(features=Features.dense(graph.features.to_dense().double()))


def own(kind: type[Any] = GAT, **sizes: Any) -> tuple[Any, Graph]:
    """One of fgai's models with random weights, large enough to say something."""
    torch.manual_seed(7)
    graph = small_graph()
    chosen = {"hidden_channels": 12, "heads": (2, 1), "encodings": 3} if kind is GT else {}
    model = kind.for_data(graph, **({"hidden_channels": 3, "heads": 2} | chosen | sizes)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model.eval(), graph


class Net(nn.Module):
    """A user's PyG model; `after` acts on what the last attention layer gives."""

    def __init__(
        self, graph: Graph, after: Callable[[Tensor], Tensor], last: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.first = GATConv(graph.num_features, 3, heads=2)
        self.last = last or GATConv(6, graph.num_classes, heads=2, concat=False)
        self.after = after

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits."""
        return self.after(self.last(self.first(x, edge_index).relu(), edge_index))


def pyg(after: Callable[[Tensor], Tensor] = lambda y: y, last: nn.Module | None = None) -> tuple[Net, Graph]:
    """A user's model in float64."""
    torch.manual_seed(11)
    graph = small_graph()
    return Net(graph, after, last).double().eval(), graph


class Wrapped(GraphModel):
    """One of fgai's models behind `after`, a function of (logits, model, graph)."""

    def __init__(self, model: Any, after: Callable[[Tensor, Any, Graph], Tensor]) -> None:
        super().__init__()
        self.model, self.after = model, after

    def prepare(self, graph: Graph) -> Graph:
        """As the model does."""
        prepared: Graph = self.model.prepare(graph)
        return prepared

    def forward(self, graph: Graph) -> Tensor:
        """Return logits."""
        return self.after(self.model(graph), self.model, graph)


def straight_through(y: Tensor) -> Tensor:
    """Quantised, with the gradient of the identity."""
    return y + ((y * 2).round() / 2 - y).detach()


def one_huge_node(y: Tensor) -> Tensor:
    """Quantised as above, beside one node whose logits dwarf all others."""
    return torch.cat([1e9 * y[:1], straight_through(y[1:])])


def mixed_beside_a_huge_node(y: Tensor) -> Tensor:
    """Linear, but each node also reads the node before it, where only a huge one would excuse it."""
    return torch.cat([1e9 * y[:1], y[1:] + 0.5 * y[1:].roll(1, 0)])


class _Lie(torch.autograd.Function):
    """Triples what it is given, and tells autograd that it did nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Add(_Lie):
    """The same under the name of an operation that is linear."""


class _Elsewhere(torch.autograd.Function):
    """A tanh computed by numpy, with a gradient of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(2 * x.detach().numpy().clip(-0.3, 0.3))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


FUNCTIONS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "nothing": (EXACT, lambda y: y),
    "a log": (EXACT, lambda y: (y.detach().clone(), y)[1]),
    "scaled": (EXACT, lambda y: 2 * y - 1),
    "centred": (EXACT, lambda y: y - y.mean(1, keepdim=True)),
    "written": (EXACT, lambda y: torch.zeros_like(y).copy_(y).mul_(3)),
    "masked": (EXACT, lambda y: torch.where(torch.arange(y.shape[1]) > 0, y, 2 * y)),
    "half detached": (UNKNOWN, lambda y: y + 2 * y.detach()),
    "tanh": (UNKNOWN, lambda y: torch.tanh(3 * y)),
    "clamped in place": (UNKNOWN, lambda y: y.clamp_(-0.2, 0.2)),
    "quantised": (UNKNOWN, lambda y: (y * 2).round() / 2),
    "straight through": (UNKNOWN, straight_through),
    "one huge node": (UNKNOWN, one_huge_node),
    "nodes mixed beside a huge one": (UNKNOWN, mixed_beside_a_huge_node),
    "gate": (UNKNOWN, lambda y: y * (y > 0)),
    "softmax": (UNKNOWN, lambda y: y.softmax(1)),
    "ranks": (UNKNOWN, lambda y: y + y.argsort(1).to(y.dtype)),
    "best only": (UNKNOWN, lambda y: y.masked_fill(y < y.amax(1, keepdim=True), -1.0)),
    "normed": (UNKNOWN, lambda y: y / y.norm(dim=1, keepdim=True)),
    "nodes mixed": (UNKNOWN, lambda y: y + 0.5 * y.roll(1, 0)),
    "branch": (UNKNOWN, lambda y: y if float(y.detach().abs().max()) < 1e3 else -y),
    "branch on a comparison": (UNKNOWN, lambda y: -y if torch.equal(y, y.detach().clone()) else y),
    "list": (UNKNOWN, lambda y: y * (1 + abs(y.detach()[0].tolist()[0]))),
    "numpy": (UNKNOWN, _Elsewhere.apply),
    "false gradient": (UNKNOWN, _Lie.apply),
    "false name": (UNKNOWN, Add.apply),
    "rounded to half": (UNKNOWN, lambda y: y.half().double()),
    "noise": (REFUSED, lambda y: y + 0.1 * torch.rand_like(y)),
}
"""What a hook, a wrapper or a user's model may do to logits, and what may then be certified."""

for what, (best, function) in FUNCTIONS.items():

    def hooked(function: Callable[[Tensor], Tensor] = function) -> Built:
        model, graph = own()
        model.convs[-1].register_forward_hook(lambda module, inputs, output: function(output))
        return model, graph

    def wrapped(function: Callable[[Tensor], Tensor] = function) -> Built:
        model, graph = own(GATv2)
        return Wrapped(model, lambda y, *_: function(y)), graph

    def users(function: Callable[[Tensor], Tensor] = function) -> Built:
        return pyg(function)

    CASES |= {f"hook: {what}": Case(best, hooked), f"wrapper: {what}": Case(best, wrapped)}
    CASES[f"PyG: {what}"] = Case(best, users)


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


CASES["hook on all modules"] = Case(UNKNOWN, own, _everywhere)


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
    def combine(self, attention: Tensor, values: Tensor, adjacency: Any) -> Tensor:
        return super().combine(attention.sqrt(), values, adjacency)


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
    return fgai.limit(model, graph), graph


@case(EXACT)
def limited_pyg() -> Built:
    model, graph = pyg()
    return fgai.limit(model, graph), graph


@case(UNKNOWN)
def limited_and_hooked() -> Built:
    model, graph = own()
    limited = fgai.limit(model, graph)
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
