"""`GATConvs`: a `GAT` or `GATv2` told in PyG's own layers, for explainers that look inside them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import elu
from torch_geometric.nn import GATConv, GATv2Conv

from fgai.alone import seeded
from fgai.attention import limits_of
from fgai.errors import InputError
from fgai.models import AttentionLayer, AttentionModel, body_of
from fgai.typed import typed


@typed
class GATConvs(nn.Module):
    """A copy of a `GAT` or `GATv2` made of `GATConv` or `GATv2Conv`, called as `model(x, edge_index)`.

    It gives the same logits and the same attention. Explainers that hook PyG's layers, as
    `AttentionExplainer` and `GraphMaskExplainer` do, work on it, and masks cost half of what they cost
    through `AsPyG`. It is in evaluation mode and its weights take no gradients.

    Args:
        model: for nodes, without layer normalisation, limits, or a guard that weighs edges.
        split_heads: write every head as a layer of its own, whose outputs are joined: for
            `GraphMaskExplainer`, which has no place for several heads in a layer.

    Raises:
        InputError: another kind of model; `AsPyG` takes most of them.

    Example:
        >>> import fgai, torch
        >>> data = fgai.load_dataset("planted")
        >>> model, graph = fgai.GAT.for_data(data).eval(), data.to_data()
        >>> torch.allclose(GATConvs(model)(graph.x, graph.edge_index), model(data), atol=1e-5)
        True
    """

    def __init__(self, model: nn.Module, *, split_heads: bool = False) -> None:
        super().__init__()
        if not can_be_told(model):
            raise InputError(
                "`model` must be a plain GAT or GATv2 for nodes, without normalisation, limits or a guard;"
                f" got {type(model).__name__}: use `AsPyG(model)`"
            )
        with seeded(0, torch.device("cpu")):  # PyG's layers draw weights, which are replaced
            told = [_split(layer) if split_heads else [_whole(layer)] for layer in _layers(model)]
        self.layers = nn.ModuleList(_Joined(heads) for heads in told)
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits [N, C].

        Args:
            x: [N, F].
            edge_index: [2, E], without self-loops: the layers add them.
        """
        for place, layer in enumerate(self.layers):
            x = layer(x if place == 0 else elu(x), edge_index)
        return x


class _Joined(nn.Module):
    """Layers that read the same states, their outputs side by side."""

    def __init__(self, convs: Iterable[nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(convs)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return [N, sum of their widths]."""
        return torch.cat([conv(x, edge_index) for conv in self.convs], dim=1)


def can_be_told(model: nn.Module) -> bool:
    """Whether PyG's layers can say what a model does."""
    plain = isinstance(model, AttentionModel) and body_of(model) == "layers" and model.is_rowwise
    return plain and _layers(model)[0].input_norm is None and not limits_of(model)


def _layers(model: Any) -> list[AttentionLayer]:
    return list(model.convs)


def _whole(layer: AttentionLayer) -> nn.Module:
    return _told(layer, range(layer.heads), layer.concat)


def _split(layer: AttentionLayer) -> list[nn.Module]:
    """One layer per head; the output layer has one head, so nothing is averaged."""
    return [_told(layer, range(head, head + 1), True) for head in range(layer.heads)]


def _told(layer: AttentionLayer, heads: range, concat: bool) -> nn.Module:
    """Some heads of a layer, in PyG's words."""
    rows = slice(heads.start, heads.stop)
    wide = slice(heads.start * layer.channels, heads.stop * layer.channels)
    options: dict[str, Any] = {"concat": concat, "negative_slope": layer.slope}
    size = layer.value.weight.shape[0], layer.channels, len(heads)
    additive = layer.score == "additive"
    conv: nn.Module = GATConv(*size, **options) if additive else GATv2Conv(*size, **options)
    conv = conv.to(layer.value.weight)  # its device and type
    values = {"bias": layer.bias[wide] if layer.bias is not None else None}
    if additive:
        values |= {
            "lin.weight": layer.value.weight[:, wide].T,
            "att_src": layer.source_weight[None, rows],
            "att_dst": layer.destination_weight[None, rows],
        }
    else:
        values["att"] = layer.score_weight[None, rows]
        for name, side in (("lin_l", layer.value), ("lin_r", layer.right)):
            assert side.bias is not None
            values |= {f"{name}.weight": side.weight[:, wide].T, f"{name}.bias": side.bias[wide]}
    conv.load_state_dict({name: value.detach() for name, value in values.items() if value is not None})
    return conv
