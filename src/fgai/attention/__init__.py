"""Attention with its edges: record it, perturb it, limit it, in fgai's models and in any PyG model."""

from fgai.attention.calls import LayerRun, Observation, call_model, observe, prepared, wrap
from fgai.attention.hooks import Tape, find_layers, record, register_adapter
from fgai.attention.interface import (
    Adapter,
    GraphModel,
    Layerwise,
    Stage,
    Tap,
    TappedLayer,
    Wrapped,
    duplicate,
    evaluating,
    model_name,
    stages_of,
    unwrapped,
)
from fgai.attention.layer import LayerAttention
from fgai.attention.limits import (
    Limits,
    add_limits,
    can_be_limited,
    clipped_share,
    counting,
    entry_limits,
    limits_of,
    measuring,
    overriding,
    register_limits,
    replacing_entry,
    replacing_values,
    straight_through,
)
from fgai.attention.map import AttentionMap
from fgai.attention.reach import touched_rows, warn_coupled, warn_unread

__all__ = [
    "Adapter", "AttentionMap", "GraphModel", "LayerAttention", "LayerRun", "Layerwise", "Limits",
    "Observation", "Stage", "Tap", "Tape", "TappedLayer", "Wrapped", "add_limits", "call_model",
    "can_be_limited", "clipped_share", "counting", "duplicate", "entry_limits", "evaluating", "find_layers",
    "limits_of", "measuring", "model_name", "observe", "overriding", "prepared", "record", "register_adapter",
    "register_limits", "replacing_entry", "replacing_values", "stages_of", "straight_through", "touched_rows",
    "unwrapped", "warn_coupled", "warn_unread", "wrap",
]  # fmt: skip
