"""Adapters for PyTorch Geometric's heterogeneous layers: HANConv and HGTConv, type by type.

HANConv normalises within a type of edges: the attention of a node sums to one over each of its types. HGTConv
normalises over all of them together: its shares of one type sum to what the node gives that type. Both
compute attention inside `message`, which we replace on the instance, and call the tap once for every type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, leaky_relu
from torch_geometric.nn import HANConv, HGTConv
from torch_geometric.utils import softmax

from fgai.attention.pyg import check_layer, message_edges, override
from fgai.attention.tap import Adapter, EdgeType, Scores, Tap


class _Part(NamedTuple):
    """The edges of one type that a layer was given, ends numbered within their types."""

    edge_type: EdgeType
    source: Tensor
    destination: Tensor
    num_nodes: tuple[int, int]

    def show(self, tap: Tap, attention: Tensor, scores: Tensor) -> Tensor:
        """Return the attention on these edges as the tap gives it back."""
        known: Scores = lambda: scores  # noqa: E731
        ends = self.source, self.destination, self.num_nodes
        return tap(attention, *ends, scores=known, edge_type=self.edge_type)


@contextmanager
def _parts(layer: Any) -> Iterator[list[_Part]]:
    """Yield a list that every run of the layer fills with its edges by type, in the order given."""
    found: list[_Part] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(("x_dict", "edge_index_dict"), args, strict=False)) | kwargs
        sizes = {name: int(x.shape[0]) for name, x in given["x_dict"].items()}
        found[:] = [
            _Part(kind, *message_edges(layer, edges), (sizes[kind[0]], sizes[kind[2]]))
            for kind, edges in given["edge_index_dict"].items()
        ]

    handle = layer.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield found
    finally:
        handle.remove()


@contextmanager
def _han(layer: Any, tap: Tap) -> Iterator[None]:
    """Attention `softmax_j(LeakyReLU(a_src · h_j + a_dst · h_i))` of HANConv, a `propagate` for each type."""
    check_layer(layer, "message", HANConv)
    original: Callable[..., Tensor] = layer.propagate
    under_way: list[_Part] = []

    def propagate(edge_index: Any, **kwargs: Any) -> Tensor:
        under_way[:] = [parts.pop(0)]
        return original(edge_index, **kwargs)

    def message(
        x_j: Tensor, alpha_i: Tensor, alpha_j: Tensor, index: Tensor, ptr: Tensor | None, size_i: int | None
    ) -> Tensor:
        scores = leaky_relu(alpha_j + alpha_i, layer.negative_slope)
        attention = under_way[0].show(tap, softmax(scores, index, ptr, size_i), scores)
        weights = dropout(attention, p=layer.dropout, training=layer.training)
        return (x_j * weights.view(-1, layer.heads, 1)).view(-1, layer.out_channels)

    with (
        _parts(layer) as parts,
        override(layer, "propagate", propagate),
        override(layer, "message", message),
    ):
        yield


@contextmanager
def _hgt(layer: Any, tap: Tap) -> Iterator[None]:
    """Attention `softmax_j(p · <q_i, W k_j> / √D)` of HGTConv, over the edges of all types in a row."""
    check_layer(layer, "message", HGTConv)

    def message(
        k_j: Tensor,
        q_i: Tensor,
        v_j: Tensor,
        edge_attr: Tensor,
        index: Tensor,
        ptr: Tensor | None,
        size_i: int | None,
    ) -> Tensor:
        scores = (q_i * k_j).sum(dim=-1) * edge_attr / math.sqrt(q_i.size(-1))
        attention = softmax(scores, index, ptr, size_i)
        sizes = [len(part.source) for part in parts]
        by_part = zip(parts, torch.split(attention, sizes), torch.split(scores, sizes), strict=True)
        shown = [part.show(tap, own, own_scores) for part, own, own_scores in by_part]
        return (v_j * torch.cat(shown).view(-1, layer.heads, 1)).view(-1, layer.out_channels)

    with _parts(layer) as parts, override(layer, "message", message):
        yield


PYG_HETERO_ADAPTERS: dict[type[nn.Module], Adapter] = {HANConv: _han, HGTConv: _hgt}
