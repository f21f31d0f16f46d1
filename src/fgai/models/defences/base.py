"""`Defended`: a model behind a defence that re-weights its edges, attacked and trained as one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

from torch import Tensor, nn

from fgai.attention import TappedLayer
from fgai.checks import one_of
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models.base import MODELS, AttentionModel, as_graph, register
from fgai.typed import typed

DefendedT = TypeVar("DefendedT", bound="type[Defended]")


@typed
class Defended(AttentionModel):
    """Base of the defences: a model whose edges are re-weighted before, or while, it reads the graph.

    The defence is part of the forward pass, done again on every graph the model is given, so whoever attacks
    the model attacks the defence. Weights enter GCN as edge weights, attention as log-weights on the score.

    Args:
        in_channels: features per node.
        out_channels: classes.
        base: name of the model behind, see `fgai.models.MODELS`.
        **arguments: of that model.
    """

    own: ClassVar[tuple[str, ...]] = ()
    """Names of the settings of the defence itself."""

    def __init__(self, in_channels: int, out_channels: int, *, base: str = "GAT", **arguments: Any) -> None:
        kind: Any = MODELS[one_of(base, "base", tuple(MODELS))]
        model: AttentionModel = kind(in_channels, out_channels, **arguments)
        super().__init__(task=model.task, pooling=model.pooling, decoder=model.decoder)
        self.model = model
        self.config = {"base": base, **model.config}

    @classmethod
    def for_data(cls, data: Any, **overrides: Any) -> Self:
        """Build a defended model whose sizes fit `data`; `overrides` are its own settings or the model's."""
        graph = as_graph(data)
        mine = {name: overrides.pop(name) for name in list(overrides) if name in cls.own}
        base = overrides.pop("base", "GAT")
        model = MODELS[one_of(base, "base", tuple(MODELS))].for_data(graph, **overrides)
        made = cls(**{**model.config, "base": base, **mine})
        made.see(made.prepare(graph))
        return made

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the defence's own settings where none are given."""
        found = inspect.signature(cls.__init__).parameters
        return {name: found[name].default for name in cls.own}

    def see(self, graph: Graph) -> None:
        """Note what the defence needs to know of the graph it will be trained on."""

    def terms(self, graph: Graph) -> dict[str, Tensor]:
        """What the defence adds to the loss, each a scalar; nothing by default."""
        return {}

    def weights(self, graph: Graph) -> Tensor:
        """Return the weights [E] the defence gives the edges of a prepared graph before the first layer."""
        raise TypeError("abstract")

    def prepare(self, graph: Graph) -> Graph:
        """Return `graph` as the model behind reads it."""
        return self.model.prepare(graph)

    def embed(self, graph: Graph) -> Tensor:
        """Return the embeddings [N, out] of the re-weighted graph."""
        return self.model.embed(graph.replace(edge_weight=self.weights(graph)))

    def read_out(self, nodes: Tensor, graph: Graph, links: Tensor | None = None) -> Tensor:
        """Turn node embeddings into the task's logits."""
        return self.model.read_out(nodes, graph, links)


DEFENCES: dict[str, type[Defended]] = {}
"""Defences by the name of the training method."""


@typed
def register_defence(method: str) -> Callable[[DefendedT], DefendedT]:
    """Make a defence known by the name of the method that trains it; a decorator, see `register_model`."""

    def registered(kind: DefendedT) -> DefendedT:
        register(kind, method, DEFENCES)
        return kind

    return registered


def attention_layers(model: nn.Module) -> int:
    """How many layers with attention a model has."""
    count = sum(isinstance(module, TappedLayer) for module in model.modules())
    if not count:
        raise InputError(f"{type(model).__name__} has no attention layer to guard")
    return count
