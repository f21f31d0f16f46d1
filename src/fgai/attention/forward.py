"""One forward pass: logits, attention, and the inputs of each attention layer."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fgai.alone import alone
from fgai.attention.calls import adapter_of
from fgai.attention.hooks import find_layers, record
from fgai.attention.interface import TappedLayer, Watch, _check_dtype, evaluating, model_name, uncompiled
from fgai.attention.layer import LayerAttention
from fgai.attention.limits import entry_limits, replacing_entry
from fgai.attention.map import AttentionMap
from fgai.attention.perturb import PerturbLike
from fgai.checks import one_of
from fgai.errors import AttentionError, InputError
from fgai.graph import Graph
from fgai.sparse import Adjacency
from fgai.typed import typed

HEADS = ("each", "mean")


@typed
@dataclass(frozen=True, eq=False)
class LayerRun:
    """One run of one attention layer.

    Attributes:
        layer: the module.
        inputs: its positional arguments.
        output: if it returned one tensor.
        version: of the output's memory when it was returned; in-place changes raise it.
    """

    layer: nn.Module
    inputs: tuple[Any, ...]
    output: Tensor | None
    version: int


@typed
@dataclass(frozen=True, eq=False)
class Observation:
    """The result of one forward pass.

    Attributes:
        graph: as the model read it.
        logits: a row per node, link or small graph.
        attention: of every layer, before dropout: [E, H], or [E, 1] averaged over heads.
        runs: one per layer of `attention`; empty unless requested, or if the runs do not match the layers.
        ends_with_layer: whether the logits are the output of the last of `runs`, untouched.
    """

    graph: Graph
    logits: Tensor
    attention: AttentionMap
    runs: tuple[LayerRun, ...] = ()
    ends_with_layer: bool = False

    def averaged(self) -> Observation:
        """Return the same with the heads averaged, [E, 1] per layer."""
        return dataclasses.replace(self, attention=self.attention.heads("mean"))


@typed
def call_model(model: nn.Module, graph: Graph) -> Tensor:
    """Return the model's logits on a graph, without looking at its attention.

    Gradients flow to injected features and feature deltas of the graph. fgai's models are called as
    `model(graph)`, any other as `model(x, edge_index)`, see `fgai.attention.calls`.

    Args:
        model: fgai's or the user's.
        graph: with features, on the model's device.

    Returns:
        Logits: a row per node [N, C], per link [L, 2] or per small graph [G, C].

    Raises:
        InputError: the graph has no features, it has edge weights and the model is not fgai's, or the model
            returned something else than one tensor.
    """
    if graph.entry_values is None:
        try:
            return adapter_of(model).call(graph)
        except RuntimeError:
            _check_dtype(model, graph)  # a clearer error than that of the kernels
            raise
    entry = entry_limits(model)
    if not entry:
        raise InputError(
            f"{graph.name!r} has `entry_values`, which only models with limits read; this"
            f" {model_name(model)} has none, see `fgai.limit`"
        )
    with replacing_entry(entry, graph.entry_values):
        return adapter_of(model).call(graph)


@typed
def observe(
    model: nn.Module,
    graph: Graph,
    *,
    heads: str = "each",
    grad: bool = False,
    inputs: bool = False,
    perturb: PerturbLike | None = None,
    ranked: bool = True,
) -> Observation:
    """Run the model once and return its logits and attention, and leave it as it was.

    With `heads="mean"` the attention comes averaged from the fused kernels where possible: the same numbers
    up to rounding, several times faster. Gradients of logits and attention both reach the parameters and the
    features, but `torch.autograd.grad(logits, attention)` finds no path. With `heads="each"` it does.

    Args:
        model: fgai's or the user's.
        graph: prepared for the model (see `prepared`).
        heads: `each`, or `mean` for their average.
        grad: keep gradients, and run the model in the mode it is in; otherwise in evaluation mode, detached.
        inputs: also keep the inputs and the output of each attention layer.
        perturb: change of the attention before dropout, see `record`.
        ranked: also keep the scores that rank neighbours where heads are averaged.

    Raises:
        AttentionError: the model has no attention that can be recorded, see `record`.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.GAT.for_data(data)
        >>> observation = observe(model, model.prepare(data), heads="mean")
        >>> observation.logits.shape, observation.attention.last.num_heads, observation.logits.requires_grad
        (torch.Size([2000, 5]), 1, False)
    """
    one_of(heads, "heads", HEADS)
    if grad:
        return _observe(model, graph, heads, inputs, perturb, ranked)
    with evaluating(model), torch.no_grad():
        observation = _observe(model, graph, heads, inputs, perturb, ranked)
    return dataclasses.replace(
        observation, logits=observation.logits.detach(), attention=observation.attention.detach()
    )


def _observe(
    model: nn.Module, graph: Graph, heads: str, inputs: bool, perturb: PerturbLike | None, ranked: bool
) -> Observation:
    if heads == "mean" and perturb is None and not inputs:
        layers = find_layers(uncompiled(model))
        own = {name: layer for name, layer in layers.items() if isinstance(layer, TappedLayer)}
        if len(own) == len(layers):
            return _watched(model, own, graph, ranked)
    runs: list[LayerRun] = []
    with alone(), ExitStack() as stack:
        if inputs:
            stack.enter_context(_noted(find_layers(uncompiled(model)).values(), runs))
        tape = stack.enter_context(record(model, perturb=perturb, ranked=ranked))
        logits = call_model(model, graph)
    attention = tape.attention
    if len(runs) != len(attention):
        runs = []
    # The same object, never written to since: no operation can lie between the layer and the output.
    last = runs[-1] if runs else None
    same = last is not None and last.output is logits and logits._version == last.version
    observation = Observation(graph, logits, attention, tuple(runs), same)
    return observation.averaged() if heads == "mean" else observation


def _watched(model: nn.Module, layers: Mapping[str, TappedLayer], graph: Graph, ranked: bool) -> Observation:
    """Collect the attention of fgai's own layers, averaged over the heads."""
    entries: list[LayerAttention] = []
    count: Counter[str] = Counter()
    mine = threading.get_ident()

    def watch(name: str) -> Watch:
        def note(values: Tensor, adjacency: Adjacency, scores: Tensor | None) -> None:
            if threading.get_ident() != mine:
                return
            count[name] += 1
            label = name if count[name] == 1 else f"{name}:{count[name]}"
            entries.append(LayerAttention.on(adjacency, values, label, scores))

        return note

    with alone():
        before = [(layer.watch, layer.ranked) for layer in layers.values()]
        try:
            for name, layer in layers.items():
                layer.watch, layer.ranked = watch(name), ranked
            logits = call_model(model, graph)
        finally:
            for layer, (watched, ranked_before) in zip(layers.values(), before, strict=True):
                layer.watch, layer.ranked = watched, ranked_before
    if not entries:
        raise AttentionError(f"no attention layer of {model_name(model)} ran in its forward pass")
    return Observation(graph, logits, AttentionMap(tuple(entries)))


@contextmanager
def _noted(layers: Iterable[nn.Module], runs: list[LayerRun]) -> Iterator[None]:
    def after(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        tensor = output if isinstance(output, Tensor) else None
        runs.append(LayerRun(layer, inputs, tensor, -1 if tensor is None else tensor._version))

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(after).remove)
        yield
