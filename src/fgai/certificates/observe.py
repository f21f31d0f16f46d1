"""One forward pass as the certificates see it: logits, attention, and what went into each attention layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fgai.attention import AttentionMap, call_model, evaluating, find_layers, record
from fgai.checks import finite
from fgai.graph import Graph


@dataclass(frozen=True, eq=False)
class Run:
    """One run of one attention layer.

    Attributes:
        layer: the module.
        inputs: what it was called with, by position.
        output: what it returned, if that was one tensor.
        version: of the output's memory when it was returned; in-place changes raise it.
    """

    layer: nn.Module
    inputs: tuple[Any, ...]
    output: Tensor | None
    version: int


@dataclass(frozen=True, eq=False)
class Observation:
    """What one forward pass showed.

    Attributes:
        logits: [N, C].
        attention: of every layer, before dropout.
        runs: one per layer of `attention`; empty if the layers could not be told apart.
        graph: as the model read it.
        ends_with_layer: whether the logits are the last attention layer's output, untouched.
    """

    logits: Tensor
    attention: AttentionMap
    runs: tuple[Run, ...]
    graph: Graph
    ends_with_layer: bool


def observe(model: nn.Module, graph: Graph) -> Observation:
    """Run `model` once in evaluation mode, without gradients, and leave it as it was.

    Args:
        model: fgai's or the user's.
        graph: prepared for the model, on its device.

    Raises:
        AttentionError: the model has no attention that can be recorded.
        InputError: logits or attention that are not finite.
    """
    runs: list[Run] = []
    with torch.no_grad(), evaluating(model), _watched(model, runs), record(model) as tape:
        logits = call_model(model, graph)
    attention = tape.attention.detach()
    finite(logits, "the model's logits")
    for layer in attention:
        finite(layer.values, f"attention of layer {layer.name!r}")
    if len(runs) != len(attention):
        runs = []
    # The same object, never written to since: no operation can lie between the layer and the output.
    last = runs[-1] if runs else None
    same = last is not None and last.output is logits and logits._version == last.version
    return Observation(logits.detach(), attention, tuple(runs), graph, same)


@contextmanager
def _watched(model: nn.Module, runs: list[Run]) -> Iterator[None]:
    def after(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        tensor = output if isinstance(output, Tensor) else None
        runs.append(Run(layer, inputs, tensor, -1 if tensor is None else tensor._version))

    with ExitStack() as stack:
        for layer in find_layers(getattr(model, "_orig_mod", model)).values():
            stack.callback(layer.register_forward_hook(after).remove)
        yield
