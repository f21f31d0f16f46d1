"""Call a model on a graph: `call_model` returns its logits, `observe` its attention, too.

A PyG model gets the fields of the graph by argument name; for links it must return embeddings [N, D].
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from fgai.attention.hooks import Perturb, _run_label, find_layers, record
from fgai.attention.interface import (
    Call,
    GraphModel,
    TappedLayer,
    Watch,
    Wrapped,
    _check_dtype,
    evaluating,
    graph_model,
    model_name,
    override,
    uncompiled,
)
from fgai.attention.layer import LayerAttention
from fgai.attention.limits import entry_limits, replacing_entry
from fgai.attention.map import AttentionMap
from fgai.cache import cached_on
from fgai.checks import one_of
from fgai.errors import AttentionError, FgaiError, InputError
from fgai.graph import Graph
from fgai.graph.fields import VALUES
from fgai.sparse import Adjacency, edge_keys
from fgai.tasks import link_logits
from fgai.threads import exclusive
from fgai.typed import typed

HEADS = ("each", "mean")
_ALWAYS = ("x", "edge_index")
_EXAMPLE = "`fgai.wrap(model, call=lambda m, g: m(g.x, g.edge_index))`, where g is a PyG `Data`"


@typed
def prepared(model: nn.Module, graph: Graph) -> Graph:
    """Return `graph` on the model's device, with everything the model needs added (self-loops, encodings).

    A graph that is already prepared is returned unchanged; PyG layers add self-loops themselves. `InputError`
    if the model cannot read the graph, or its outputs depend on the order of the edges.
    """
    own, device = graph_model(model), device_of(model, graph)
    if own is not None:
        own.check_graph(graph)
        return own.prepare(graph).to(device)
    graph = graph.to(device)
    _check_edge_order(model, graph)
    return graph


def device_of(model: nn.Module, graph: Graph) -> torch.device:
    """Return the device of a model's parameters; that of the graph if it has none."""
    parameter = next(model.parameters(), None)
    return graph.device if parameter is None else parameter.device


@typed
def wrap(model: nn.Module, call: Call, data: Any = None) -> Wrapped:
    """Tell fgai how to call `model`; the result is accepted wherever fgai takes a model.

    A model whose `forward` takes `x`, `edge_index` and, by these names, the other fields of the data
    (`edge_attr`, `edge_weight`, `batch`) needs no wrapping. For any other, `call(model, data)` computes the
    logits, a row per node or small graph, from a PyG `Data` with exactly these fields. Use the arguments of
    `call`, no variables from outside: fgai passes copies of the model, and graphs with more nodes and edges.
    The result is called on a PyG `Data` or a `Graph`; `.model` is the model itself.

    Outputs must not depend on the order of the edges. This is checked on the first graph, or at once if you
    give `data`. `InputError` if a call fails, returns another shape, or other logits for a copy of `data`.

    Example:
        >>> import fgai, torch
        >>> from torch_geometric.nn import GATv2Conv
        >>> data = fgai.load_dataset("planted").to_data()
        >>> data.edge_attr = torch.rand(data.num_edges, 2)
        >>> conv = GATv2Conv(data.num_features, 5, edge_dim=2).eval()
        >>> mine = fgai.wrap(conv, lambda m, g: m(g.x, g.edge_index, g.edge_attr), data)
        >>> mine(data).shape
        torch.Size([2000, 5])
    """
    if not callable(call):
        raise InputError(f"`call` must be a function (model, data) → logits, got {type(call).__name__}")
    if isinstance(uncompiled(model), GraphModel | Wrapped):
        raise InputError(f"{type(model).__name__} needs no `wrap`; pass it as it is")
    wrapped = Wrapped(model, call)
    if data is None:
        return wrapped
    graph = prepared(wrapped, data if isinstance(data, Graph) else Graph.from_data(data))
    fields = _fields_of(graph)
    with evaluating(wrapped), torch.no_grad():
        copied = _call_with(wrapped, fields, graph.name)
        try:
            original = wrapped(graph if isinstance(data, Graph) else data.clone().to(graph.device))
        except Exception as error:
            raise InputError(f"`call` failed on `data` itself: {error}") from error
        if _differ(copied, original) and not _differ(copied, _call_with(wrapped, fields, graph.name)):
            raise InputError(
                f"{model_name(wrapped)} returns other logits for `data` than for the fields fgai keeps of"
                f" it ({', '.join(fields)}); put what else `call` reads into `x` or `edge_attr`"
            )
    return wrapped


def _outputs(model: nn.Module, graph: Graph, order: Tensor | None = None) -> Tensor:
    """Return the model's output; with `order` [K], for the edges of `graph` at these positions."""
    fields = _fields_of(graph, order)
    try:
        outputs = _call_with(model, fields, graph.name)
    except (FgaiError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in fields.items())
        text = f"{model_name(model)} failed on {graph.name!r} with {shapes}: {error}; check how it is called"
        raise InputError(f"{text}, how many features it reads, and that it keeps nothing per node") from error
    outputs = _tensor(outputs, model)
    rows = graph.num_nodes if graph.batch is None or graph.links is not None else graph.num_graphs
    if isinstance(uncompiled(model), Wrapped) and (outputs.dim() != 2 or outputs.shape[0] != rows):
        unit = "node" if rows == graph.num_nodes else "graph"
        text = f"`call` must return logits [{rows}, classes] on {graph.name!r}, a row per {unit}"
        raise InputError(f"{text}, got {tuple(outputs.shape)} from {model_name(model)}")
    return outputs


def _check_edge_order(model: nn.Module, graph: Graph) -> None:
    """Check, once per model and graph, that outputs do not depend on order or duplicates of the edges.

    fgai sorts and merges edges. A model whose outputs differ from call to call is not checked.
    """
    name = model_name(model)
    checked: WeakSet[nn.Module] = cached_on(graph, "fgai.attention.calls", WeakSet)
    if model in checked:
        return
    if not isinstance(uncompiled(model), Wrapped):
        _arguments(model, _fields_of(graph), graph.name)
    _check_dtype(model, graph)
    edges = torch.arange(graph.num_edges, device=graph.device)
    cuda = [graph.device] if graph.device.type == "cuda" else []
    with evaluating(model), torch.no_grad(), torch.random.fork_rng(cuda):
        outputs = _outputs(model, graph)

        def outputs_change(order: Tensor) -> bool:
            steps = torch.randperm(len(order), generator=torch.Generator().manual_seed(0))
            moved = _differ(outputs, _outputs(model, graph, order[steps.to(order.device)]))
            return moved and not _differ(outputs, _outputs(model, graph))

        if outputs_change(edges):
            text = f"{name} gives other outputs for the edges of {graph.name!r} in another order"
            raise InputError(f"{text}; if it stores values per edge, give them as `data.edge_attr`")
        if graph.merged is not None:
            repeated = torch.searchsorted(graph.keys, edge_keys(*graph.merged))
            if outputs_change(torch.cat([edges, repeated])):
                text = f"{name} counts the {graph.merged.shape[1]} duplicate edges of {graph.name!r}, which"
                raise InputError(f"{text} fgai merges; use `data = data.coalesce()` and train it on that")
    checked.add(model)


def _differ(one: Tensor, two: Tensor) -> bool:
    """Whether outputs differ by more than rounding; undefined for values that are not finite."""
    if one.shape != two.shape:
        return True
    if not one.numel() or not one.is_floating_point():  # nothing to round
        return not torch.equal(one, two)
    slack = torch.finfo(one.dtype).eps ** 0.5 * one.abs().max()
    return bool((one - two).abs().max() > slack)


def _tensor(output: object, model: nn.Module) -> Tensor:
    if isinstance(output, Tensor):
        return output
    text = f"{model_name(model)} must return one tensor of logits, got {type(output).__name__}; say where"
    raise InputError(f"{text} they are: `fgai.wrap(model, call=lambda m, g: m(g.x, g.edge_index)[0])`")


def _fields_of(graph: Graph, order: Tensor | None = None) -> dict[str, Tensor]:
    """Return the fields of a graph by PyG's names; with `order` [K], only the edges at these positions."""
    if graph.features is None:
        raise InputError(f"{graph.name!r} has no node features; give `data.x`, e.g. node degrees")
    on_edges = {name: value for name in VALUES if (value := getattr(graph, name)) is not None}
    edges = graph.edge_index
    if order is not None:
        edges = edges[:, order]
        on_edges = {name: value[order] for name, value in on_edges.items()}
    fields = {"x": graph.features.to_dense(), "edge_index": edges, **on_edges}
    return fields if graph.batch is None else {**fields, "batch": graph.batch}


def _call_with(model: nn.Module, fields: dict[str, Tensor], name: str) -> Any:
    if isinstance(uncompiled(model), Wrapped):
        from torch_geometric.data import Data

        return model(Data(**fields, num_nodes=len(fields["x"])))
    if len(fields) == len(_ALWAYS):
        return model(fields["x"], fields["edge_index"])
    positional, named = _arguments(model, fields, name)
    return model(*(fields[name] for name in positional), **{name: fields[name] for name in named})


def _arguments(
    model: nn.Module, fields: dict[str, Tensor], name: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which fields to pass by position and which by name; `InputError` unless `forward` takes all."""
    signature: inspect.Signature | None = None
    with suppress(TypeError, ValueError):  # scripted models have none
        signature = inspect.signature(uncompiled(model).forward)
    parameters = {} if signature is None else signature.parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    others = [field for field in fields if field not in _ALWAYS]
    named = tuple(field for field in others if takes_all or field in parameters)
    unread = [field for field in others if field not in named]
    positional: tuple[str, ...] = _ALWAYS
    if unread == ["batch"] and not named:
        positional = (*_ALWAYS, "batch")
    elif unread:
        text = f"`{unread[0]}` of the graph is no argument of {model_name(model)}.forward{signature or ''}"
        remedy = f"say how the model is called ({_EXAMPLE}), or set `data.{unread[0]} = None`"
        raise InputError(f"{text}; add it, {remedy}")
    try:
        if signature is not None:
            signature.bind(*positional, **dict.fromkeys(named))
    except TypeError:
        missing = [field for field in VALUES if field in parameters and field not in fields]
        lack = f"; {name!r} has no `{missing[0]}`, give `data.{missing[0]}`" if missing else ""
        call = f"model({', '.join((*positional, *(f'{field}={field}' for field in named)))})"
        text = f"{model_name(model)}.forward takes {signature}, fgai calls it as {call}{lack}"
        raise InputError(f"{text}; say how it is called: {_EXAMPLE}") from None
    return positional, named


@typed
@dataclass(frozen=True, eq=False)
class LayerRun:
    """One run of an attention layer: its positional `inputs`, and its `output`, None unless it is a tensor.

    `version` is `output._version` as the layer returned it: in-place changes increase it; -1 without output.
    """

    layer: nn.Module
    inputs: tuple[Any, ...]
    output: Tensor | None
    version: int


@typed
@dataclass(frozen=True, eq=False)
class Observation:
    """The result of one forward pass: the prepared `graph`, and `logits` per node, link or small graph.

    `attention` holds every layer before dropout, [E, H], or [E, 1] averaged over heads. `runs` has one entry
    per layer, or none: without `inputs`, or if layers and runs do not match. `ends_with_layer`: the logits
    are the unchanged output of the last layer.
    """

    graph: Graph
    logits: Tensor
    attention: AttentionMap
    runs: tuple[LayerRun, ...] = ()
    ends_with_layer: bool = False

    def averaged(self) -> Observation:
        """Return a copy with the heads averaged, [E, 1] per layer."""
        return replace(self, attention=self.attention.heads("mean"))


@typed
def call_model(model: nn.Module, graph: Graph) -> Tensor:
    """Return the model's logits on a graph: per node [N, C], per link [L, 2] or per small graph [G, C].

    Gradients flow to injected features and feature deltas of the graph. `InputError` if the graph has no
    features, the model does not take its `edge_attr` or `edge_weight`, or does not return one tensor.
    """
    if graph.entry_values is None:
        try:
            return _logits(model, graph)
        except RuntimeError:
            _check_dtype(model, graph)  # a clearer error than that of the kernels
            raise
    entry = entry_limits(model)
    if not entry:
        text = f"{graph.name!r} has `entry_values`, which only models with limits read"
        raise InputError(f"{text}; this {model_name(model)} has none, see `fgai.limit`")
    with replacing_entry(entry, graph.entry_values):
        return _logits(model, graph)


def _logits(model: nn.Module, graph: Graph) -> Tensor:
    if graph_model(model) is not None:
        return _tensor(model(graph), model)
    outputs, links = _outputs(model, graph), graph.links
    return outputs if graph.batch is not None or links is None else link_logits(outputs, links.pairs)


@typed
def observe(
    model: nn.Module,
    graph: Graph,
    *,
    heads: str = "each",
    grad: bool = False,
    inputs: bool = False,
    perturb: Perturb | None = None,
    ranked: bool = True,
) -> Observation:
    """Run the model once and return its logits and attention; the model is unchanged.

    Pass the graph through `prepared` first. With `grad` the model runs in its current mode and results keep
    their gradients; without, it runs in evaluation mode and results are detached. `inputs` fills `runs` of
    the result; `ranked` keeps the scores that rank neighbours; `perturb` changes attention, as in `record`.

    `heads="mean"` averages attention over the heads, several times faster where fused kernels can do it.
    Gradients still reach parameters and features, but `torch.autograd.grad(logits, attention)` works only
    with `heads="each"`. `AttentionError` if the model has no attention that can be recorded.
    """
    one_of(heads, "heads", HEADS)
    if grad:
        return _observe(model, graph, heads, inputs, perturb, ranked)
    with evaluating(model), torch.no_grad():
        observation = _observe(model, graph, heads, inputs, perturb, ranked)
    return replace(observation, logits=observation.logits.detach(), attention=observation.attention.detach())


def _observe(
    model: nn.Module, graph: Graph, heads: str, inputs: bool, perturb: Perturb | None, ranked: bool
) -> Observation:
    if heads == "mean" and perturb is None and not inputs:
        layers = find_layers(uncompiled(model))
        own = {name: layer for name, layer in layers.items() if isinstance(layer, TappedLayer)}
        if len(own) == len(layers):
            return _observe_mean(model, own, graph, ranked)
    runs: list[LayerRun] = []

    def after(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        tensor = output if isinstance(output, Tensor) else None
        runs.append(LayerRun(layer, inputs, tensor, -1 if tensor is None else tensor._version))

    with exclusive(), ExitStack() as stack:
        for layer in find_layers(uncompiled(model)).values() if inputs else ():
            stack.callback(layer.register_forward_hook(after).remove)
        tape = stack.enter_context(record(model, perturb=perturb, ranked=ranked))
        logits = call_model(model, graph)
    attention = tape.attention
    runs = runs if len(runs) == len(attention) else []
    # The same tensor, unchanged since the layer returned it: nothing ran between the layer and the logits.
    last = runs[-1] if runs else None
    same = last is not None and last.output is logits and logits._version == last.version
    observation = Observation(graph, logits, attention, tuple(runs), same)
    return observation.averaged() if heads == "mean" else observation


def _observe_mean(model: nn.Module, own: dict[str, TappedLayer], graph: Graph, ranked: bool) -> Observation:
    """Observe a model of fgai's own layers with the attention averaged over the heads."""
    entries: list[LayerAttention] = []
    runs: Counter[Any] = Counter()
    thread = threading.get_ident()

    def watch(name: str) -> Watch:
        def add(values: Tensor, adjacency: Adjacency, scores: Tensor | None) -> None:
            if threading.get_ident() != thread:
                return
            entries.append(LayerAttention.from_adjacency(adjacency, values, _run_label(runs, name), scores))

        return add

    with exclusive(), ExitStack() as stack:
        for name, layer in own.items():
            stack.enter_context(override(layer, "watch", watch(name)))
            stack.enter_context(override(layer, "ranked", ranked))
        logits = call_model(model, graph)
    if not entries:
        raise AttentionError(f"no attention layer of {model_name(model)} ran in its forward pass")
    return Observation(graph, logits, AttentionMap(tuple(entries)))
