"""`AttentionLayer`: score → softmax → tap → dropout → aggregate, with one of three scores."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fgai.attention import Limits, TappedLayer
from fgai.checks import at_least, fraction, memory, one_of, rate, whole
from fgai.errors import InputError
from fgai.ops import (
    aggregate,
    attend_additive,
    attend_dot,
    attend_dynamic,
    dropout,
    edge_softmax,
    node_scores,
    project,
    score_additive,
    score_dot,
    score_dynamic,
    weighted_softmax,
)
from fgai.ops.capture import add_columns
from fgai.sparse import Adjacency, Features
from fgai.threads import exclusive
from fgai.typed import typed

SCORES = ("additive", "dynamic", "dot")
MAX_WEIGHTS = 2**31 - 1  # of a projection
MAX_SCORES = 2**25  # in memory while they are averaged over the heads
MIN_SQUARED_NORM = 1e-18  # of a vector to divide by


class Projection(nn.Module):
    """A linear layer for dense tensors and sparse `Features`; unlike in PyTorch, `weight` is [in, out]."""

    def __init__(self, in_channels: int, out_channels: int, *, bias: bool = True) -> None:
        super().__init__()
        if in_channels * out_channels > MAX_WEIGHTS:
            raise InputError(f"a layer has at most {MAX_WEIGHTS} weights, got {in_channels} × {out_channels}")
        memory(in_channels * out_channels, 4, "channels")
        self.weight = nn.Parameter(torch.empty(in_channels, out_channels))
        self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        nn.init.xavier_uniform_(self.weight)

    def forward(self, x: Tensor | Features) -> Tensor:
        """Return `x @ weight + bias`."""
        out = project(x, self.weight) if isinstance(x, Features) else x @ self.weight
        return out if self.bias is None else out + self.bias


class InputNorm(nn.Module):
    """Layer normalisation and the projection after it in one step, so that sparse features stay sparse.

    Computes `((x − mean) / std · γ + β) @ W` as `(x @ γW − mean · 1ᵀγW) / std + βW`.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))
        self.shift = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor | Features, projection: Projection) -> Tensor:
        """Normalise `x`, then project it to [N, D]."""
        x = x if isinstance(x, Features) else Features.dense(x)
        mean, variance = x.moments()
        weight = self.scale[:, None] * projection.weight
        out = (project(x, weight) - mean[:, None] * weight.sum(0)) * torch.rsqrt(variance + 1e-5)[:, None]
        out = out + self.shift @ projection.weight
        return out if projection.bias is None else out + projection.bias


@typed
class AttentionLayer(TappedLayer):
    """Multi-head attention over the incoming edges of each node.

    - `additive` (GAT): `leaky_relu(⟨a_src, z_j⟩ + ⟨a_dst, z_i⟩)`, values z.
    - `dynamic` (GATv2): `⟨a, leaky_relu(l_j + r_i)⟩`, values l.
    - `dot` (transformer): `⟨q_i, k_j⟩ / √C`, values v.

    A node without incoming edges gets the bias. `concat` concatenates the heads ([N, H·C]), otherwise they
    are averaged ([N, C]). `slope` is that of `leaky_relu` below 0; `input_norm` first normalises the input.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        heads: int = 1,
        *,
        score: str = "additive",
        concat: bool = True,
        slope: float = 0.2,
        attention_dropout: float = 0.0,
        bias: bool = True,
        input_norm: bool = False,
    ) -> None:
        super().__init__()
        at_least(in_channels, "in_channels", 1, "the graph has no features: give it some, e.g. degrees")
        whole(channels, "channels", 1)
        whole(heads, "heads", 1)
        fraction(slope, "slope", "it is the negative slope of the leaky ReLU")
        rate(attention_dropout, "attention_dropout")
        self.score = one_of(score, "score", SCORES)
        self.channels, self.heads, self.concat = channels, heads, concat
        self.slope, self.attention_dropout = slope, attention_dropout
        inner = heads * channels
        bound = math.sqrt(6.0 / (heads + channels))

        def new_weight() -> nn.Parameter:
            return nn.Parameter(torch.empty(heads, channels).uniform_(-bound, bound))

        self.input_norm = InputNorm(in_channels) if input_norm else None
        self.value = Projection(in_channels, inner, bias=score != "additive")
        if score == "additive":
            self.source_weight, self.destination_weight = new_weight(), new_weight()
        elif score == "dynamic":
            self.right = Projection(in_channels, inner)
            self.score_weight = new_weight()
        else:
            self.query = Projection(in_channels, inner)
            self.key = Projection(in_channels, inner)
        self.bias = nn.Parameter(torch.zeros(inner if concat else channels)) if bias else None

    def new_limits(self) -> dict[str, Limits]:
        """Return limits of the values and of the source and destination side of the score."""
        size = self.heads, self.channels
        limits = {"value": Limits(*size)}
        if self.score == "additive":  # both sides are computed from the value
            return limits | {name: Limits(self.heads, derived=True) for name in ("source", "destination")}
        names = ("right",) if self.score == "dynamic" else ("query", "key")
        return limits | {name: Limits(*size) for name in names}

    def extra_repr(self) -> str:
        """Show the score and the sizes."""
        return f"score={self.score}, heads={self.heads}, channels={self.channels}"

    def _project(self, x: Tensor | Features, projection: Projection, name: str) -> Tensor:
        out = projection(x) if self.input_norm is None else self.input_norm(x, projection)
        return self.apply_limits(name, out).view(-1, self.heads, self.channels)

    def sides(self, x: Tensor | Features) -> tuple[Tensor, Tensor, Tensor]:
        """Return source side (key) and destination side (query) of the score and the values, per node."""
        with exclusive():  # waits while another thread overrides limits
            return self._sides(x)

    def _sides(self, x: Tensor | Features, num_nodes: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        if num_nodes is not None and x.shape[0] != num_nodes:
            text = f"`x` must have a row per node, got {x.shape[0]} rows of features for {num_nodes} nodes"
            raise InputError(f"{text}; give features of this graph")
        values = self._project(x, self.value, "value")
        if self.score == "additive":
            source, destination = node_scores(values, self.source_weight, self.destination_weight)
            return self.apply_limits("source", source), self.apply_limits("destination", destination), values
        if self.score == "dynamic":
            return values, self._project(x, self.right, "right"), values
        return self._project(x, self.key, "key"), self._project(x, self.query, "query"), values

    def score_edges(
        self, source: Tensor, destination: Tensor, adjacency: Adjacency, heads: slice = slice(None)
    ) -> Tensor:
        """Return the scores [E, H] from both sides, see `sides`; `heads` says which heads these are."""
        if self.score == "additive":
            return score_additive(source, destination, adjacency, self.slope)
        if self.score == "dynamic":
            return score_dynamic(source, destination, self.score_weight[heads], adjacency, self.slope)
        return score_dot(destination, source, adjacency)

    def source_for(self, scores: Tensor, destination: Tensor) -> Tensor | None:
        """Return source sides that would get these scores [N, H] at the destination sides [N, H, ...].

        None if there are none: with a query or weight of zeros, every source gets the same score.
        """
        if self.score != "dot" and self.slope <= 0:
            return None
        if self.score == "additive":
            return torch.where(scores > 0, scores, scores / self.slope) - destination
        along = destination if self.score == "dot" else self.score_weight
        length = along.square().sum(-1)
        if not bool((length > MIN_SQUARED_NORM).all()):
            return None
        target = (scores / length)[..., None] * along
        if self.score == "dot":
            return target * math.sqrt(self.channels)
        return torch.where(target > 0, target, target / self.slope) - destination

    def mean_scores(self, source: Tensor, destination: Tensor, adjacency: Adjacency) -> Tensor:
        """Return `score_edges` averaged over heads [E]; no edge depends on other edges, even in rounding."""
        # Scores that sum over channels are computed head by head: several at once could change rounding.
        size = MAX_SCORES // max(1, adjacency.num_edges) if self.score == "additive" else 1
        size = max(1, min(self.heads, size))
        parts = zip(torch.split(source, size, 1), torch.split(destination, size, 1), strict=True)
        total = None
        for index, sides in enumerate(parts):
            heads = slice(index * size, (index + 1) * size)
            total = add_columns(self.score_edges(*sides, adjacency, heads), total)
        assert total is not None
        return total / self.heads

    def attend(
        self, x: Tensor | Features, adjacency: Adjacency, edge_weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the attention [E, H] before tap and dropout, the values [N, H, C] and the scores [E, H].

        The logarithm of `edge_weight` [E] is added to the scores, see `weighted_softmax`.
        """
        source, destination, values = self._sides(x, adjacency.num_nodes)
        scores = self.score_edges(source, destination, adjacency)
        if edge_weight is not None:
            weighted = weighted_softmax(scores, edge_weight, adjacency)
            # An edge of weight 0 ranks last, with a finite score.
            least = torch.finfo(scores.dtype).tiny
            return weighted, values, scores + edge_weight.to(scores.dtype).clamp(min=least).log()[:, None]
        return edge_softmax(scores, adjacency), values, scores

    def fused(
        self,
        source: Tensor,
        destination: Tensor,
        values: Tensor,
        adjacency: Adjacency,
        *,
        written: bool,
        averaged: bool = False,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the aggregated values [N, H, C] and the attention [E, H] from `sides` by a fused kernel.

        Attention is returned before dropout, [E, 1] if `averaged` over heads, maybe empty unless `written`.
        No gradient flows from one result to the other. `bias` [H, C] is added to the aggregated values.
        """
        p = self.attention_dropout if self.training else 0.0
        options: dict[str, Any] = {"dropout": p, "written": written, "averaged": averaged, "bias": bias}
        if self.score == "dot":
            return attend_dot(destination, source, values, adjacency, **options)
        if self.score == "additive":
            return attend_additive(source, destination, values, adjacency, self.slope, **options)
        weight = self.score_weight
        return attend_dynamic(source, destination, weight, values, adjacency, self.slope, **options)

    def join(self, out: Tensor) -> Tensor:
        """Concatenate or average the heads of `out` [N, H, C], then add the bias."""
        out = out.flatten(1) if self.concat else out.mean(1)
        return out if self.bias is None else out + self.bias

    def forward(
        self, x: Tensor | Features, adjacency: Adjacency, edge_weight: Tensor | None = None
    ) -> Tensor:
        """Return [N, H·C], or [N, C] when the heads are averaged; `edge_weight` [E] as in `attend`."""
        if self.tap is None and edge_weight is None:
            sides, watched = self._sides(x, adjacency.num_nodes), self.watch is not None
            bias_fused = self.concat and self.bias is not None
            bias = self.bias.view(self.heads, -1) if bias_fused else None  # type: ignore[union-attr]
            out, attention = self.fused(*sides, adjacency, written=watched, averaged=watched, bias=bias)
            if self.watch is not None:
                ranks = self.mean_scores(*sides[:2], adjacency) if self.ranked else None
                self.watch(attention, adjacency, ranks)
            return out.flatten(1) if bias_fused else self.join(out)
        attention, values, scores = self.attend(x, adjacency, edge_weight)
        attention = self.show_attention(attention, adjacency, scores)
        attention = dropout(attention, self.attention_dropout, self.training)
        return self.join(aggregate(attention, values, adjacency))
