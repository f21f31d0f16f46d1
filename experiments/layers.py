"""Means over layers: which layers they are about, so that two models are compared over the same ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from statistics import fmean
from typing import Any

from fgai.metrics import UNIFORM_SHARPNESS
from fgai.records import look_up

WHOLE = "all"
"""Last part of the path of a mean over layers."""
SPEAKING = ("similarity", "sharpness")
"""What is only measured where the vanilla attention says something."""


def by_layer(metrics: Mapping[str, Any], path: str) -> dict[int, float] | None:
    """Return the values a mean over layers is made of, by layer; None where a path is no such mean.

    A layer has no value where nothing can be measured (no node whose top 5 could be lost is in reach), and,
    for similarity and sharpness, where the vanilla attention is flat.
    """
    parent, _, last = path.rpartition(".")
    held = look_up(metrics, f"{parent}.layers") if last == WHOLE else None
    if not isinstance(held, list):
        return None
    flat = flat_layers(metrics) if path.partition(".")[0] in SPEAKING else ()
    return {layer: value for layer, value in enumerate(held) if value is not None and layer not in flat}


def mean_over(values: Mapping[int, float], layers: Collection[int] | None = None) -> float | None:
    """Return the mean over some layers, all by default; None where none of them has a value."""
    held = [value for layer, value in values.items() if layers is None or layer in layers]
    return fmean(held) if held else None


def common(values: Iterable[Mapping[int, float]]) -> frozenset[int]:
    """Return the layers that all have; who has none at all says nothing and is not asked."""
    held = [frozenset(one) for one in values if one]
    return frozenset.intersection(*held) if held else frozenset()


def flat_layers(metrics: Mapping[str, Any]) -> frozenset[int]:
    """Return the layers in which the vanilla model's attention is flat to `fgai.metrics.UNIFORM_SHARPNESS`.

    Where every layer is, none is left out. Records of before the vanilla model's sharpness was kept leave out
    none either.
    """
    held = look_up(metrics, "sharpness.vanilla.layers") or []
    flat = frozenset(
        layer for layer, value in enumerate(held) if value is not None and value <= UNIFORM_SHARPNESS
    )
    return flat if len(flat) < len(held) else frozenset()
