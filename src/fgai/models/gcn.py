"""`GCN`: fixed edge weights instead of attention; with gates, learned ones."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from fgai.attention import Limits, TappedLayer
from fgai.cache import cached_on
from fgai.checks import at_least, one_of, rate, whole
from fgai.graph import Graph
from fgai.models.base import LARGE, AttentionModel, _arguments, register_model
from fgai.models.layer import InputNorm, Projection
from fgai.ops import aggregate, node_scores, score_additive, weighted_softmax
from fgai.ops.segments import row_sum
from fgai.sparse import Adjacency, Features
from fgai.typed import typed


@typed
class GCNLayer(TappedLayer):
    """Graph convolution `Σ_{j→i} n_ji z_j + b` with symmetric normalised weights n and values z.

    The weights of a node's incoming edges do not sum to one. So the layer's attention is their shares a,

        a_ji = n_ji / s_i,   s_i = Σ_j n_ji,   output_i = s_i Σ_j a_ji z_j + b.

    With `gated`, the shares are learned: `a = softmax(score + log n)` with GAT's score, which starts at
    0 (the shares above). `input_norm` first applies layer normalisation to the input.
    """

    heads = 1

    def __init__(
        self, in_channels: int, channels: int, *, gated: bool = False, input_norm: bool = False
    ) -> None:
        super().__init__()
        at_least(in_channels, "in_channels", 1, "the graph has no features: give it some, e.g. degrees")
        whole(channels, "channels", 1)
        self.channels, self.gated = channels, gated
        self.input_norm = InputNorm(in_channels) if input_norm else None
        self.value = Projection(in_channels, channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(channels))
        if gated:
            self.source_weight = nn.Parameter(torch.zeros(1, channels))
            self.destination_weight = nn.Parameter(torch.zeros(1, channels))

    def new_limits(self) -> dict[str, Limits]:
        """Return limits of the values and, with gates, of both sides of the score."""
        limits = {"value": Limits(1, self.channels)}
        if self.gated:
            limits |= {name: Limits(1, derived=True) for name in ("source", "destination")}
        return limits

    def extra_repr(self) -> str:
        """Show the size and whether there are gates."""
        return f"channels={self.channels}, gated={self.gated}"

    def attend(
        self, x: Tensor | Features, adjacency: Adjacency, edge_weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the shares a [E, 1], the values z [N, 1, C] and the sums s [N]."""
        values = self.value(x) if self.input_norm is None else self.input_norm(x, self.value)
        values = self.apply_limits("value", values).view(-1, 1, self.channels)
        if edge_weight is None and values.dtype == torch.float32:
            shares, sums = cached_on(adjacency, "gcn shares", lambda: _shares(adjacency, None))
        else:
            shares, sums = _shares(adjacency, edge_weight, values.dtype)
        if self.gated:
            source, destination = node_scores(values, self.source_weight, self.destination_weight)
            source = self.apply_limits("source", source)
            destination = self.apply_limits("destination", destination)
            scores = score_additive(source, destination, adjacency)
            shares = weighted_softmax(scores, shares.squeeze(1), adjacency)
        return shares, values, sums

    def forward(
        self, x: Tensor | Features, adjacency: Adjacency, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Return [N, C]; `edge_weight` [E] multiplies the edges, 1 by default."""
        shares, values, sums = self.attend(x, adjacency, edge_weight)
        shares = self.show_attention(shares, adjacency)
        return sums[:, None] * aggregate(shares, values, adjacency).squeeze(1) + self.bias


def _shares(
    adjacency: Adjacency, edge_weight: Tensor | None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return shares a [E, 1] and sums s [N] of `n_ji = w_ji / √(d_j d_i)`, `d_i = Σ_j w_ji`; 0 if d_i is."""
    weight = edge_weight
    if weight is None:
        weight = torch.ones(adjacency.num_edges, device=adjacency.device)
    degree = row_sum(weight, adjacency.rowptr)
    scale = torch.where(degree > 0, degree.clamp(min=1e-12).rsqrt(), 0.0)
    normalised = (weight * scale[adjacency.source] * scale[adjacency.destination]).to(dtype)
    sums = row_sum(normalised, adjacency.rowptr)
    return (normalised / sums.clamp(min=1e-12)[adjacency.destination])[:, None], sums


@typed
@register_model
class GCN(AttentionModel):
    """Graph convolutional network; its explanation is the share of each edge, see `GCNLayer`.

    Without gates, shares depend on degrees only and are the same in every layer, so they explain little. With
    gates they are learned, less stable, and worth making faithful.

    Args:
        hidden_channels: width of the hidden layers.
        num_layers: number of layers, including the output layer.
        dropout: dropout rate of the input of every layer.
        gated: learn the shares of the edges, see `GCNLayer`.
        norm: None, or `"layer"` to normalise the input and the hidden features.

    Reference: Kipf, Welling, Semi-Supervised Classification with Graph Convolutional Networks, ICLR 2017.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 64,
        num_layers: int = 2,
        dropout: float = 0.5,
        gated: bool = False,
        norm: str | None = None,
        task: str = "node",
        pooling: str = "mean",
        decoder: str = "dot",
    ) -> None:
        arguments = _arguments(locals())
        super().__init__(task=task, pooling=pooling, decoder=decoder)
        one_of(norm, "norm", (None, "layer"))
        whole(num_layers, "num_layers", 1, 1000)
        rate(dropout)
        self.config = arguments
        self.dropout = dropout
        sizes = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        self.convs = nn.ModuleList(
            GCNLayer(size, out, gated=gated, input_norm=norm == "layer") for size, out in pairwise(sizes)
        )

    @classmethod
    def sizes(cls, graph: Graph, task: str) -> dict[str, Any]:
        """Return the default sizes; from `LARGE` nodes on, those for large graphs."""
        large = graph.num_nodes >= LARGE
        sizes = {"hidden_channels": 128 if large else 64, "num_layers": 3 if large else 2}
        return {**super().sizes(graph, task), **sizes}

    def embed(self, graph: Graph) -> Tensor:
        """Return [N, out]."""
        return self.convolve(self.convs, graph, relu, self.dropout)
