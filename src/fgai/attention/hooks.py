"""`record`: read and change the attention of a model inside a `with` block, through adapters."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fgai.attention.interface import (
    Adapter,
    EdgeType,
    NodeCount,
    Scores,
    TappedLayer,
    _layout_of,
    model_name,
    override,
    uncompiled,
    unwrapped,
)
from fgai.attention.layer import LayerAttention, mean_heads
from fgai.attention.map import AttentionMap
from fgai.errors import AttentionError, InputError
from fgai.sparse import Adjacency, edge_keys
from fgai.threads import exclusive
from fgai.typed import typed

T = TypeVar("T")
Perturb = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(number of the layer, attention [E, H], source [E], destination [E]) → attention [E, H] to use instead.

Layers are numbered in the order they run; edges are sorted by (destination, source).
"""
_PYG_LAYERS = ("GATConv", "GATv2Conv", "TransformerConv", "SuperGATConv")
_NOT_RECORDED = frozenset({
    "MultiheadAttention", "PerformerAttention", "PolynormerAttention", "SGFormerAttention",
    "AttentionalAggregation", "AGNNConv", "DNAConv", "DenseGATConv", "FAConv", "FeaStConv", "GATEConv",
    "HEATConv", "PointTransformerConv", "RGATConv",
})  # fmt: skip
"""Classes of PyTorch and PyG with attention that fgai does not record."""
_FLAGS = {"GeneralConv": "attention", "HypergraphConv": "use_attention"}
"""Classes that attend only if this attribute is true; not recorded either."""
_HETERO = "heterogeneous models need their data, use `fgai.hetero.attend(model, data)`"
_UNSUPPORTED = {
    "HeteroConv": _HETERO,
    "HGTConv": _HETERO,
    "HANConv": _HETERO,
    "DataParallel": "replicated models cannot be recorded; give its `module`",
}


def _run_label(
    runs: Counter[tuple[str, EdgeType | None]], name: str, edge_type: EdgeType | None = None
) -> str:
    """Count one more run of a layer and return its label, e.g. `"conv"`, then `"conv:2"`."""
    runs[name, edge_type] += 1
    count = runs[name, edge_type]
    label = name if count == 1 else f"{name}:{count}"
    return label if edge_type is None else f"{label}.{'__'.join(edge_type)}"


@typed
class Tape:
    """What `record` yields: the attention of the model's last forward pass, as `attention`.

    A part of the model called on its own, such as `model.encode(...)`, adds entries until `clear`. On a
    heterogeneous graph a layer has an entry per edge type.
    """

    def __init__(self, perturb: Perturb | None = None, *, ranked: bool = True, layout: Any = None) -> None:
        if perturb is not None and not callable(perturb):
            text = "`perturb` must be a function (layer, attention, source, destination) → attention"
            raise InputError(f"{text}, got {type(perturb).__name__}")
        self.perturb, self._ranked, self._layout, self._num_nodes = perturb, ranked, layout, 0
        self._layers: list[LayerAttention] = []
        self._runs: Counter[tuple[str, EdgeType | None]] = Counter()
        self._edges: dict[int, tuple[Tensor, ...]] = {}
        self._depth = 0
        self._complete = False
        self._thread = threading.get_ident()

    @property
    def attention(self) -> AttentionMap:
        """The attention that the layers used, before dropout; part of the autograd graph."""
        layers = tuple(self._layers)
        if not layers and self._complete and not self._depth:
            text = "the model ran, but none of its attention layers did"
            raise AttentionError(f"{text}; a `call` of `fgai.wrap` must use the model it is given")
        if not layers or self._depth:
            raise AttentionError("nothing is recorded yet; call the model inside the `record` block")
        return AttentionMap(layers)

    def clear(self) -> None:
        """Delete everything recorded."""
        self._runs.clear()
        self._layers.clear()
        self._complete = False

    def tap(
        self,
        name: str,
        attention: Tensor,
        source: Tensor,
        destination: Tensor,
        num_nodes: NodeCount,
        *,
        adjacency: Adjacency | None = None,
        scores: Scores | None = None,
        edge_type: EdgeType | None = None,
    ) -> Tensor:
        """Record one run of the layer `name` and return the attention that it must use, see `Tap`."""
        self._check_thread()
        if self._complete and self._depth == 0:
            text = f"layer {name!r} ran outside the recorded model's forward, after one had been recorded"
            remedy = "call the model itself, or `tape.clear()` before calling a part of it"
            raise AttentionError(f"{text}: {remedy} (activation checkpointing cannot be recorded)")
        if attention.dim() != 2 or attention.shape[0] != source.shape[0]:
            shape = f"[{source.shape[0]}, heads], one row per edge, got {tuple(attention.shape)}"
            raise AttentionError(f"attention of layer {name!r} must have shape {shape}")
        if self._layout is not None:
            name, edge_type = self._layout.place(name) if edge_type is None else (name, edge_type)
            source, destination = self._layout.ends(edge_type, source, destination)
            num_nodes = self._num_nodes
        elif isinstance(num_nodes, tuple):
            text = f"layer {name!r} ran on a bipartite graph with {num_nodes[0]} sources and {num_nodes[1]}"
            raise AttentionError(f"{text} destinations, which cannot be recorded; see `fgai.hetero`")
        ranks = mean_heads(scores()) if self._ranked and scores is not None else None
        label = _run_label(self._runs, name, edge_type)
        if adjacency is not None:
            return self._append(LayerAttention.from_adjacency(adjacency, attention, label, ranks))
        source, destination, order, inverse = self._sorted(source, destination)
        values = attention.index_select(0, order)
        ranks = None if ranks is None else ranks.index_select(0, order)
        ends = source, destination, num_nodes, label
        computed = LayerAttention(values, *ends, scores=ranks, edge_type=edge_type)
        return self._append(computed).index_select(0, inverse)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start a forward pass of the recorded model; clears what was recorded before."""
        self._check_thread()
        for value in (*args, *kwargs.values()):
            if isinstance(value, Mapping) and any(isinstance(key, tuple) and len(key) == 3 for key in value):
                raise AttentionError(f"the model was called with edges per type: {_HETERO}")
        if self._depth == 0:
            self.clear()
            self._num_nodes = 0 if self._layout is None else int(args[0].num_nodes)
        self._depth += 1

    def mark_complete(self) -> None:
        """Keep what was recorded; called before `end` if the forward pass raised no error."""
        if self._depth == 1:
            self._complete = True

    def end(self) -> None:
        """End a forward pass, also one that raised an error."""
        if threading.get_ident() != self._thread:
            return
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and not self._complete:
            self.clear()

    def _sorted(self, source: Tensor, destination: Tensor) -> tuple[Tensor, ...]:
        """Return sorted source and destination, the order and its inverse; cached per layer and its edges."""
        index = len(self._layers)
        if index in self._edges:
            ends, edges = self._edges[index][:2], self._edges[index][2:]
            same_device = ends[0].device == source.device
            if same_device and torch.equal(ends[0], source) and torch.equal(ends[1], destination):
                return edges
        order = torch.argsort(edge_keys(source, destination), stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        edges = source[order], destination[order], order, inverse
        self._edges[index] = (source, destination, *edges)
        return edges

    def _append(self, computed: LayerAttention) -> Tensor:
        used, values = computed, computed.values
        if self.perturb is not None:
            result = self.perturb(len(self._layers), values, computed.source, computed.destination)
            if not isinstance(result, Tensor) or result.shape != values.shape:
                got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
                text = f"`perturb` must return the attention of layer {computed.name!r} with shape"
                raise AttentionError(f"{text} {tuple(values.shape)}, got {got}")
            used = computed.with_values(result.to(values.dtype))
        self._layers.append(used)
        return used.values

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            remedy = "give every thread a copy (`copy.deepcopy(model)`), or wait for the block to end"
            raise AttentionError(f"the model is being recorded in another thread; {remedy}")


@typed
@contextmanager
def record(model: nn.Module, *, perturb: Perturb | None = None, ranked: bool = True) -> Iterator[Tape]:
    """Record the attention of `model`, and perturb it if asked, while the block runs.

    The block yields a `Tape`; its `attention` is the `AttentionMap` of the last forward pass. Works for
    fgai's models and for any model built from GATConv, GATv2Conv, TransformerConv or SuperGATConv; add other
    layers with `register_adapter`. Attention is recorded after the softmax and before dropout, on the edges
    the layer used, including self-loops it added, sorted by (destination, source). A layer that runs twice in
    a forward pass has two entries, `"conv"` and `"conv:2"`.

    The model is unchanged after the block, also on error, and draws the same random numbers. Blocks may be
    nested: the outer one perturbs first. Compiled models run uncompiled. Inside the block the model cannot be
    copied, pickled or called from another thread; blocks in other threads wait.

    `perturb(number of the layer, attention [E, H], source [E], destination [E])` returns the attention [E, H]
    that a layer uses instead; it is not normalised again. `ranked` also records the scores before the
    softmax, which `LayerAttention.ranking` reads.

    Raises:
        AttentionError: the model has no attention layer, or one that cannot be recorded; when it is called:
            the graph is bipartite, its edges have an unsupported format, or `perturb` returned another shape.

    Example:
        >>> import torch
        >>> from torch_geometric.nn import GATConv
        >>> conv = GATConv(3, 2, heads=2).eval()
        >>> with record(conv) as tape:
        ...     out = conv(torch.ones(4, 3), torch.tensor([[0, 1], [2, 2]]))
        >>> tape.attention.last.source.tolist(), tape.attention.last.destination.tolist()
        ([0, 1, 0, 1, 2, 3], [0, 1, 2, 2, 2, 3])
    """
    if torch.compiler.is_compiling():
        raise AttentionError("`record` cannot be compiled; open it outside `torch.compile`")
    model = uncompiled(model)
    layers = find_layers(model)
    tape = Tape(perturb, ranked=ranked, layout=_layout_of(model))
    with exclusive(), ExitStack() as stack:
        if "torch._dynamo" in sys.modules:  # otherwise nothing can have been compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        begin = model.register_forward_pre_hook(lambda _, *call: tape.begin(*call), with_kwargs=True)
        stack.callback(begin.remove)
        for name, layer in layers.items():
            stack.enter_context(_tapped(layer, name, tape))
        stack.callback(model.register_forward_hook(lambda *_: tape.mark_complete()).remove)
        end = model.register_forward_hook(lambda *_: tape.end(), always_call=True)
        stack.callback(end.remove)
        yield tape


@typed
def find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention layers of a model by name; of a `Wrapped` model, by their names in `.model`.

    `AttentionError` if there is none, or the model is scripted, or heterogeneous and no `HeteroModel`.
    """
    layers: dict[str, nn.Module] = {}
    kinds: set[str] = set()
    hetero = _layout_of(model) is not None
    for path, module in unwrapped(model).named_modules():
        kind = type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise AttentionError(f"{path or 'the model'} is scripted by TorchScript and cannot be recorded")
        if kind in _UNSUPPORTED and not (hetero and _UNSUPPORTED[kind] is _HETERO):
            raise AttentionError(f"{path or 'the model'} is a {kind}: {_UNSUPPORTED[kind]}")
        if _adapter_for(module) is not None and "_orig_mod" not in module._modules:
            layers[path.replace("_orig_mod.", "").removesuffix("._orig_mod") or kind] = module
        kinds.add(kind)
    if not layers:
        others = (layer_type.__name__ for layer_type in _REGISTRY if layer_type is not TappedLayer)
        readable = ", ".join(dict.fromkeys(["fgai's own layers", *_PYG_LAYERS, *others]))
        text = f"{model_name(model)} has no attention layer fgai knows ({readable}); its modules are"
        raise AttentionError(f"{text} {', '.join(sorted(kinds))}; use `fgai.attention.register_adapter`")
    return layers


def _unrecorded_layers(model: nn.Module) -> dict[str, str]:
    """Return the modules whose attention is not recorded: name → class name."""
    layers = {}
    for path, module in model.named_modules():
        kinds = [kind.__name__ for kind in type(module).__mro__]
        switched = any(getattr(module, _FLAGS[kind], False) for kind in kinds if kind in _FLAGS)
        attends = switched or any(kind in _NOT_RECORDED for kind in kinds)
        if attends and _adapter_for(module) is None:
            layers[path or kinds[0]] = kinds[0]
    return layers


@typed
def register_adapter(layer_type: type[nn.Module], adapter: Adapter) -> None:
    """Make `record` support a class of attention layers.

    `adapter(layer, tap)` returns a context manager. Inside it, every run of the layer passes its attention
    before dropout to `tap` and uses what `tap` returns, see `Tap`; afterwards, also on error, the layer is as
    before. Subclasses use the adapter of their nearest registered base class.
    """
    if not isinstance(layer_type, type) or not issubclass(layer_type, nn.Module):
        raise InputError(f"`layer_type` must be a class of modules, got {layer_type!r}")
    if not callable(adapter):
        raise InputError(f"`adapter` must be a function (layer, tap) → context manager, got {adapter!r}")
    _REGISTRY[layer_type] = adapter


def _registered_for(
    layer: nn.Module, registry: Mapping[type[nn.Module], T], pyg_entries: Callable[[Any], Mapping[Any, T]]
) -> T | None:
    """Return the entry of the layer's class or nearest base; `pyg_entries(module)` adds those of PyG."""
    # Importing PyG's layers takes seconds; while they are not imported, no model can contain one.
    if "torch_geometric.nn" in sys.modules:
        from fgai.attention import pyg

        registry = {**pyg_entries(pyg), **registry}
    return next((registry[kind] for kind in type(layer).__mro__ if kind in registry), None)


def _adapter_for(layer: nn.Module) -> Adapter | None:
    return _registered_for(layer, _REGISTRY, lambda pyg: pyg.PYG_ADAPTERS)


_REGISTRY: dict[type[nn.Module], Adapter] = {TappedLayer: lambda layer, tap: override(layer, "tap", tap)}
_RECORDED: WeakKeyDictionary[nn.Module, tuple[list[tuple[str, Tape]], ExitStack]] = WeakKeyDictionary()
"""Layer → the (name, tape) of each block that records it, outermost first, and what closes its adapter."""


@contextmanager
def _tapped(layer: nn.Module, name: str, tape: Tape) -> Iterator[None]:
    """Record every run of `layer` on the tape; blocks that record the same layer share its adapter."""
    if layer not in _RECORDED:
        _RECORDED[layer] = _start_adapter(layer)
    tapes, adapter = _RECORDED[layer]
    tapes.append((name, tape))
    try:
        yield
    finally:
        tapes.remove((name, tape))
        if not tapes:
            del _RECORDED[layer]
            adapter.close()


def _start_adapter(layer: nn.Module) -> tuple[list[tuple[str, Tape]], ExitStack]:
    tapes: list[tuple[str, Tape]] = []
    calls = [0]

    def tap(attention: Tensor, *ends: Any, scores: Scores | None = None, **options: Any) -> Tensor:
        calls[0] += 1
        for name, tape in tuple(tapes):
            attention = tape.tap(name, attention, *ends, scores=scores, **options)
            scores = scores if tape.perturb is None else None  # scores do not rank perturbed attention
        return attention

    def before(*_: Any) -> None:
        calls[0] = 0

    def after(module: nn.Module, *_: Any) -> None:
        if calls[0] == 0:
            text = f"layer {tapes[0][0]!r} ({type(module).__name__}) ran without showing its attention"
            raise AttentionError(f"{text}; give it an adapter with `fgai.attention.register_adapter`")

    adapter, stack = _adapter_for(layer), ExitStack()
    assert adapter is not None
    stack.enter_context(adapter(layer, tap))
    stack.callback(layer.register_forward_pre_hook(before).remove)
    stack.callback(layer.register_forward_hook(after).remove)
    return tapes, stack
