"""Which layers can be limited, and how: a registry like that of adapters, open to other layers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from fgai.attention.limits import Limits, limits_of
from fgai.attention.record import find_layers
from fgai.attention.tapped import TappedLayer
from fgai.attention.wrapped import layout_of, model_name, uncompiled
from fgai.errors import AttentionError, InputError
from fgai.typed import typed

Limiter = Callable[[Any], None]
"""Adds limits to a layer, in place."""


def _limit_own(layer: TappedLayer) -> None:
    """Give one of fgai's own layers what it asks for."""
    layer.limits = nn.ModuleDict(layer.what_is_said()).to(next(layer.parameters()))


_LIMITERS: dict[type[nn.Module], Limiter] = {TappedLayer: _limit_own}


@typed
def register_limits(layer_type: type[nn.Module], limiter: Limiter) -> None:
    """Teach `add_limits` another kind of attention layer.

    Args:
        layer_type: the module class; subclasses use that of their nearest registered ancestor.
        limiter: adds `Limits` modules to a layer, in place, and has its forward pass through them.
    """
    if not isinstance(layer_type, type) or not issubclass(layer_type, nn.Module):
        raise InputError(f"`layer_type` must be a class of modules, got {layer_type!r}")
    _LIMITERS[layer_type] = limiter


@typed
def add_limits(model: nn.Module) -> None:
    """Give every attention layer of a model limits, infinite until they are measured; in place.

    Layers that have limits keep them.

    Raises:
        AttentionError: the model has no attention, or a layer that cannot be limited.
    """
    layers = find_layers(uncompiled(model))
    if not layers:
        raise AttentionError(f"{model_name(model)} has no attention layer to limit")
    for name, layer in layers.items():
        if limits_of(layer):
            continue
        limiter = _limiter_of(layer)
        if limiter is None:
            raise AttentionError(
                f"layer {name!r} ({type(layer).__name__}) cannot be limited; teach fgai how with"
                " `fgai.attention.register_limits`"
            )
        limiter(layer)


def _limiter_of(layer: nn.Module) -> Limiter | None:
    known = _LIMITERS
    if "torch_geometric.nn" in sys.modules:  # as in the registry of adapters: importing it takes seconds
        from fgai.attention.pyg_limits import PYG_LIMITERS

        known = {**PYG_LIMITERS, **_LIMITERS}
    for ancestor in type(layer).__mro__:
        if ancestor in known:
            return known[ancestor]
    return None


@typed
def entry_limits(model: nn.Module) -> list[Limits]:
    """Return the limits of what the first attention layer reads of a node; empty where it has none.

    What the layer derives from something limited is left out: a node cannot say it on its own. Of a
    heterogeneous model there are none: its layers read some nodes as sources and others as destinations.
    """
    if layout_of(model) is not None:
        return []
    first = next(iter(find_layers(uncompiled(model)).values()))
    return [limits for limits in limits_of(first) if not limits.derived]


@typed
def can_be_limited(model: nn.Module) -> bool:
    """Whether `add_limits` knows every attention layer of a model."""
    layers = find_layers(uncompiled(model)).values()
    return all(_limiter_of(layer) is not None and _says(layer) for layer in layers)


def _says(layer: nn.Module) -> bool:
    """Whether a layer of fgai's kind tells what it reads of a node."""
    return not isinstance(layer, TappedLayer) or type(layer).what_is_said is not TappedLayer.what_is_said
