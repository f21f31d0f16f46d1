"""Models that were changed after they were made: hooks, wrappers, replaced parts, hidden nonlinearities.

Each case builds a model and a graph anew, and says what a certificate of the last layer may be at best.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]
from torch_geometric.nn import GATConv

from fgai.attention import GraphModel
from fgai.datasets import planted
from fgai.graph import Graph
from fgai.models import GAT, GT, GATv2
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
    return torch.cat([1e9 * y[:1], y[1:] + 0.5 * y[torch.arange(1, len(y)) - 1]])


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


def in_a_thread(y: Tensor) -> Tensor:
    """A tanh that another thread computes, where nobody watches."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.tanh, 3 * y).result()


def far_kink(read: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Linear as long as logits are moderate, read by a way past PyTorch's operations in this thread."""
    return lambda y: y + torch.relu(read(y.detach()) - 25.0)


def by_dlpack(y: Tensor) -> Tensor:
    """The same memory, another tensor."""
    again: Tensor = from_dlpack(to_dlpack(y))
    return again


def by_thread(y: Tensor) -> Tensor:
    """A copy another thread made."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.clone, y).result()


def by_print(y: Tensor) -> Tensor:
    """The largest number, as it is printed."""
    return torch.full_like(y, float(repr(y.max()).removeprefix("tensor(").partition(",")[0].rstrip(")")))


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
    "in a thread": (UNKNOWN, in_a_thread),
    "far kink, by dlpack": (UNKNOWN, far_kink(by_dlpack)),
    "far kink, by a thread": (UNKNOWN, far_kink(by_thread)),
    "far kink, by printing": (UNKNOWN, far_kink(by_print)),
    "far kink, by a copy": (UNKNOWN, far_kink(copy.deepcopy)),
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
