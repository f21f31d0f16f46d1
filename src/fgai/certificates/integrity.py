"""Unaltered models: their class declares its `Capabilities`, and their forward pass is the declared one."""

from __future__ import annotations

import sys
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from fgai.attention import LayerAttention, LayerRun, Limits, TappedLayer, find_layers
from fgai.errors import AttentionError
from fgai.graph import Graph
from fgai.models import AttentionLayer, body_of, capabilities_of
from fgai.models.layer import InputNorm, Projection
from fgai.ops import aggregate
from fgai.threads import exclusive
from fgai.typed import typed

_KNOWN = frozenset([AttentionLayer, Projection, InputNorm, Limits, nn.Linear, nn.LayerNorm, nn.BatchNorm1d])
_KNOWN |= {nn.ReLU, nn.Identity, nn.Sequential, nn.ModuleList, nn.ModuleDict}
_PYG = getattr(find_spec("torch_geometric"), "submodule_search_locations", None) or []
_FOLDERS = tuple(f"{folder}/" for folder in (Path(__file__).parents[1], Path(torch.__file__).parent, *_PYG))
_PACKAGES = ("fgai", "torch", "torch_geometric", "builtins", "typing")
AGAIN = 1e-4  # relative change of an output that is computed again: a GPU adds in another order


def find_alteration(model: nn.Module) -> str | None:
    """Say why a model may compute something else than its class declares; None if it does not.

    All parts must be declared in `Capabilities`, or be fgai's or PyTorch's own, without hooks on the forward
    pass, taps, replaced methods, parametrisations or compiled calls.
    """
    with exclusive():
        if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
            return "a hook on all modules may change what they return"
        kinds = {type(module) for module in model.modules()}
        declared = {kind: able for kind in kinds if (able := capabilities_of(kind)) is not None}
        parts = {part for able in declared.values() for part in able.parts}
        for path, module in model.named_modules():
            if (alteration := _module_alteration(module, {*declared, *parts})) is not None:
                return f"{path or 'the model'} {alteration}"
    return None


def _module_alteration(
    module: nn.Module, declared: set[type[nn.Module]], *, known_hook: bool = False
) -> str | None:
    """Say why a module may compute something else than its class; `known_hook` if a hook on it is fgai's."""
    kind = type(module)
    if kind not in _KNOWN and kind not in declared:
        return f"is a {kind.__name__}, whose forward pass is not known"
    if (module._forward_hooks and not known_hook) or module._forward_pre_hooks:
        return "has a hook, which may change its input or output"
    if isinstance(module, TappedLayer):
        for name in ("tap", "watch"):
            if getattr(module, name) is not None:
                return f"has a `{name}`, which may change its attention"
    if isinstance(module, Limits) and module._override is not None:
        return "are limits that are being measured or overridden"
    for name in vars(module):
        if callable(getattr(kind, name, None)):
            return f"has `{name}` replaced"
    if (replaced := _replaced_method(kind, declared)) is not None:
        return f"is of a class whose `{replaced}` was replaced"
    if module._compiled_call_impl is not None:
        return "is compiled"
    if any(type(weight) is not nn.Parameter for weight in module.parameters(recurse=False)):
        return "has weights of another kind than `nn.Parameter`"
    return None


def _replaced_method(kind: type[nn.Module], declared: set[type[nn.Module]]) -> str | None:
    """Name a method that is not code of fgai, PyTorch or a declared class; None if there is none."""
    for ancestor in kind.__mro__[:-1]:
        body = ancestor if ancestor in declared or capabilities_of(ancestor) is not None else None
        for name, member in vars(ancestor).items():
            if not _is_original(member, name, body):
                return name
    return None


def _is_original(member: Any, name: str, body: type | None) -> bool:
    """Whether an attribute of a class is code of fgai, PyTorch or PyG, or of the class `body`, or no code."""
    # Names and modules are copied by `functools.wraps`; the code object and its globals are not.
    if isinstance(member, FunctionType):
        inner, path = getattr(member, "__wrapped__", None), member.__code__.co_filename
        own = path.startswith(_FOLDERS) or _is_generated(member) or _is_in_body(member, name, body)
        return own and (inner is None or _is_original(inner, name, body))
    if isinstance(member, classmethod | staticmethod):
        return _is_original(member.__func__, name, body)
    if isinstance(member, property):
        parts = (member.fget, member.fset, member.fdel)
        return all(one is None or _is_original(one, name, body) for one in parts)
    if isinstance(member, cached_property):
        return _is_original(member.func, name, body)
    if isinstance(member, type):
        return str(member.__module__).partition(".")[0] in _PACKAGES
    builtin = isinstance(member, GetSetDescriptorType | MemberDescriptorType)
    return builtin or not (callable(member) or hasattr(member, "__get__"))


def _is_generated(member: FunctionType) -> bool:
    """Whether PyG made a function of a message passing layer from its templates, in a module of its own."""
    name = member.__module__
    generated = name.startswith("torch_geometric.nn.conv.") and name.endswith(("_propagate", "_edge_updater"))
    return generated and member.__globals__ is vars(sys.modules.get(name, sys))


def _is_in_body(member: FunctionType, name: str, body: type | None) -> bool:
    """Whether the code of a function is written in the body of a class, under this name."""
    module = None if body is None else sys.modules.get(body.__module__)
    if body is None or module is None or member.__globals__ is not vars(module):
        return False
    return member.__code__.co_qualname == f"{body.__qualname__}.{name}"


def _rows_near(first: Tensor, second: Tensor) -> bool:
    """Whether two runs returned the same, row by row, up to the order of sums on a GPU."""
    if first.shape != second.shape or not first.numel():
        return first.shape == second.shape
    rows = first.reshape(first.shape[0], -1)
    room = AGAIN * rows.abs().amax(1, keepdim=True)
    return bool(((second.reshape_as(rows) - rows).abs() <= room).all())


def _layer_values(run: LayerRun, recorded: LayerAttention) -> Tensor | str:
    """Return the values [N, H, C] of a layer, computed again in float64 on the CPU, or why not."""
    layer, output = run.layer, run.output
    assert isinstance(layer, AttentionLayer) and output is not None and recorded.adjacency is not None
    with torch.no_grad():
        values = layer.sides(run.inputs[0])[2]
        again = layer.join(aggregate(recorded.values, values, recorded.adjacency))
    if not bool(values.isfinite().all() and output.isfinite().all()):
        return f"layer {recorded.name!r} computes numbers that are not finite"
    if not _rows_near(output, again):
        return f"layer {recorded.name!r} returns something else when it runs on its own"
    return values.detach().cpu().double()


INVARIANT = (
    "scores of old edges depend on nothing that an injection changes; new neighbours change the normaliser"
)
POSITIONAL_CONDITION = "if positional encodings are kept as computed on the original graph"
"""Condition of models that read positional encodings."""


@typed
def invariant_layers(model: nn.Module, graph: Graph) -> dict[str, str | None]:
    """Return by layer name why no injection can reorder old neighbours there; None where it may.

    The order (`LayerAttention.ranking`) stays where an injection does not change the inputs of the score: in
    the first attention layer of a model of features alone, and, on the condition `POSITIONAL_CONDITION`, of
    one with positional encodings. New neighbours may rank anywhere. The `graph` must be prepared for the
    model.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.GAT.for_data(data)
        >>> [why is not None for why in invariant_layers(model, model.prepare(data)).values()]
        [True, False]
    """
    try:
        names = list(find_layers(model))
    except AttentionError:
        return {}
    reasons: dict[str, str | None] = dict.fromkeys(names)
    plain = bool(body_of(model)) and find_alteration(model) is None
    if names and plain and getattr(model, "guard", None) is None and graph.edge_weight is None:
        reasons[names[0]] = INVARIANT if graph.positional is None else POSITIONAL_CONDITION
    return reasons
