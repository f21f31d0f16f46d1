"""Thirty ordinary PyG models, as users write them, with random weights on a small graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    JumpingKnowledge,
    SAGEConv,
    SuperGATConv,
    TransformerConv,
)

from fgai.datasets import planted
from fgai.graph import Graph
from fgai.sparse import Features

HIDDEN = 6
CLASSES = 3


def graph_of(*, attributes: bool = False) -> Graph:
    """48 nodes with dense float64 features, and two numbers on every edge if asked for."""
    graph = planted(seed=3, num_nodes=48, num_classes=CLASSES)
    assert graph.features is not None
    graph = graph.replace(features=Features.dense(graph.features.to_dense().double()))
    if not attributes:
        return graph
    values = torch.rand(graph.num_edges, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return graph.replace(edge_attr=values)


class Stack(nn.Module):
    """Attention layers with an activation between them, and what users put around them.

    Args:
        conv: makes a layer from input width, output width and further arguments.
        width: of the features.
        layers: how many.
        activation: between layers.
        norm: makes a norm of a width, before the activation.
        dropout: rate, in the layers and between them.
        skip: add what went into a hidden layer, where the widths are equal.
        jump: how `JumpingKnowledge` joins the layers before a linear head; None for none.
        head: end with a linear layer.
        output: acts on the logits.
        options: of every layer.
    """

    def __init__(
        self,
        conv: Callable[..., nn.Module],
        width: int,
        *,
        layers: int = 2,
        activation: Callable[[Tensor], Tensor] = functional.elu,
        norm: Callable[[int], nn.Module] | None = None,
        dropout: float = 0.0,
        skip: bool = False,
        jump: str | None = None,
        head: bool = False,
        output: Callable[[Tensor], Tensor] = lambda y: y,
        **options: Any,
    ) -> None:
        super().__init__()
        ends_wide = head or jump is not None
        sizes = [width, *[HIDDEN] * (layers - 1), HIDDEN if ends_wide else CLASSES]
        self.convs = nn.ModuleList(conv(sizes[i], sizes[i + 1], **options) for i in range(layers))
        self.norms = nn.ModuleList(norm(HIDDEN) if norm else nn.Identity() for _ in range(layers - 1))
        self.jump = None if jump is None else JumpingKnowledge(jump, HIDDEN, layers)
        wide = HIDDEN * layers if jump == "cat" else HIDDEN
        self.head = nn.Linear(wide, CLASSES) if ends_wide else nn.Identity()
        self.activation, self.output = activation, output
        self.dropout, self.skip = dropout, skip

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor | None = None) -> Tensor:
        """Return logits."""
        states, given = [], () if edge_attr is None else (edge_attr,)
        for index, conv in enumerate(self.convs):
            x = functional.dropout(x, self.dropout, self.training)
            out = conv(x, edge_index, *given)
            if index < len(self.norms):
                out = self.activation(self.norms[index](out))
            x = x + out if self.skip and x.shape == out.shape else out
            states.append(x)
        return self.output(self.head(x if self.jump is None else self.jump(states)))


def _mean(kind: type[Any]) -> Callable[..., nn.Module]:
    return lambda a, b, **options: kind(a, b, heads=2, concat=False, **options)


def _cat(kind: type[Any]) -> Callable[..., nn.Module]:
    return lambda a, b, **options: kind(a, b // 3 if b % 3 == 0 else b, heads=3, **options)


class Mixed(nn.Module):
    """A convolution without attention, then attention."""

    def __init__(self, first: type[Any], width: int) -> None:
        super().__init__()
        self.first, self.second = first(width, HIDDEN), GATConv(HIDDEN, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits."""
        return torch.as_tensor(self.second(self.first(x, edge_index).relu(), edge_index))


def _log_softmax(y: Tensor) -> Tensor:
    return functional.log_softmax(y, dim=1)


_leaky, _relu = functional.leaky_relu, torch.relu
ORDINARY: dict[str, Callable[[int], nn.Module]] = {
    "GATConv": lambda w: Stack(GATConv, w),
    "GATConv, 1 layer": lambda w: Stack(GATConv, w, layers=1),
    "GATConv, 3 layers, relu": lambda w: Stack(GATConv, w, layers=3, activation=_relu),
    "GATConv, 3 heads": lambda w: Stack(_cat(GATConv), w),
    "GATConv, mean of heads": lambda w: Stack(_mean(GATConv), w, activation=_leaky),
    "GATConv, dropout": lambda w: Stack(_mean(GATConv), w, dropout=0.5),
    "GATConv, batch norm": lambda w: Stack(GATConv, w, norm=nn.BatchNorm1d, activation=_relu),
    "GATConv, layer norm": lambda w: Stack(GATConv, w, norm=nn.LayerNorm, layers=3),
    "GATConv, residual": lambda w: Stack(GATConv, w, layers=3, skip=True),
    "GATConv, residual of the layer": lambda w: Stack(GATConv, w, residual=True),
    "GATConv, linear head": lambda w: Stack(GATConv, w, head=True),
    "GATConv, relu at the end": lambda w: Stack(GATConv, w, head=True, output=_relu),
    "GATConv, log_softmax": lambda w: Stack(GATConv, w, output=_log_softmax),
    "GATConv, jumping knowledge cat": lambda w: Stack(GATConv, w, jump="cat"),
    "GATConv, jumping knowledge max": lambda w: Stack(GATConv, w, jump="max", layers=3),
    "GATConv, no self-loops": lambda w: Stack(GATConv, w, add_self_loops=False),
    "GATConv, edge features": lambda w: Stack(GATConv, w, edge_dim=2),
    "GATv2Conv": lambda w: Stack(GATv2Conv, w),
    "GATv2Conv, 3 layers, dropout": lambda w: Stack(_mean(GATv2Conv), w, layers=3, dropout=0.3),
    "GATv2Conv, shared weights": lambda w: Stack(GATv2Conv, w, share_weights=True, activation=_relu),
    "GATv2Conv, batch norm, head": lambda w: Stack(GATv2Conv, w, norm=nn.BatchNorm1d, head=True),
    "GATv2Conv, edge features": lambda w: Stack(GATv2Conv, w, edge_dim=2, layers=1),
    "TransformerConv": lambda w: Stack(TransformerConv, w),
    "TransformerConv, beta": lambda w: Stack(TransformerConv, w, beta=True),
    "TransformerConv, mean of heads": lambda w: Stack(_mean(TransformerConv), w, norm=nn.LayerNorm),
    "TransformerConv, edge features": lambda w: Stack(TransformerConv, w, edge_dim=2),
    "SuperGATConv": lambda w: Stack(SuperGATConv, w),
    "SuperGATConv, SD": lambda w: Stack(_mean(SuperGATConv), w, attention_type="SD", dropout=0.2),
    "GATConv after GCNConv": lambda w: Mixed(GCNConv, w),
    "GATConv after SAGEConv": lambda w: Mixed(SAGEConv, w),
}
"""Name → what makes the model for a number of features."""
NOT_LINEAR = {
    "GATConv, relu at the end": "relu",
    "GATConv, log_softmax": "log_softmax",
    "GATConv, jumping knowledge max": "max",
    "TransformerConv, beta": "sigmoid",
}
"""Name → what acts between the last attention and the logits: no class certificate for balls."""


def ordinary(name: str) -> tuple[nn.Module, Graph]:
    """Return one of the models in evaluation mode, float64, and its graph."""
    graph = graph_of(attributes="edge features" in name)
    with torch.random.fork_rng([]), torch.no_grad():
        torch.manual_seed(5)
        model = ORDINARY[name](graph.num_features).double()
        for parameter in model.parameters():
            parameter.mul_(1.5)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    return model.eval(), graph
