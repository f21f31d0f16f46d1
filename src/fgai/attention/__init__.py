"""Attention with its edges: one forward pass that observes it, maps, a recorder, and adapters for models."""

from fgai.attention.adapter import GraphModel, ModelAdapter, adapter_of, prepared
from fgai.attention.forward import LayerRun, Observation, call_model, observe
from fgai.attention.layer import LayerAttention
from fgai.attention.layerwise import Layerwise, SplitLayer, Stage
from fgai.attention.map import AttentionMap
from fgai.attention.perturb import Perturb, Perturbation
from fgai.attention.reach import touched_rows
from fgai.attention.record import find_layers, record
from fgai.attention.registry import register_adapter
from fgai.attention.state import evaluating
from fgai.attention.tap import Adapter, Tap
from fgai.attention.tape import Tape
from fgai.attention.tapped import TappedLayer

__all__ = [
    "Adapter",
    "AttentionMap",
    "GraphModel",
    "LayerAttention",
    "LayerRun",
    "Layerwise",
    "ModelAdapter",
    "Observation",
    "Perturb",
    "Perturbation",
    "SplitLayer",
    "Stage",
    "Tap",
    "Tape",
    "TappedLayer",
    "adapter_of",
    "call_model",
    "evaluating",
    "find_layers",
    "observe",
    "prepared",
    "record",
    "register_adapter",
    "touched_rows",
]
