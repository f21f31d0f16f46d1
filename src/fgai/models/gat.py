"""`GAT` and `GATv2`: the same model with different attention scores."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import elu

from fgai.attention import Layerwise, Stage
from fgai.checks import one_of, rate, whole
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models.base import LARGE, AttentionModel, Capabilities, _arguments, _mlp_head, register_model
from fgai.models.layer import AttentionLayer
from fgai.tasks import get_task
from fgai.typed import typed


@typed
@register_model
class GAT(AttentionModel):
    """Graph attention network: hidden layers with several heads, an output layer with one.

    Args:
        hidden_channels: width of each head of a hidden layer.
        heads: number of heads of a hidden layer.
        num_layers: number of attention layers, including the output layer.
        dropout: dropout rate of the input of every layer.
        attention_dropout: dropout rate of the attention.
        norm: None, or `"layer"` to normalise the input and the hidden features.
        head: None, or `"mlp"`, for task `graph` only: pool hidden states, then classify them by an MLP.

    Reference: Veličković et al., Graph Attention Networks, ICLR 2018.
    """

    capabilities: ClassVar[Capabilities] = Capabilities("layers")
    score: ClassVar[str] = "additive"

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int = 8,
        heads: int = 8,
        num_layers: int = 2,
        dropout: float = 0.6,
        attention_dropout: float = 0.0,
        norm: str | None = None,
        task: str = "node",
        pooling: str = "mean",
        decoder: str = "dot",
        head: str | None = None,
    ) -> None:
        arguments = _arguments(locals())
        super().__init__(task=task, pooling=pooling, decoder=decoder)
        one_of(norm, "norm", (None, "layer"))
        whole(num_layers, "num_layers", 1, 1000)
        rate(dropout)
        if one_of(head, "head", (None, "mlp")) == "mlp" and not get_task(task).row_per_graph:
            raise InputError(f"`head='mlp'` needs `task='graph'`, got {task!r}; use `head=None`")
        self.config = arguments
        self.dropout = dropout
        width = hidden_channels * heads
        options: dict[str, Any] = {"score": self.score, "attention_dropout": attention_dropout}
        options["input_norm"] = norm == "layer"
        *hidden, last = [in_channels, *[width] * (num_layers - 1)]
        self.convs = nn.ModuleList(AttentionLayer(size, hidden_channels, heads, **options) for size in hidden)
        out = width if head == "mlp" else out_channels
        self.convs.append(AttentionLayer(last, out, concat=False, **options))
        self.head = _mlp_head(width, out_channels) if head == "mlp" else None

    @classmethod
    def sizes(cls, graph: Graph, task: str) -> dict[str, Any]:
        """Return the paper's sizes; from `LARGE` nodes on, those for large graphs."""
        large = graph.num_nodes >= LARGE
        sizes = {"hidden_channels": 16 if large else 8, "heads": 8, "num_layers": 3 if large else 2}
        return {**super().sizes(graph, task), **sizes}

    def embed(self, graph: Graph) -> Tensor:
        """Return [N, out]."""
        return self.convolve(self.convs, graph, elu, self.dropout)

    def read_out(self, nodes: Tensor, graph: Graph, links: Tensor | None = None) -> Tensor:
        """Turn node embeddings into the task's logits; with an MLP head, pool before it."""
        if self.head is None:
            return super().read_out(nodes, graph, links)
        return torch.as_tensor(self.head(super().read_out(elu(nodes), graph, links)))

    def layerwise(self) -> Layerwise | None:
        """Return the model as stages; None if nodes also interact outside attention layers."""
        if not self.is_rowwise:
            return None
        *hidden, last = self.convs
        stages = [Stage(conv, lambda _, mixed: elu(mixed)) for conv in hidden]
        stages.append(Stage(last, lambda _, mixed: mixed))
        return Layerwise(lambda features, _: features, stages, nn.Identity(), keeps_state=False)


@register_model
class GATv2(GAT):
    """GAT with the dynamic score `⟨a, leaky_relu(l_j + r_i)⟩`: nodes can rank neighbours differently.

    Reference: Brody, Alon, Yahav, How Attentive are Graph Attention Networks?, ICLR 2022.
    """

    capabilities: ClassVar[Capabilities] = GAT.capabilities
    score: ClassVar[str] = "dynamic"
