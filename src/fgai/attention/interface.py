"""Base classes of models and layers; functions to unwrap, copy or evaluate a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor, nn

from fgai.attention.layer import mean_heads
from fgai.errors import AttentionError, FgaiWarning, InputError, warn
from fgai.graph import Graph
from fgai.sparse import Adjacency, Features
from fgai.threads import exclusive
from fgai.typed import typed

ModelT = TypeVar("ModelT", bound=nn.Module)
_ABSENT = object()
Call = Callable[[Any, Any], Tensor]
"""(model, PyG `Data`) → logits."""
Watch = Callable[[Tensor, Adjacency, Tensor | None], None]
"""Called with attention [E, 1], edges, and scores [E] or None; both averaged over the heads."""

EdgeType = tuple[str, str, str]
"""Type of the source, name of the relation, type of the destination; as in PyG's `HeteroData`."""
NodeCount = int | tuple[int, int]
"""Number of nodes, or of sources and of destinations where these are numbered separately."""
Scores = Callable[[], Tensor]
"""Computes the scores [E, H] when they are needed."""

Tap = Callable[..., Tensor]
"""`tap(attention, source, destination, num_nodes, adjacency=None, scores=None, edge_type=None) → attention`.

An adapter calls it once per run of its layer with the attention [E, H] after the softmax and before dropout,
not detached; the layer must use the [E, H] it returns. Edges [E] int64 come in any order, also parallel ones;
`num_nodes` is N, or the counts of sources and destinations. `adjacency`: the same edges in this order, as an
`Adjacency`; `scores`: a function that returns [E, H] before the softmax, to rank by; `edge_type`: of edges.
"""
Adapter = Callable[[Any, Tap], AbstractContextManager[None]]
"""(layer, tap) → context manager; inside it the layer calls `tap`, after it the layer is as before."""


class Stage(NamedTuple):
    """One step of a `Layerwise`: `update(previous states or None, output of layer)` gives new states."""

    layer: Any
    update: Callable[[Tensor | None, Tensor], Tensor]


class Layerwise(NamedTuple):
    """The forward pass in evaluation mode as `enter`, one `Stage` after the other, and `leave`.

    Nodes interact only in the stages' layers. `enter` maps features and encodings (or None), row by row,
    to the first input, `leave` the last states to logits; with `keeps_state`, `update` reads previous states.
    """

    enter: Callable[[Features, Tensor | None], Tensor | Features]
    stages: list[Stage]
    leave: Callable[[Tensor], Tensor]
    keeps_state: bool


class GraphModel(nn.Module):
    """Base of models that are called as `model(graph)` and read features and edge weights from the graph.

    If a subclass overrides a method in `forward_parts`, `layerwise` returns None unless overridden, too.
    """

    forward_parts: ClassVar[frozenset[str]] = frozenset({"forward"})

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for kind in cls.__mro__:
            if "layerwise" in vars(kind):
                return
            if cls.forward_parts & vars(kind).keys():
                cls.layerwise = GraphModel.layerwise  # type: ignore[method-assign]
                return

    def check_graph(self, graph: Graph) -> None:
        """Raise `InputError` if the model cannot read `edge_attr`, or the dtype of the features."""
        self.check_edges(graph)
        _check_dtype(self, graph)

    @classmethod
    def check_edges(cls, graph: Graph) -> None:
        """Raise `InputError` if the graph has `edge_attr`; override this in a class that reads it."""
        if graph.edge_attr is not None:
            text = f"{cls.__name__} does not read `edge_attr`, which {graph.name!r} has; use a model of PyG"
            raise InputError(f"{text} layers with `edge_dim`, or set `data.edge_attr = None`")

    def prepare(self, graph: Graph) -> Graph:
        """Return `graph` with what the model needs added; the same object if nothing is missing."""
        return graph

    @property
    def can_capture(self) -> bool:
        """Whether a CUDA graph can capture a training step: no part of it waits for the GPU."""
        return False

    def layerwise(self) -> Layerwise | None:
        """Return the forward pass in evaluation mode as `Layerwise`; None if it cannot be split that way."""
        return None


@typed
class TappedLayer(nn.Module):
    """An attention layer that calls `show_attention` once in every run.

    `tap` reads and replaces the attention of all heads. `watch` only reads its mean over the heads, so fused
    kernels can still be used; with `ranked` it gets the scores, too. `limits` clip what the layer computes
    for each node, see `fgai.limit`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tap: Tap | None = None
        self.watch: Watch | None = None
        self.ranked = False
        self.limits: nn.ModuleDict | None = None

    def show_attention(self, attention: Tensor, adjacency: Adjacency, scores: Tensor | None = None) -> Tensor:
        """Call `tap` and `watch`, if set, and return the attention [E, H] to use; `scores` are [E, H]."""
        if self.tap is not None:
            ends = adjacency.source, adjacency.destination, adjacency.num_nodes
            compute = None if scores is None else lambda: scores
            attention = self.tap(attention, *ends, adjacency=adjacency, scores=compute)
        if self.watch is not None:
            ranks = None if scores is None or not self.ranked else mean_heads(scores)
            averaged = attention if attention.shape[1] == 1 else attention.mean(1, keepdim=True)
            self.watch(averaged, adjacency, ranks)
        return attention

    def new_limits(self) -> dict[str, Any]:
        """Return a dict of new `Limits`, one for each tensor that the layer computes per node."""
        raise AttentionError(f"{type(self).__name__} cannot be limited; define `new_limits` in its class")

    def apply_limits(self, name: str, values: Tensor) -> Tensor:
        """Return `values` [N, ...] clipped to the limits of this name; unchanged without limits."""
        return values if self.limits is None else self.limits[name](values)


@typed
class Wrapped(nn.Module):
    """A `model` and the function `call` that computes its logits; made by `fgai.wrap`."""

    layout: Any = None  # a `fgai.hetero.HeteroLayout`, in models of heterogeneous graphs only

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, data: Any) -> Tensor:
        """Return the model's output for a PyG `Data` or a `Graph`."""
        return self.call(self.model, data.to_data() if isinstance(data, Graph) else data)


def _layout_of(model: nn.Module) -> Any:
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


def graph_model(model: nn.Module) -> GraphModel | None:
    """Return the model, uncompiled, if it is a `GraphModel`; None if it is called as PyG's models are."""
    bare = uncompiled(model)
    return bare if isinstance(bare, GraphModel) else None


@typed
def stages_of(model: nn.Module) -> Layerwise | None:
    """Return `model.layerwise()`; None in training mode, with a tap or hook, or if it is no `GraphModel`."""
    own = graph_model(model)
    if own is None or own.training:
        return None
    with exclusive():  # waits for hooks that fgai sets in another thread
        for module in own.modules():
            if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)):
                return None
            if isinstance(module, TappedLayer) and module.tap is not None:
                return None
        return own.layerwise()


@typed
def originals(*models: Any) -> tuple[Any, ...]:
    """Return the models that `torch.compile` wrapped, others as they are; warn once if some are compiled."""
    # A compiled model would be compiled again for every graph of an attack.
    compiled = [model for model in models if isinstance(model, nn.Module) and uncompiled(model) is not model]
    if compiled:
        names = " and ".join(dict.fromkeys(map(model_name, compiled)))
        note = f"{names} is compiled; fgai uses the original module and returns models that are not compiled"
        warn(FgaiWarning(note))
    return tuple(uncompiled(model) if isinstance(model, nn.Module) else model for model in models)


@typed
def model_name(model: nn.Module) -> str:
    """Return the class name of a model, or of the model inside a wrapper."""
    return type(uncompiled(unwrapped(uncompiled(model)))).__name__


def _check_dtype(model: nn.Module, graph: Graph) -> None:
    """Raise `InputError` if features or values on edges differ from the parameters in dtype."""
    expected = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    for name, value, words in (
        ("x", graph.features, "features"),
        ("edge_attr", graph.edge_attr, "attributes of edges"),
        ("edge_weight", graph.edge_weight, "weights of edges"),
    ):
        if value is None or expected in (None, value.dtype):
            continue
        if name == "x" or value.dtype.is_floating_point:
            text = f"the {words} of {graph.name!r} are {value.dtype}, the parameters of {model_name(model)}"
            raise InputError(f"{text} {expected}; use `data.{name} = data.{name}.to({expected})`")


@contextmanager
def override(layer: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of this instance inside the block, then restore or delete it."""
    previous = layer.__dict__.get(name, _ABSENT)
    layer.__dict__[name] = value
    try:
        yield
    finally:
        if previous is _ABSENT:
            layer.__dict__.pop(name, None)
        else:
            layer.__dict__[name] = previous


@typed
@contextmanager
def evaluating(model: ModelT, *, freeze: bool = False) -> Iterator[ModelT]:
    """Put `model` in evaluation mode inside the block; restore `training` of every module afterwards.

    Gradients still flow to inputs and attention; with `freeze`, not to parameters. Other threads wait.
    """
    with exclusive():
        flags = [(module, module.training) for module in model.modules()]
        grads = [(parameter, parameter.requires_grad) for parameter in model.parameters()] if freeze else []
        was_training = model.training
        try:
            if any(flag for _, flag in flags):
                model.eval()
            for parameter, _ in grads:
                parameter.requires_grad_(False)
            yield model
        finally:
            if model.training != was_training:
                model.train(was_training)  # through the model's own `train`, which may do more
            for module, flag in flags:
                module.training = flag
            for parameter, grad in grads:
                parameter.requires_grad_(grad)


@typed
def duplicate(model: ModelT) -> ModelT:
    """Return a deep copy of a model; tensors it stores from its last forward pass are detached."""
    with exclusive():
        values = (value for module in model.modules() for value in vars(module).values())
        passing = [value for value in values if isinstance(value, Tensor) and not value.is_leaf]
        return copy.deepcopy(model, {id(value): value.detach().clone() for value in passing})
