"""`GT`: the graph transformer with Laplacian encodings."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from fgai.attention import Layerwise, Stage
from fgai.checks import at_least, memory, one_of, rate, whole
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models.base import AttentionModel, Capabilities, _arguments, _as_features, _mlp_head, register_model
from fgai.models.layer import AttentionLayer, Projection
from fgai.models.positional import _with_encoding
from fgai.ops import dropout
from fgai.sparse import Features
from fgai.tasks import get_task
from fgai.typed import typed


class _TransformerBlock(nn.Module):
    """Attention, output projection, residual, norm, feed-forward, residual, norm."""

    def __init__(
        self, width: int, heads: int, dropout: float, attention_dropout: float, norm: str | None
    ) -> None:
        super().__init__()
        self.attention = AttentionLayer(
            width, width // heads, heads, score="dot", attention_dropout=attention_dropout, bias=False
        )
        self.output = nn.Linear(width, width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        make = nn.LayerNorm if norm == "layer" else nn.BatchNorm1d
        self.norm_attention, self.norm_feed = make(width), make(width)
        self.dropout = dropout

    def forward(self, x: Tensor, graph: Graph, edge_weight: Tensor | None = None) -> Tensor:
        return self.update(x, self.attention(x, graph.adjacency, edge_weight))

    def update(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Return new states from states `x` and the attention's output, row by row [N, width]."""
        x = self.norm_attention(x + dropout(self.output(mixed), self.dropout, self.training))
        out = self.narrow(dropout(relu(self.wide(x)), self.dropout, self.training))
        return self.norm_feed(x + dropout(out, self.dropout, self.training))  # type: ignore[no-any-return]


@typed
@register_model
class GT(AttentionModel):
    """Graph transformer: projected features plus Laplacian encodings, attention blocks, an MLP head.

    No self-loops are added: residual connections keep a node's own state, so an isolated node is classified
    from its features.

    Args:
        hidden_channels: width of the node states.
        heads: attention heads of each block, e.g. `(8, 1)`.
        encodings: number of Laplacian encodings per node.
        dropout: dropout rate of features and hidden states.
        attention_dropout: dropout rate of the attention.
        norm: `"batch"`, or `"layer"`, which also normalises the projected features.

    Reference: Dwivedi, Bresson, A Generalization of Transformer Networks to Graphs, 2021.
    """

    capabilities: ClassVar[Capabilities] = Capabilities("blocks", parts=(_TransformerBlock,))
    self_loops: ClassVar[bool] = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 128,
        heads: tuple[int, ...] = (8, 1),
        encodings: int = 8,
        dropout: float = 0.5,
        attention_dropout: float = 0.0,
        norm: str | None = "batch",
        task: str = "node",
        pooling: str = "mean",
        decoder: str = "dot",
    ) -> None:
        arguments = _arguments(locals())
        super().__init__(task=task, pooling=pooling, decoder=decoder)
        norm = str(one_of(norm, "norm", ("batch", "layer")))
        rate(dropout)
        at_least(in_channels, "in_channels", 1, "the graph has no features: give it some, e.g. degrees")
        whole(hidden_channels, "hidden_channels", 1)
        whole(out_channels, "out_channels", 1)
        memory(hidden_channels // 2 * out_channels, 4, "out_channels")
        whole(encodings, "encodings", 0, 10_000)
        heads = tuple(whole(count, "heads", 1) for count in heads)
        if not heads or any(hidden_channels % count for count in heads):
            text = "`hidden_channels` must be divisible by the `heads` of every block"
            raise InputError(f"{text}, got {hidden_channels} and {heads}")
        self.config = {**arguments, "heads": list(heads), "norm": norm}
        self.dropout = dropout
        self.encodings, width = encodings, hidden_channels
        self.input = Projection(in_channels, width)
        self.input_scale = nn.LayerNorm(width) if norm == "layer" else nn.Identity()
        self.encoding = nn.Linear(encodings, width) if encodings > 0 else nn.Identity()
        self.blocks = nn.ModuleList(
            _TransformerBlock(width, count, dropout, attention_dropout, norm) for count in heads
        )
        self.head = _mlp_head(width, out_channels)

    def prepare(self, graph: Graph) -> Graph:
        """Return `graph` with its Laplacian encodings, computed once and cached."""
        return _with_encoding(graph, self.encodings)

    @property
    def streams(self) -> bool:
        """Whether the model can run on a graph on disk row by row: not with encodings."""
        return type(self).prepare is GT.prepare and not self.encodings

    def embed(self, graph: Graph) -> Tensor:
        """Return [N, out]."""
        features = _as_features(graph)
        if self.training and self.dropout > 0:
            features = dropout(features, self.dropout)
        x = self.enter(features, graph.positional)
        for block in self.blocks:
            x = block(x, graph, self.edge_weight(x, graph))
        if get_task(self.task).row_per_graph:
            return x
        return self.head(x)  # type: ignore[no-any-return]

    def enter(self, features: Features, positional: Tensor | None) -> Tensor:
        """Return the states before the first block: the projected features plus the projected encodings."""
        x = self.input_scale(self.input(features))
        if positional is not None and self.encodings > 0:
            x = x + self.encoding(positional.to(x.dtype))
        return torch.as_tensor(x)

    def layerwise(self) -> Layerwise | None:
        """Return the model as stages; None if nodes also interact outside attention layers."""
        if not self.is_rowwise:
            return None
        stages = [Stage(block.attention, block.update) for block in self.blocks]  # type: ignore[arg-type]
        return Layerwise(self.enter, stages, self.head, keeps_state=True)

    def read_out(self, nodes: Tensor, graph: Graph, links: Tensor | None = None) -> Tensor:
        """Turn embeddings into the task's logits; for task `graph`, pool states, then apply the head."""
        out = super().read_out(nodes, graph, links)
        return torch.as_tensor(self.head(out)) if get_task(self.task).row_per_graph else out
