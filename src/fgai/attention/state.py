"""Leave a model as it was found: evaluation mode for the length of a block, and independent copies."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor, nn

from fgai.alone import alone
from fgai.typed import typed

ModelT = TypeVar("ModelT", bound=nn.Module)


@typed
@contextmanager
def evaluating(model: ModelT, *, freeze: bool = False) -> Iterator[ModelT]:
    """Put `model` in evaluation mode for the block, then restore every module's own flag, also on error.

    A model may be partly in training mode (a frozen batch norm, say): the flags come back one by one.
    Gradients to inputs and to attention still flow; use `torch.no_grad` where none are needed. Such blocks in
    other threads wait for the end of this one (see `fgai.alone`).

    Args:
        model: any module.
        freeze: also turn off the parameters' gradients for the block; `requires_grad` comes back one by one
            and `grad` is never touched.

    Yields:
        The model.

    Example:
        >>> from torch import Tensor, nn
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Dropout()).train()
        >>> with evaluating(model, freeze=True):
        ...     model.training, model[0].weight.requires_grad
        (False, False)
        >>> model.training, model[0].weight.requires_grad
        (True, True)
    """
    with alone(), _changed(model, freeze):
        yield model


@contextmanager
def _changed(model: nn.Module, freeze: bool) -> Iterator[None]:
    flags = [(module, module.training) for module in model.modules()]
    grads = [(parameter, parameter.requires_grad) for parameter in model.parameters()] if freeze else []
    was_training = model.training
    try:
        if any(flag for _, flag in flags):
            model.eval()
        for parameter, _ in grads:
            parameter.requires_grad_(False)
        yield
    finally:
        if model.training != was_training:
            model.train(was_training)  # through the model's own `train`, which may do more than set a flag
        for module, flag in flags:
            module.training = flag
        for parameter, grad in grads:
            parameter.requires_grad_(grad)


@typed
def duplicate(model: ModelT) -> ModelT:
    """Return an independent copy of a model.

    Layers may keep tensors of their last forward pass (SuperGATConv does), which `copy.deepcopy` refuses
    while they carry a gradient history; the copy has their values alone.
    """
    with alone():
        values = (value for module in model.modules() for value in vars(module).values())
        passing = [value for value in values if isinstance(value, Tensor) and not value.is_leaf]
        return copy.deepcopy(model, {id(value): value.detach().clone() for value in passing})
