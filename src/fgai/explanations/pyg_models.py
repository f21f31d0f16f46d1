"""fgai's models with PyG's calls: `AsPyG` wraps any of them, `GATConvs` copies one into PyG's layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import elu
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing

from fgai.attention import duplicate, limits_of, record
from fgai.errors import InputError
from fgai.explanations.attention_explainers import _positions
from fgai.graph import Graph
from fgai.models import AttentionLayer, AttentionModel, body_of
from fgai.sparse import edge_keys
from fgai.tasks import get_task
from fgai.threads import seeded
from fgai.typed import typed


@typed
class AsPyG(MessagePassing):  # type: ignore[misc]
    """One of fgai's models, called as PyG calls models: `model(x, edge_index, batch=None)`.

    Works with PyG's explainers, masks and metrics: an edge mask scales the attention of each edge; self-loops
    that the model adds are never masked. Raises `InputError` unless the model is fgai's, for nodes or graphs.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.GAT.for_data(data).eval()
        >>> graph = data.to_data()
        >>> bool((AsPyG(model)(graph.x, graph.edge_index) == model(data)).all())
        True
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if not isinstance(model, AttentionModel) or get_task(model.task).needs_links:
            raise InputError("`model` must be fgai's, for nodes or graphs; PyG's own can be used as they are")
        self.model = model
        self.train(model.training)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        """Return logits [N, C], or [G, C] for a model of graphs; duplicate edges are merged."""
        graph = Graph.from_edges(edge_index, x.shape[0], x, batch=batch)
        model: Callable[[Graph], Tensor] = self.model
        if self._edge_mask is None or not edge_index.numel():
            return model(graph)
        mask = self._edge_mask.sigmoid() if self._apply_sigmoid else self._edge_mask
        keys, order = edge_keys(*edge_index).sort(stable=True)
        mask = mask[order]

        def masked(index: int, attention: Tensor, source: Tensor, destination: Tensor) -> Tensor:
            position, present = _positions(keys, edge_keys(source, destination))
            return attention * torch.where(present, mask[position], 1.0)[:, None]

        with record(self.model, perturb=masked):
            return model(graph)


@typed
class GATConvs(nn.Module):
    """A copy of a `GAT` or `GATv2` made of `GATConv` or `GATv2Conv`, called as `model(x, edge_index)`.

    It gives the same logits and attention, in evaluation mode and without gradients of its weights.
    Explainers that hook PyG's layers work on it, and masks cost half of what they cost through `AsPyG`. The
    model is for nodes, without layer normalisation, limits or `AttentionModel.guard`, otherwise `InputError`
    is raised. With `split_heads` every head is a layer of its own, as `GraphMaskExplainer` needs.

    Example:
        >>> import fgai, torch
        >>> data = fgai.load_dataset("planted")
        >>> model, graph = fgai.GAT.for_data(data).eval(), data.to_data()
        >>> torch.allclose(GATConvs(model)(graph.x, graph.edge_index), model(data), atol=1e-5)
        True
    """

    def __init__(self, model: Any, *, split_heads: bool = False) -> None:
        super().__init__()
        if not _has_pyg_layers(model):
            raise InputError(
                "`model` must be a plain GAT or GATv2 for nodes, without normalisation, limits or `guard`;"
                f" got {type(model).__name__}: use `AsPyG(model)`"
            )
        with seeded(0, torch.device("cpu")):  # PyG's layers draw weights, which are replaced
            self.layers = nn.ModuleList()
            for layer in model.convs:
                step = 1 if split_heads else layer.heads
                heads = [slice(first, first + step) for first in range(0, layer.heads, step)]
                # the output layer has one head, so nothing is averaged when heads are split
                concat = split_heads or layer.concat
                self.layers.append(_Parallel(_convolution(layer, part, concat) for part in heads))
        self.eval().requires_grad_(False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """Return logits [N, C]; `edge_index` has no self-loops: the layers add them."""
        for index, layer in enumerate(self.layers):
            x = layer(x if index == 0 else elu(x), edge_index)
        return x


class _Parallel(nn.ModuleList):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return torch.cat([conv(x, edge_index) for conv in self], dim=1)


def _has_pyg_layers(model: Any) -> bool:
    plain = isinstance(model, AttentionModel) and body_of(model) == "layers" and model.is_rowwise
    return plain and model.convs[0].input_norm is None and not limits_of(model)


def _convolution(layer: AttentionLayer, heads: slice, concat: bool) -> nn.Module:
    wide = slice(heads.start * layer.channels, heads.stop * layer.channels)
    additive = layer.score == "additive"
    size = layer.value.weight.shape[0], layer.channels, heads.stop - heads.start
    kind: type[nn.Module] = GATConv if additive else GATv2Conv
    conv = kind(*size, concat=concat, negative_slope=layer.slope)
    conv = conv.to(layer.value.weight)  # its device and type
    values = {"bias": layer.bias[wide] if layer.bias is not None else None}
    if additive:
        values |= {
            "lin.weight": layer.value.weight[:, wide].T,
            "att_src": layer.source_weight[None, heads],
            "att_dst": layer.destination_weight[None, heads],
        }
    else:
        values["att"] = layer.score_weight[None, heads]
        for name, side in (("lin_l", layer.value), ("lin_r", layer.right)):
            assert side.bias is not None
            values |= {f"{name}.weight": side.weight[:, wide].T, f"{name}.bias": side.bias[wide]}
    conv.load_state_dict({name: value.detach() for name, value in values.items() if value is not None})
    return conv


def _pyg_model(model: nn.Module, *, split_heads: bool = False) -> nn.Module:
    """Return a model that PyG's explainers can call: `GATConvs` or `AsPyG` of fgai's, a copy of any other."""
    if _has_pyg_layers(model):
        return GATConvs(model, split_heads=split_heads)
    return AsPyG(model) if isinstance(model, AttentionModel) else duplicate(model).eval()
