"""What can be done with a model: fgai's own, called on a graph, and any PyG model, behind one interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from fgai.alone import alone
from fgai.attention.calls import call_with, check_rows, fields_of
from fgai.attention.contact import check_dtype, first_contact
from fgai.attention.layerwise import Layerwise
from fgai.attention.tapped import TappedLayer
from fgai.attention.wrapped import Wrapped, model_name, uncompiled
from fgai.errors import FgaiError, InputError
from fgai.graph import Graph
from fgai.tasks import link_logits
from fgai.typed import typed


class GraphModel(nn.Module):
    """Base of models that are called as `model(graph)` and read features and edge weights from the graph.

    What else such a model can do it says by overriding what stands here.

    Attributes:
        reads_edge_attr: whether it reads `edge_attr` of the graph, too; graphs that have some are refused
            otherwise.
        forward_parts: names of the methods that make up the forward pass. A subclass that changes one of them
            must define `layerwise` again beside it; otherwise it has no stages.
    """

    reads_edge_attr: ClassVar[bool] = False
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
        """Raise if the model cannot read this graph.

        Raises:
            InputError: the features are of another type than the parameters, or edges have attributes that
                it does not read.
        """
        self.check_edges(graph)
        check_dtype(self, graph)

    @classmethod
    def check_edges(cls, graph: Graph) -> None:
        """Raise if the edges have attributes, and models of this class do not read them.

        Raises:
            InputError: they have; says what to do.
        """
        if graph.edge_attr is not None and not cls.reads_edge_attr:
            raise InputError(
                f"{cls.__name__} does not read `edge_attr`, which {graph.name!r} has; use a model of PyG"
                " layers with `edge_dim`, or set `data.edge_attr = None`"
            )

    def prepare(self, graph: Graph) -> Graph:
        """Return `graph` as this model reads it; itself where it already is so."""
        return graph

    @property
    def can_capture(self) -> bool:
        """Whether a training step runs without waiting for the device, so that CUDA graphs can hold it."""
        return False

    def layerwise(self) -> Layerwise | None:
        """Return the forward pass in evaluation mode as stages; None if it is not so made."""
        return None


class ModelAdapter(Protocol):
    """What the rest of fgai does with a model; `adapter_of` finds the adapter."""

    @property
    def reads_weights(self) -> bool:
        """Whether the model reads the edge weights of a graph."""

    def prepare(self, graph: Graph) -> Graph:
        """Return `graph` on the model's device with what the model wants added; itself where it is so."""

    def call(self, graph: Graph) -> Tensor:
        """Return the logits: a row per node [N, C], per link [L, 2] or per small graph [G, C]."""

    @property
    def can_capture(self) -> bool:
        """Whether training steps can be captured in CUDA graphs."""

    def layerwise(self) -> Layerwise | None:
        """Return what the model now does as stages, for partial recomputation; None if it cannot be."""


@dataclass(frozen=True)
class GraphModelAdapter:
    """Of a `GraphModel`.

    Attributes:
        model: as given, to be called.
        bare: the same, not compiled.
    """

    model: nn.Module
    bare: GraphModel
    reads_weights: bool = True

    def prepare(self, graph: Graph) -> Graph:
        """Return `graph` as the model reads it, on its device, once it is known to be readable."""
        self.bare.check_graph(graph)
        return self.bare.prepare(graph).to(device_of(self.model, graph))

    def call(self, graph: Graph) -> Tensor:
        """Return `model(graph)`."""
        return _tensor(self.model(graph), self.model)

    @property
    def can_capture(self) -> bool:
        """As the model says."""
        return self.bare.can_capture

    def layerwise(self) -> Layerwise | None:
        """As the model says; None in training mode and while attention is tapped or hooks are set."""
        if self.bare.training:
            return None
        with alone():  # hooks that fgai sets in another thread are gone by then
            for module in self.bare.modules():
                if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)):
                    return None
                if isinstance(module, TappedLayer) and module.tap is not None:
                    return None
            return self.bare.layerwise()


@dataclass(frozen=True)
class PyGAdapter:
    """Of any other model, called as `model(x, edge_index)`; it adds self-loops itself if it wants them.

    What else the graph has (`edge_attr`, `edge_weight`, `batch`) goes to the arguments of these names, see
    `fgai.attention.calls`; a model that is called otherwise is wrapped, see `fgai.wrap`. On a graph with
    links it must return embeddings [N, D], whose dot products are the scores; on a batch of small graphs a
    row per small graph. Values per node (positional encodings) belong into `x`, values per edge into
    `edge_attr`: edges are sorted, and attacks add some, so that values a model keeps itself would meet other
    edges. Whoever keeps some is refused, see `first_contact`.

    Attributes:
        model: as given.
    """

    model: nn.Module
    reads_weights: bool = False
    can_capture: bool = False

    def prepare(self, graph: Graph) -> Graph:
        """Return `graph` on the model's device, once the model is known to answer here as it does by itself.

        Raises:
            InputError: it does not, see `first_contact`.
        """
        graph = graph.to(device_of(self.model, graph))
        first_contact(self.model, graph, lambda order: self._outputs(graph, order))
        return graph

    def call(self, graph: Graph) -> Tensor:
        """Return the logits; features [N, F] are made dense.

        Raises:
            InputError: the graph has no features, or the model failed on it or would not see what it has.
        """
        outputs = self._outputs(graph)
        if graph.batch is not None or graph.links is None:
            return outputs
        return link_logits(outputs, graph.links.pairs)

    def _outputs(self, graph: Graph, order: Tensor | None = None) -> Tensor:
        """Return what the model says when the edges of `graph` come in this order."""
        fields = fields_of(graph, order)
        try:
            outputs = call_with(self.model, fields)
        except (FgaiError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in fields.items())
            raise InputError(
                f"{model_name(self.model)} failed on {graph.name!r} with {shapes}: {error}; check how it is"
                " called, how many features it reads, and that it keeps nothing per node or edge"
            ) from error
        outputs = _tensor(outputs, self.model)
        if isinstance(uncompiled(self.model), Wrapped):
            check_rows(outputs, graph, self.model)
        return outputs

    def layerwise(self) -> Layerwise | None:
        """None: what lies between the layers is not known."""
        return None


@typed
def adapter_of(model: nn.Module) -> ModelAdapter:
    """Return the adapter of a model: that of `GraphModel` for fgai's own, compiled or not, else PyG's."""
    bare = uncompiled(model)
    return GraphModelAdapter(model, bare) if isinstance(bare, GraphModel) else PyGAdapter(model)


@typed
def prepared(model: nn.Module, graph: Graph) -> Graph:
    """Return `graph` on the model's device, with what the model wants added (self-loops, encodings).

    A graph that is so already is returned as it is.
    """
    return adapter_of(model).prepare(graph)


def device_of(model: nn.Module, graph: Graph) -> torch.device:
    """Return the device of a model's parameters; that of the graph if it has none."""
    held = next(model.parameters(), None)
    return graph.device if held is None else held.device


def _tensor(output: object, model: nn.Module) -> Tensor:
    if isinstance(output, Tensor):
        return output
    raise InputError(
        f"{model_name(model)} must return one tensor of logits, got {type(output).__name__}; say where"
        " they are: `fgai.wrap(model, call=lambda m, g: m(g.x, g.edge_index)[0])`"
    )
