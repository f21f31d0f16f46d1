"""Attention with its edges: one forward pass that observes it, maps, a recorder, and adapters for models."""

from fgai.attention.adapter import GraphModel, ModelAdapter, adapter_of, prepared
from fgai.attention.forward import LayerRun, Observation, call_model, observe
from fgai.attention.layer import LayerAttention
from fgai.attention.layerwise import Layerwise, SplitLayer, Stage
from fgai.attention.limited import add_limits, can_be_limited, entry_limits, register_limits
from fgai.attention.limits import (
    Limits,
    collecting,
    counting,
    hearing,
    limits_of,
    measuring,
    speaking,
    straight_through,
    usual_share,
    voiced,
)
from fgai.attention.map import AttentionMap
from fgai.attention.perturb import Perturb, Perturbation
from fgai.attention.reach import hop_rows, touched_rows, warn_coupled, warn_unread
from fgai.attention.record import find_layers, record
from fgai.attention.registry import register_adapter
from fgai.attention.state import duplicate, evaluating
from fgai.attention.tap import Adapter, Tap
from fgai.attention.tape import Tape
from fgai.attention.tapped import TappedLayer
from fgai.attention.wrap import wrap
from fgai.attention.wrapped import Wrapped, model_name, unwrapped

__all__ = [
    "Adapter",
    "AttentionMap",
    "GraphModel",
    "LayerAttention",
    "LayerRun",
    "Layerwise",
    "Limits",
    "ModelAdapter",
    "Observation",
    "Perturb",
    "Perturbation",
    "SplitLayer",
    "Stage",
    "Tap",
    "Tape",
    "TappedLayer",
    "Wrapped",
    "adapter_of",
    "add_limits",
    "call_model",
    "can_be_limited",
    "collecting",
    "counting",
    "duplicate",
    "entry_limits",
    "evaluating",
    "find_layers",
    "hearing",
    "hop_rows",
    "limits_of",
    "measuring",
    "model_name",
    "observe",
    "prepared",
    "record",
    "register_adapter",
    "register_limits",
    "speaking",
    "straight_through",
    "touched_rows",
    "unwrapped",
    "usual_share",
    "voiced",
    "warn_coupled",
    "warn_unread",
    "wrap",
]
