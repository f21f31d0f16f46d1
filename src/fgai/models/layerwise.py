"""A model as stages that act row by row around each attention, so that some rows can be computed alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from fgai.models.layer import AttentionLayer
from fgai.sparse import Features
from fgai.tasks import get_task


class Stage(NamedTuple):
    """One attention layer and what follows it.

    Attributes:
        layer: the attention; nodes meet nowhere else.
        update: (states before the layer or None, what the layer gives) → states after it, row by row.
    """

    layer: AttentionLayer
    update: Callable[[Tensor | None, Tensor], Tensor]


class Layerwise(NamedTuple):
    """A model in evaluation mode: `leave(update_L(... update_1(enter(features), attention) ...))`.

    Attributes:
        enter: (features, positional encodings or None) → the first layer's input, row by row.
        stages: in the order they run.
        leave: last states → logits, row by row.
        keeps_state: whether `update` reads the states before the layer.
    """

    enter: Callable[[Features, Tensor | None], Tensor | Features]
    stages: list[Stage]
    leave: Callable[[Tensor], Tensor]
    keeps_state: bool


def layerwise_of(model: nn.Module) -> Layerwise | None:
    """Return `model.layerwise()` if it describes what the model now does, else None.

    Not in training mode, for tasks whose rows are not nodes, while attention is tapped or guarded or hooks
    are set, or when a subclass changed the forward pass without changing `layerwise`.
    """
    make = getattr(model, "layerwise", None)
    if make is None or not getattr(model, "is_fgai_model", False) or model.training:
        return None
    owners = {name: _owner(model, name) for name in ("embed", "forward", "read_out", "layerwise")}
    ours = all(owner.__module__.startswith("fgai.models.") for owner in owners.values())
    if not ours or owners["embed"] is not owners["layerwise"] or not get_task(str(model.task)).row_per_node:
        return None
    if getattr(model, "guard", None) is not None:
        return None
    for module in model.modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        if any(hooks) or getattr(module, "tap", None) is not None:
            return None
    found: Layerwise | None = make()
    return found


def _owner(model: nn.Module, name: str) -> type:
    """Return the class that defines a method of the model."""
    return next(kind for kind in type(model).__mro__ if name in vars(kind))
