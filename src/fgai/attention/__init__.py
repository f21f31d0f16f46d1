"""Attention with its edges: maps, a recorder that can also perturb, and adapters for PyG models."""

from fgai.attention.forward import call_model, logits_and_attention, observe
from fgai.attention.layer import LayerAttention
from fgai.attention.map import AttentionMap
from fgai.attention.perturb import Perturb, Perturbation
from fgai.attention.reach import touched_rows
from fgai.attention.record import find_layers, record
from fgai.attention.registry import register_adapter
from fgai.attention.state import evaluating
from fgai.attention.tap import Adapter, Tap
from fgai.attention.tape import Tape

__all__ = [
    "Adapter",
    "AttentionMap",
    "LayerAttention",
    "Perturb",
    "Perturbation",
    "Tap",
    "Tape",
    "call_model",
    "evaluating",
    "find_layers",
    "logits_and_attention",
    "observe",
    "record",
    "register_adapter",
    "touched_rows",
]
