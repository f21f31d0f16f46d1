"""`Wrapped`: a model together with how it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fgai.graph import Graph
from fgai.typed import typed

Call = Callable[[Any, Any], Tensor]
"""From a model and a PyG `Data` to the model's logits."""


@typed
class Wrapped(nn.Module):
    """A model that is called in a way of its own; made by `fgai.wrap`.

    It is called on a PyG `Data` or a `Graph`, and so are the models made of it.

    Attributes:
        model: as given.
        call: how it is called on a `Data`.
        layout: of models of heterogeneous graphs, see `fgai.hetero.HeteroLayout`; None for all others.
    """

    layout: Any = None

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, data: Any) -> Tensor:
        """Return what the model says of a PyG `Data`, or of a `Graph` as such."""
        return self.call(self.model, data.to_data() if isinstance(data, Graph) else data)


def layout_of(model: nn.Module) -> Any:
    """Return the layout of a model of heterogeneous graphs; None for all others."""
    model = uncompiled(model)
    return model.layout if isinstance(model, Wrapped) else None


@typed
def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside a `Wrapped`; any other as it is."""
    return model.model if isinstance(model, Wrapped) else model


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wrapped; any other as it is."""
    inner = model._modules.get("_orig_mod")
    return model if inner is None else inner


@typed
def model_name(model: nn.Module) -> str:
    """Return the name of a model's class, for messages and records: that of the model inside a wrapper."""
    return type(uncompiled(unwrapped(uncompiled(model)))).__name__
