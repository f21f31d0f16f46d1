"""Injection certificates of a user's PyG models: equal to fgai's, unbroken, and unknown where not proved."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import elu, relu
from torch_geometric.nn import BatchNorm, GATConv, GATv2Conv, Linear, Sequential, TransformerConv

import fgai
from fgai.attention import Limits, limits_of
from fgai.certificates import certify_injection
from fgai.graph import Graph
from fgai.models import GAT, GATv2

NODES, WIDTH, CLASSES = 24, 6, 3
CONVS = {GAT: GATConv, GATv2: GATv2Conv}


def small_graph(*, loops: bool = False) -> Graph:
    """Some nodes hear many, some few, and one hears itself alone."""
    generator = torch.Generator().manual_seed(5)
    pairs = torch.randint(NODES - 1, (2, 70), generator=generator)
    both = torch.unique(torch.cat([pairs, pairs.flip(0)], dim=1), dim=1)
    both = both[:, both[0] != both[1]]
    if loops:
        both = torch.cat([both, torch.arange(NODES).repeat(2, 1)], dim=1)
    return Graph.from_edges(both, NODES, torch.randn(NODES, WIDTH, generator=generator))


class Net(nn.Module):
    """Attention layers of a user with a call of their own between them."""

    def __init__(self, layers: list[nn.Module], forward: Callable[[Any, Any, Any], Any], **more: Any) -> None:
        super().__init__()
        self.convs, self.run = nn.ModuleList(layers), forward
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, edge_index: Tensor) -> Any:
        return self.run(self, x, edge_index)


def plain(net: Any, x: Any, edge_index: Tensor) -> Any:
    for conv in net.convs[:-1]:
        x = functional.dropout(elu(conv(x, edge_index)), 0.6, training=net.training)
    return net.convs[-1](x, edge_index)


def normed(net: Any, x: Any, edge_index: Tensor) -> Any:
    x = relu(net.norm(net.convs[0](x, edge_index)))
    return net.out(net.convs[1](x, edge_index)).log_softmax(dim=1)


def activated(net: Any, x: Any, edge_index: Tensor) -> Any:
    x = net.convs[0](net.enter(x), edge_index)
    x = net.convs[1](net.between(functional.leaky_relu(x)), edge_index)
    return net.out(net.drop(x.relu()))


def batch_norm(width: int) -> BatchNorm:
    norm = BatchNorm(width)
    with torch.no_grad():  # factors of both signs
        norm.module.weight.copy_(torch.linspace(-1.5, 1.2, width))
        norm.module.running_mean.copy_(torch.linspace(-0.2, 0.3, width))
        norm.module.running_var.copy_(torch.linspace(0.3, 2.0, width))
    return norm


def nets(conv: type[Any]) -> dict[str, Callable[[], nn.Module]]:
    """Structures that are followed, by name."""

    def wide(heads: int, concat: bool, classes: int, **options: Any) -> list[nn.Module]:
        return [
            conv(WIDTH, 3, heads=2, **options),
            conv(6, classes, heads=heads, concat=concat, **options),
        ]

    return {
        "plain": lambda: Net(wide(1, False, CLASSES), plain),
        "mean of heads": lambda: Net(wide(2, False, CLASSES), plain),
        "own loops": lambda: Net(wide(1, True, CLASSES, add_self_loops=False), plain),
        "three layers": lambda: Net(
            [conv(WIDTH, 3, heads=2, concat=False), conv(3, 3), conv(3, CLASSES)], plain
        ),
        "norm, one head, linear": lambda: Net(
            wide(1, True, 4), normed, norm=batch_norm(6), out=nn.Linear(4, CLASSES)
        ),
        "norm, heads, linear": lambda: Net(
            wide(2, True, 4, bias=False), normed, norm=batch_norm(6), out=Linear(8, CLASSES)
        ),
        "linear everywhere": lambda: Net(
            wide(2, True, 4),
            activated,
            enter=nn.Linear(WIDTH, WIDTH),
            between=nn.Linear(6, 6),
            drop=nn.Dropout(),
            out=nn.Linear(8, CLASSES),
        ),
        "no activation at the end": lambda: Net(
            [conv(WIDTH, 3, heads=2), conv(6, CLASSES)],
            lambda net, x, edges: relu(net.convs[1](net.convs[0](x, edges).relu_(), edges)),
        ),
    }


APART = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)


def limited(model: nn.Module, graph: Graph, apart: float, size: float = 0.5) -> Any:
    """Behind limits; its classes are apart by the last bias, so that some are certified."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(size)
        out: Any = model.out if hasattr(model, "out") else model.convs[-1]  # type: ignore[index]
        out.bias.copy_(apart * torch.tensor([1.5, 0.0, 0.3]))
    return fgai.limit(model.eval(), graph, 0.05, shrink=0.4)


@pytest.mark.parametrize("kind", [GAT, GATv2])
def test_the_same_weights_behind_the_same_limits_get_the_same_certificate(kind: type[Any]) -> None:
    graph, shares, apart = small_graph(), set(), 0.05 if kind is GAT else 0.1
    torch.manual_seed(2)
    own = kind(WIDTH, CLASSES, hidden_channels=3, heads=2)
    theirs = nets(CONVS[kind])["plain"]()
    for layer, conv in zip(own.convs, theirs.convs, strict=True):  # type: ignore[arg-type]
        maps = {"value": "lin"} if kind is GAT else {"value": "lin_l", "right": "lin_r"}
        for mine, other in maps.items():
            getattr(layer, mine).weight.data = getattr(conv, other).weight.data.t().clone()
            if kind is GATv2:
                getattr(layer, mine).bias.data = getattr(conv, other).bias.data.clone()
        weights = {"source_weight": "att_src", "destination_weight": "att_dst"}
        for mine, other in (weights if kind is GAT else {"score_weight": "att"}).items():
            getattr(layer, mine).data = getattr(conv, other).data[0].clone()
    own, theirs = limited(own, graph, apart), limited(theirs, graph, apart)
    for mine, other in zip(own.convs, theirs.convs, strict=True):
        for name, limits in mine.limits.items():
            size = limits.low.shape
            if name in other.limits:
                found = other.limits[name]
                limits.set(found.low.view(size), found.high.view(size), found.radius, found.usual)
            else:  # PyG's layers have none of these: those of the values bound them
                limits.set(*(torch.full(size, end) for end in (-torch.inf, torch.inf)), torch.inf, 0.0)
    for where, t in (("direct", 1), ("direct", 2), ("any", 1)):
        first, second = (certify_injection(m, graph, neighbours=t, where=where, k=2) for m in (own, theirs))
        assert first.known and second.known and second.reason == first.reason
        assert torch.equal(first.certified, second.certified) and torch.equal(first.classes, second.classes)
        assert torch.equal(first.degree, second.degree)
        shares.add(first.share())
        for order, same in zip(first.layers, second.layers, strict=True):
            assert (order.name, order.status) == (same.name, same.status)
            assert order.certified is not None and same.certified is not None
            assert torch.equal(order.certified, same.certified)
    assert max(shares) > min(shares)


def break_certificate(
    model: nn.Module,
    graph: Graph,
    holds: Tensor,
    classes: Tensor,
    t: int,
    where: str,
    copies: int,
    steps: int,
) -> int:
    """Attack many copies of a graph at once, assert that all fail, and return how many were tried.

    Every node of a copy, or one certified node, gains up to t of 2 t new nodes, whose features climb.
    """
    generator = torch.Generator().manual_seed(copies + t)
    n, new = graph.num_nodes, 2 * t
    size, edges = n + new, graph.edge_index
    copy = torch.arange(copies)
    victims = torch.ones(copies, n, dtype=torch.bool)
    if where == "direct":
        chosen = holds.nonzero().flatten()
        chosen = chosen[torch.randint(len(chosen), (copies,), generator=generator)]
        victims = torch.zeros(copies, n).scatter(1, chosen[:, None], 1.0).bool()
    slots = torch.randint(2, (copies, n, t), generator=generator) + 2 * torch.arange(t)
    joined = (torch.rand(copies, n, t, generator=generator) < 0.95) & victims[:, :, None]
    source = (copy[:, None, None] * size + n + slots)[joined]
    target = (copy[:, None, None] * size + torch.arange(n)[:, None]).expand(-1, -1, t)[joined]
    inside = n + torch.tensor([[i, j] for i in range(new) for j in range(new) if i != j]).t()
    if not any(getattr(conv, "add_self_loops", True) for conv in model.modules() if hasattr(conv, "att")):
        inside = torch.cat([inside, n + torch.arange(new).repeat(2, 1)], dim=1)
    every = torch.cat([edges, inside], dim=1)
    every = (every[:, None, :] + (copy * size)[:, None]).flatten(1)
    arrows = torch.cat([every, torch.stack([source, target])], dim=1)
    if where == "any":
        arrows = torch.cat([arrows, torch.stack([target, source])], dim=1)
    assert graph.features is not None
    old = graph.features.to_dense().expand(copies, -1, -1)
    scale = 10.0 ** (5 * torch.rand(copies, 1, 1, generator=generator) - 1)
    features = scale * torch.randn(copies, new, WIDTH, generator=generator)
    counted = victims & holds
    for step in range(steps + 1):
        features.requires_grad_()
        logits = model(torch.cat([old, features], dim=1).flatten(0, 1), arrows).view(copies, size, -1)[:, :n]
        assert torch.equal(logits.argmax(2)[counted], classes.expand(copies, -1)[counted])
        lead = logits.gather(2, classes.expand(copies, -1)[:, :, None])[:, :, 0]
        others = logits.scatter(2, classes.expand(copies, -1)[:, :, None], -torch.inf)
        (slope,) = torch.autograd.grad((lead - others[:, :, 1 + step % 2])[victims].sum(), features)
        features = (features - 0.3 * scale * slope.sign()).detach()
    return copies * (steps + 1)


@pytest.mark.parametrize(
    ("conv", "name"),
    [
        pytest.param(conv, name, marks=[pytest.mark.slow] * (conv is GATv2Conv and name != "plain"))
        for conv in (GATConv, GATv2Conv)
        for name in nets(conv)
    ],
)
def test_no_injected_nodes_change_a_certified_class(conv: type[Any], name: str) -> None:
    tried = 0
    graph = small_graph(loops=name == "own loops")
    for where, t in (("direct", 1), ("direct", 3), ("any", 1)):
        for apart in APART:  # as little as some nodes are certified with
            torch.manual_seed(3)
            model = limited(nets(conv)[name](), graph, apart, 0.8).requires_grad_(False)
            found = certify_injection(model, graph, neighbours=t, where=where)
            assert found.known, found.reason
            if found.certified.any():
                tried += break_certificate(model, graph, found.certified, found.classes, t, where, 60, 6)
            if found.share() > 0.3:
                break
    assert tried > 1000
    assert certify_injection(model, graph, neighbours=0).share() == 1.0


def attends(layers: int = 2, **options: Any) -> list[nn.Module]:
    widths = [WIDTH] + [CLASSES] * layers
    return [GATConv(a, b, **options) for a, b in pairwise(widths)]


def chained(change: Callable[[Any], Any]) -> Net:
    """Two layers, and a module or a function between them."""

    def run(net: Any, x: Tensor, edges: Tensor) -> Any:
        return net.convs[1](net.change(net.convs[0](x, edges)), edges)

    return Net(attends(), run, change=change)


def residual(net: Any, x: Any, edges: Tensor) -> Any:
    x = net.convs[0](x, edges)
    return x + net.convs[1](x.relu(), edges)


def branching(net: Any, x: Any, edges: Tensor) -> Any:
    return plain(net, x, edges) if x.shape[0] < 1000 else x[:, :CLASSES]


def typed(net: Any, x: Any, edges: Tensor) -> Any:
    x = net.convs[0](x, edges)
    return net.convs[1](x.clamp(-99, 99) if isinstance(x, Tensor) else x, edges)


def kept(net: Any, x: Any, edges: Tensor) -> Any:
    net.seen = x = net.convs[0](x, edges)  # what a model keeps is not read again
    return net.convs[1](x.relu(), edges)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "residual": (lambda: Net(attends(), residual), "used more than once"),
    "residual of PyG": (lambda: Net(attends(residual=True), plain), "residual connection"),
    "edge attributes": (lambda: Net(attends(edge_dim=2), plain), "uses edge attributes"),
    "shared layer": (
        lambda: Net(
            [GATConv(WIDTH, WIDTH), GATConv(WIDTH, CLASSES)],
            lambda net, x, e: net.convs[1](net.convs[0](net.convs[0](x, e).relu(), e).relu(), e),
        ),
        "more than once",
    ),
    "bipartite weights": (
        lambda: Net([GATConv((WIDTH, WIDTH), 3), GATConv(3, CLASSES)], plain),
        "other weights for destinations",
    ),
    "bipartite input": (
        lambda: Net(attends(), lambda net, x, e: net.convs[1](net.convs[0]((x, x), e).relu(), e)),
        "bipartite",
    ),
    "self-loops here and there": (
        lambda: Net([GATConv(WIDTH, 3), GATConv(3, CLASSES, add_self_loops=False)], plain),
        "some layers add self-loops",
    ),
    "nobody to hear": (lambda: Net(attends(add_self_loops=False), plain), "add self-loops"),
    "other edges": (
        lambda: Net(attends(), lambda net, x, e: net.convs[1](net.convs[0](x, e.flip(0)).relu(), e)),
        "does not use the edges",
    ),
    "branch on the number of nodes": (lambda: Net(attends(), branching), "cannot be traced"),
    "branch on a type": (lambda: Net(attends(), typed), "`clamp`"),
    "mean of all nodes": (lambda: chained(lambda x: x - x.mean(0)), "used more than once"),
    "layer norm": (lambda: chained(nn.LayerNorm(3)), "not followed"),
    "norm of the batch": (
        lambda: chained(nn.BatchNorm1d(3, track_running_stats=False)),
        "statistics of all nodes",
    ),
    "softplus": (lambda: chained(functional.softplus), "`softplus` is not followed"),
    "steep activation": (lambda: chained(nn.LeakyReLU(3.0)), "slope of 3.0"),
    "falling activation": (lambda: chained(nn.ELU(2.0)), "alpha of 2.0"),
    "dropout at test time": (lambda: chained(lambda x: functional.dropout(x, 0.0)), "evaluation mode"),
    "other attention": (
        lambda: Net([TransformerConv(WIDTH, 3), GATConv(3, CLASSES)], plain),
        "TransformerConv",
    ),
    "slope of the score": (lambda: Net(attends(negative_slope=1.5), plain), "slope of 1.5"),
    "other sums": (lambda: Net(attends(aggr="mean"), plain), "must sum"),
}


def refused(model: nn.Module, graph: Graph, word: str) -> None:
    found = certify_injection(model, graph, neighbours=1, where="direct")
    assert not found.known and word in found.reason, found.reason
    assert not found.certified.any() and bool((found.classes == -1).all())
    row = next(line for line in str(found).splitlines() if line.startswith("| class"))
    assert "–" in row and "0.000" not in row


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_proof_does_not_describe_is_unknown(name: str) -> None:
    make, word = REFUSED[name]
    torch.manual_seed(0)
    refused(fgai.limit(make().eval(), small_graph(), 0.0, shrink=0.0), small_graph(), word)


def model_of(forward: Callable[..., Any] = plain) -> Any:
    torch.manual_seed(0)
    return fgai.limit(Net(attends(), forward).eval(), small_graph(), 0.0, shrink=0.0)


def test_what_was_changed_in_a_layer_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = small_graph()
    assert certify_injection(model_of(), graph).known

    def doubled(module: Any, inputs: Any, output: Tensor) -> Tensor:
        return 2 * output

    for path in ("convs.0", "convs.1.lin", "convs.1.limits.value"):
        model = model_of()
        model.get_submodule(path).register_forward_hook(doubled)
        refused(model, graph, "hook")
    for path in ("convs.0", "convs.1.lin"):
        model = model_of()
        model.get_submodule(path).register_forward_pre_hook(lambda module, inputs: inputs)
        refused(model, graph, "hook")
    model = model_of()
    model.register_forward_hook(doubled)
    refused(model, graph, "`mul` is not followed")
    model = model_of()
    model.convs[0].register_message_forward_hook(lambda module, inputs, output: 2 * output)
    refused(model, graph, "hook")
    model = model_of()
    model.convs[0].lin._forward_hooks.clear()
    refused(model, graph, "hook")
    model = model_of()
    model.convs[0].propagate = lambda edges, x, alpha, size: 2 * x[0]
    refused(model, graph, "`propagate` replaced")
    model = model_of()
    model.convs[0].limits = nn.ModuleDict({"value": Limits(3)})
    refused(model, graph, "hook")
    refused(Net(attends(), plain).eval(), graph, "no limits")
    model = model_of()
    with monkeypatch.context() as patch:
        patch.setattr(GATConv, "forward", lambda self, x, edge_index: 2 * self.lin(x))
        refused(model, graph, "`forward` was replaced")
    with monkeypatch.context() as patch:
        patch.setattr("torch_geometric.nn.conv.gat_conv.softmax", lambda alpha, *_: alpha.sigmoid())
        refused(model, graph, "something else than the model")


def test_a_model_is_left_as_it_was_and_read_however_it_is_called() -> None:
    graph = small_graph()
    model = model_of(kept)
    found = certify_injection(model, graph)
    assert found.known and isinstance(model.seen, Tensor) and type(model.seen) is Tensor
    wrapped = fgai.wrap(model_of(), lambda net, data: net(data.x, data.edge_index))
    assert torch.equal(certify_injection(wrapped, graph).certified, found.certified)
    assert [layer.name for layer in found.layers] == ["convs.0", "convs.1"]
    counting = fgai.wrap(model_of(), lambda net, data: net(data.x, data.edge_index) * data.num_nodes)
    refused(counting, graph, "used more than once")
    torch.manual_seed(0)
    others = (
        pyg.GAT(WIDTH, 4, 2, CLASSES, heads=2, v2=True, act="elu", norm="batch_norm", dropout=0.5),
        Sequential(
            "x, edge_index",
            [(GATConv(WIDTH, 3), "x, edge_index -> x"), nn.ReLU(), (GATConv(3, 3), "x, edge_index -> x")],
        ),
    )
    for other in others:
        certificate = certify_injection(fgai.limit(other.eval(), graph), graph, neighbours=0)
        assert certificate.known and certificate.share() == 1.0 and limits_of(other) == []
