"""Which layers have attention, and how to reach it: a registry of adapters, open to other layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from fgai.attention.tap import Adapter, Tap
from fgai.attention.tapped import TappedLayer
from fgai.errors import InputError
from fgai.sparse import Adjacency
from fgai.typed import typed

_PYG_LAYERS = ("GATConv", "GATv2Conv", "TransformerConv", "SuperGATConv")
_UNREAD = frozenset({
    "MultiheadAttention", "PerformerAttention", "PolynormerAttention", "SGFormerAttention",
    "AttentionalAggregation", "AGNNConv", "DNAConv", "DenseGATConv", "FAConv", "FeaStConv", "GATEConv",
    "HEATConv", "PointTransformerConv", "RGATConv",
})  # fmt: skip
"""Classes of PyTorch and PyG that attend in a way no adapter reads."""
_SWITCHED = {"GeneralConv": "attention", "HypergraphConv": "use_attention"}
"""Likewise, if an attribute says so."""


@typed
def register_adapter(layer_type: type[nn.Module], adapter: Adapter) -> None:
    """Teach `record` another kind of attention layer.

    The adapter is a context manager. While it is open, every run of the layer must call the tap exactly
    where the attention is ready and not yet dropped out, and go on with what the tap returns. When it
    closes, also by an error, the layer must be as it was. Subclasses use the adapter of their nearest
    registered ancestor; registering a type again replaces its adapter.

    Args:
        layer_type: the module class.
        adapter: `(layer, tap) → context manager`.

    Raises:
        InputError: `layer_type` is not a module class, or `adapter` cannot be called.

    Example:
        A layer that computes its attention in a method of its own:

        >>> from contextlib import contextmanager
        >>> from torch import nn
        >>> class MyLayer(nn.Module):
        ...     def attend(self, x, edge_index): ...  # [E, H], before dropout
        >>> @contextmanager
        ... def my_adapter(layer, tap):
        ...     attend = layer.attend
        ...     def tapped(x, edge_index):
        ...         return tap(attend(x, edge_index), edge_index[0], edge_index[1], x.shape[0])
        ...     layer.attend = tapped
        ...     try:
        ...         yield
        ...     finally:
        ...         del layer.attend
        >>> register_adapter(MyLayer, my_adapter)
    """
    if not isinstance(layer_type, type) or not issubclass(layer_type, nn.Module):
        raise InputError(f"`layer_type` must be a class of modules, got {layer_type!r}")
    if not callable(adapter):
        raise InputError(f"`adapter` must be a function (layer, tap) → context manager, got {adapter!r}")
    _REGISTRY[layer_type] = adapter


def adapter_for(layer: nn.Module) -> Adapter | None:
    """Return the adapter of a layer, or None where it has no attention known to fgai."""
    adapters = _all_adapters()
    for ancestor in type(layer).__mro__:
        if ancestor in adapters:
            return adapters[ancestor]
    return None


def known_layers() -> list[str]:
    """Return the names of the layer types that have an adapter, for messages."""
    others = (layer_type.__name__ for layer_type in _REGISTRY if layer_type is not TappedLayer)
    return list(dict.fromkeys(["fgai's own layers", *_PYG_LAYERS, *others]))


def unread_layers(model: nn.Module) -> dict[str, str]:
    """Return the modules that attend and have no adapter, by name: the name of their class."""
    found = {}
    for path, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        switch = next((_SWITCHED[kind] for kind in kinds if kind in _SWITCHED), None)
        attends = any(kind in _UNREAD for kind in kinds) or (
            switch is not None and bool(getattr(module, switch, False))
        )
        if attends and adapter_for(module) is None:
            found[path or kinds[0]] = kinds[0]
    return found


def _all_adapters() -> dict[type[nn.Module], Adapter]:
    # Importing PyG's layers takes seconds; where nobody has, no model can hold one.
    if "torch_geometric.nn" not in sys.modules:
        return _REGISTRY
    from fgai.attention.pyg import PYG_ADAPTERS

    return {**PYG_ADAPTERS, **_REGISTRY}


@contextmanager
def _own_layer(layer: TappedLayer, tap: Tap) -> Iterator[None]:
    """Use the `tap` attribute of fgai's own layers; a tap that is already set is called first."""
    previous = layer.tap

    def tapped(attention: Tensor, adjacency: Adjacency, scores: Tensor | None = None) -> Tensor:
        if previous is not None:
            given = attention
            attention = previous(given, adjacency, scores)
            scores = scores if attention is given else None
        source, destination = adjacency.source, adjacency.destination
        known = None if scores is None else lambda: scores
        return tap(attention, source, destination, adjacency.num_nodes, adjacency=adjacency, scores=known)

    layer.tap = tapped
    try:
        yield
    finally:
        layer.tap = previous


_REGISTRY: dict[type[nn.Module], Adapter] = {TappedLayer: _own_layer}
