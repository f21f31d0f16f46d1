"""Adapters for PyTorch Geometric: GATConv, GATv2Conv, TransformerConv and SuperGATConv.

PyG's layers only show attention after dropout. So adapters run `edge_updater` of GATConv and GATv2Conv with
dropout 0 and apply dropout after the tap; they replace `message` of TransformerConv and SuperGATConv. Outputs
are bitwise the same as without recording. Subclasses that compute attention elsewhere are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, leaky_relu
from torch_geometric import EdgeIndex
from torch_geometric.nn import GATConv, GATv2Conv, SuperGATConv, TransformerConv
from torch_geometric.utils import softmax

from fgai.attention.interface import Adapter, NodeCount, Tap, override
from fgai.errors import AttentionError


def message_edges(layer: Any, edges: Any) -> tuple[Tensor, Tensor]:
    """Return (source, destination) [E] of the messages a PyG layer sends, in the layer's own order.

    `edges` is an `edge_index` [2, E], an `EdgeIndex`, or a `torch.sparse` matrix (COO or CSR) with
    destinations in its rows; other formats raise `AttentionError`.
    """
    if not isinstance(edges, Tensor):
        text = f"{type(layer).__name__} got its edges as a {type(edges).__name__}, which cannot be"
        raise AttentionError(f"{text} recorded; pass `edge_index` or a `torch.sparse` matrix")
    if edges.layout == torch.sparse_coo:
        destination, source = edges.indices()
        return source, destination
    if edges.layout == torch.sparse_csr:
        counts = edges.crow_indices().diff()
        rows = torch.arange(counts.numel(), device=counts.device)
        return edges.col_indices().long(), torch.repeat_interleave(rows, counts)
    if edges.layout != torch.strided:
        raise AttentionError(f"edges in {edges.layout} cannot be recorded; pass `edge_index`, COO or CSR")
    plain = edges.as_tensor() if isinstance(edges, EdgeIndex) else edges
    forward = layer.flow == "source_to_target"
    source, destination = (plain[0], plain[1]) if forward else (plain[1], plain[0])
    return source.long(), destination.long()


@contextmanager
def _counting_nodes(layer: Any) -> Iterator[Callable[[Tensor | None, Tensor | None], NodeCount]]:
    """Yield a function (tensor of the sources, tensor of the destinations) → node count of this run."""
    bipartite = [False]

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("x")
        bipartite[0] = isinstance(x, tuple | list) and not (len(x) == 2 and x[0] is x[1])

    def count(source: Tensor | None, destination: Tensor | None) -> NodeCount:
        if source is None or destination is None:
            text = f"{type(layer).__name__} ran on a bipartite graph without features of both sides, which"
            raise AttentionError(f"{text} cannot be recorded; call it with a pair of feature matrices")
        sizes = int(source.shape[0]), int(destination.shape[0])
        return sizes if bipartite[0] or sizes[0] != sizes[1] else sizes[0]

    handle = layer.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield count
    finally:
        handle.remove()


def check_layer(layer: Any, method: str, owner: type[nn.Module]) -> None:
    """Raise `AttentionError` unless the layer computes attention in `owner`'s own `method`."""
    kind = type(layer).__name__
    if getattr(getattr(layer, method), "__func__", None) is not owner.__dict__[method]:
        text = f"{kind} replaces `{method}` of {owner.__name__}, so its attention cannot be read"
        raise AttentionError(f"{text}; write an adapter for it, see `fgai.attention.register_adapter`")
    if layer.decomposed_layers != 1:
        value = f"decomposed_layers={layer.decomposed_layers}"
        raise AttentionError(f"{kind} with {value} cannot be recorded; set it to 1")
    share = getattr(layer, "dropout", 0.0)
    if not isinstance(share, int | float):
        raise AttentionError(f"`dropout` of {kind} must be a number, got {type(share).__name__}")


def _additive_scores(layer: Any, source: Tensor, destination: Tensor, edge_attr: Tensor | None) -> Tensor:
    """Scores [E, H] of GATConv from the terms [E, H] of both ends."""
    scores = source + destination
    if edge_attr is not None and layer.lin_edge is not None:
        scores = scores + (_edge_terms(layer, edge_attr) * layer.att_edge).sum(dim=-1)
    return leaky_relu(scores, float(layer.negative_slope))


def _dynamic_scores(layer: Any, source: Tensor, destination: Tensor, edge_attr: Tensor | None) -> Tensor:
    """Scores [E, H] of GATv2Conv from the terms [E, H, C] of both ends."""
    terms = destination + source
    if edge_attr is not None:
        terms = terms + _edge_terms(layer, edge_attr)
    scores: Tensor = (leaky_relu(terms, float(layer.negative_slope)) * layer.att).sum(dim=-1)
    return scores


def _edge_terms(layer: Any, edge_attr: Tensor) -> Tensor:
    """Project edge features [E] or [E, D] to [E, H, C]."""
    mapped: Tensor = layer.lin_edge(edge_attr.view(-1, 1) if edge_attr.dim() == 1 else edge_attr)
    return mapped.view(-1, layer.heads, layer.out_channels)


def _edge_updater_adapter(
    owner: type[nn.Module], nodes: str, score: Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]
) -> Adapter:
    """Adapter of layers whose `edge_updater` gets both ends as the argument `nodes` and returns attention."""

    @contextmanager
    def adapter(layer: Any, tap: Tap) -> Iterator[None]:
        check_layer(layer, "edge_update", owner)
        original: Callable[..., Tensor] = layer.edge_updater

        def edge_updater(edge_index: Any, **kwargs: Any) -> Tensor:
            source, destination = message_edges(layer, edge_index)
            num_nodes = count(*kwargs[nodes])
            with override(layer, "dropout", 0.0):
                attention = original(edge_index, **kwargs)

            def scores() -> Tensor:
                sources, destinations = kwargs[nodes]
                return score(layer, sources[source], destinations[destination], kwargs.get("edge_attr"))

            attention = tap(attention, source, destination, num_nodes, scores=scores)
            return dropout(attention, p=layer.dropout, training=layer.training)

        with _counting_nodes(layer) as count, override(layer, "edge_updater", edge_updater):
            yield

    return adapter


@contextmanager
def _propagating(
    layer: Any, message: Callable[..., Tensor], nodes: tuple[str, str]
) -> Iterator[list[tuple[Tensor, Tensor, NodeCount]]]:
    """Replace `message`; yield a list with (source, destination, node count) while `propagate` runs."""
    original: Callable[..., Tensor] = layer.propagate
    run: list[tuple[Tensor, Tensor, NodeCount]] = []

    def propagate(edge_index: Any, **kwargs: Any) -> Tensor:
        num_nodes = count(kwargs[nodes[0]], kwargs[nodes[1]])
        run[:] = [(*message_edges(layer, edge_index), num_nodes)]
        try:
            return original(edge_index, **kwargs)
        finally:
            run.clear()

    with (
        _counting_nodes(layer) as count,
        override(layer, "propagate", propagate),
        override(layer, "message", message),
    ):
        yield run


@contextmanager
def _transformer(layer: Any, tap: Tap) -> Iterator[None]:
    """Attention `softmax_j(<q_i, k_j + e_ij> / √C)` of TransformerConv."""
    check_layer(layer, "message", TransformerConv)
    shape = (-1, layer.heads, layer.out_channels)

    def message(
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        edge_attr: Tensor | None,
        index: Tensor,
        ptr: Tensor | None,
        size_i: int | None,
    ) -> Tensor:
        if layer.lin_edge is not None:
            if edge_attr is None:
                raise AttentionError("TransformerConv with `edge_dim` was called without `edge_attr`")
            edge_attr = layer.lin_edge(edge_attr).view(shape)
            key_j = key_j + edge_attr
        scores = (query_i * key_j).sum(dim=-1) / math.sqrt(layer.out_channels)
        attention = softmax(scores, index, ptr, size_i)
        attention = tap(attention, *edges[0], scores=lambda: scores)
        layer._alpha = attention  # what `return_attention_weights` shows
        weights = dropout(attention, p=layer.dropout, training=layer.training)
        values = value_j if edge_attr is None else value_j + edge_attr
        return values * weights.view(-1, layer.heads, 1)

    with override(layer, "_alpha", layer._alpha), _propagating(layer, message, ("key", "query")) as edges:
        yield


@contextmanager
def _supergat(layer: Any, tap: Tap) -> Iterator[None]:
    """Attention of SuperGATConv, by its own `get_attention`; its self-supervised loss is unchanged."""
    check_layer(layer, "message", SuperGATConv)

    def message(edge_index_i: Tensor, x_i: Tensor, x_j: Tensor, size_i: int | None) -> Tensor:
        attention = layer.get_attention(edge_index_i, x_i, x_j, num_nodes=size_i)
        attention = tap(attention, *edges[0])
        return x_j * dropout(attention, p=layer.dropout, training=layer.training).view(-1, layer.heads, 1)

    with _propagating(layer, message, ("x", "x")) as edges:
        yield


PYG_ADAPTERS: dict[type[nn.Module], Adapter] = {
    GATConv: _edge_updater_adapter(GATConv, "alpha", _additive_scores),
    GATv2Conv: _edge_updater_adapter(GATv2Conv, "x", _dynamic_scores),
    TransformerConv: _transformer,
    SuperGATConv: _supergat,
}


PYG_LINEARS: dict[type[nn.Module], Callable[[Any], dict[str, nn.Module]]] = {
    GATConv: lambda layer: (
        {"value": layer.lin_src, "right": layer.lin_dst} if layer.lin is None else {"value": layer.lin}
    ),
    GATv2Conv: lambda layer: {
        "value": layer.lin_l,
        **({} if layer.lin_r is layer.lin_l else {"right": layer.lin_r}),
    },
    TransformerConv: lambda layer: {"value": layer.lin_value, "query": layer.lin_query, "key": layer.lin_key},
    SuperGATConv: lambda layer: {"value": layer.lin},
}
"""The linear layers whose outputs are limited, by name.

GATConv and SuperGATConv compute both terms of the score from the values, where `torch.compile` supports no
hook: the limits of the values bound them.
"""
