"""`AttentionModel`, the base of fgai's models, and `MODELS`, the models by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

from torch import Tensor, nn

from fgai.attention import GraphModel
from fgai.cache import cached_on
from fgai.checks import one_of
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.graph.fields import VALUES, arguments_from_data
from fgai.graph.on_disk import GraphOnDisk
from fgai.ops import dropout
from fgai.sparse import Features
from fgai.tasks import DECODERS, POOLINGS, get_task, task_of
from fgai.typed import typed

LARGE = 100_000  # from this many nodes on, models have the paper's arXiv sizes (three layers, width 128)
Guard = Callable[[Tensor | Features, Graph], Tensor | None]  # (input of a layer, graph) → edge weights [E]


@dataclass(frozen=True)
class Capabilities:
    """The class attribute `capabilities` of a model: what certificates and conversions may assume about it.

    A class that sets it, even to `Capabilities()`, promises that its forward pass in evaluation mode depends
    on weights and graph only, and consists of layers of fgai and PyTorch and of `parts`. Not inherited.

    Attributes:
        body: `"layers"`, as in `GAT`: `convs` are `AttentionLayer`s with ELU between them and nothing else.
            `"blocks"`, as in `GT`: `enter` maps inputs row by row, `blocks` are those of `GT`, and `head` is
            linear, ReLU, linear. Empty: neither.
        parts: classes of modules that the model defines itself.
    """

    body: str = ""
    parts: tuple[type[nn.Module], ...] = ()


@typed
def capabilities_of(kind: type[nn.Module]) -> Capabilities | None:
    """Return the `capabilities` that this class of models sets itself, or None."""
    capabilities = vars(kind).get("capabilities")
    return capabilities if isinstance(capabilities, Capabilities) else None


def _arguments(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor from its `locals()`, to store as `config`."""
    return {name: value for name, value in scope.items() if name not in ("self", "__class__")}


def _mlp_head(width: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, out_channels))


@typed
def body_of(model: nn.Module) -> str:
    """Return `body` of the model's capabilities; empty if its class sets none."""
    capabilities = capabilities_of(type(model))
    return "" if capabilities is None else capabilities.body


@typed
class AttentionModel(GraphModel, ABC):
    """Base of fgai's models: `embed` computes node embeddings, `read_out` turns them into the task's logits.

    A subclass defines `embed` at least. Task `node` gives logits [N, out]. `link` gives logits [L, 2] for the
    pairs in `graph.links`, from the `dot` product of two embeddings or ten times their `cosine` (`decoder`);
    without links, embeddings. `graph` pools each small graph by `mean` or `max` and gives logits [G, out].
    `config` holds the constructor's arguments, enough to build the model again. `guard` computes the edge
    weights of each layer; if it is None, layers use those of the graph.
    """

    forward_parts: ClassVar[frozenset[str]] = frozenset(
        {"forward", "embed", "convolve", "edge_weight", "read_out"}
    )
    self_loops: ClassVar[bool] = True
    config: dict[str, Any]

    def __init__(self, *, task: str = "node", pooling: str = "mean", decoder: str = "dot") -> None:
        super().__init__()
        self.task = get_task(task).name
        self.pooling = one_of(pooling, "pooling", POOLINGS)
        self.guard: Guard | None = None
        self.decoder = one_of(decoder, "decoder", DECODERS)

    @classmethod
    def for_data(cls, data: Any, **overrides: Any) -> Self:
        """Build a model for `data` (a `Graph` or PyG `Data`); `overrides` replace sizes and task found in it.

        `InputError` if the data has no features or, for node and graph tasks, no labels.
        """
        graph = as_graph(data)
        cls.check_edges(graph)
        if graph.features is None:
            raise InputError(f"{graph.name!r} has no node features; give `data.x`, e.g. node degrees")
        task = overrides.get("task", task_of(graph).name)
        if get_task(task).out_channels(graph) < 2 and "out_channels" not in overrides:
            raise InputError(f"{graph.name!r} has no labels of two classes; give `data.y` or `out_channels`")
        return cls(**{**cls.sizes(graph, task), **overrides})

    @classmethod
    def sizes(cls, graph: Graph, task: str) -> dict[str, Any]:
        """Return the constructor arguments that depend on the data; `for_data` passes them."""
        out = get_task(task).out_channels(graph)
        return {"in_channels": graph.num_features, "out_channels": out, "task": task}

    def prepare(self, graph: Graph) -> Graph:
        """Return `graph` with self-loops, if the model needs them."""
        if self.self_loops and not graph.has_loops:
            return graph.derived("self-loops", lambda clean: clean.add_self_loops()[0])
        return graph

    @property
    def can_capture(self) -> bool:
        """Whether a CUDA graph can capture training; not with a guard, which may wait for the GPU."""
        return self.guard is None

    @property
    def streams(self) -> bool:
        """Whether the model can run on a graph on disk row by row: `prepare` adds self-loops at most."""
        return type(self).prepare is AttentionModel.prepare

    @property
    def is_rowwise(self) -> bool:
        """Whether nodes interact only in attention layers: logits are per node, and there is no guard."""
        return get_task(self.task).row_per_node and self.guard is None

    def edge_weight(self, x: Tensor | Features, graph: Graph) -> Tensor | None:
        """Return the edge weights [E] of the layer whose input is `x`; None if all are 1."""
        return graph.edge_weight if self.guard is None else self.guard(x, graph)

    def convolve(
        self, convs: Iterable[nn.Module], graph: Graph, activation: Callable[[Tensor], Tensor], p: float
    ) -> Tensor:
        """Pass features [N, F] through layers: dropout `p` before each, `activation` between them."""
        x: Tensor | Features = _as_features(graph)
        for index, conv in enumerate(convs):
            if index:
                x = activation(x)  # type: ignore[arg-type]
            weight = self.edge_weight(x, graph)
            if self.training and p > 0:
                x = dropout(x, p)
            x = conv(x, graph.adjacency, weight)
        return x  # type: ignore[return-value]

    @abstractmethod
    def embed(self, graph: Graph) -> Tensor:
        """Return the node embeddings [N, out] of a prepared graph."""

    def check_graph(self, graph: Graph) -> None:
        """Raise `InputError` if the model cannot read the features, `edge_attr` or `edge_weight`."""
        self._check_width(graph)
        super().check_graph(graph)
        weight = graph.edge_weight
        if weight is not None and cached_on(graph, "fgai.models.base", lambda: bool((weight < 0).any())):
            text = f"`edge_weight` of {graph.name!r} must be at least 0 for {type(self).__name__}, got"
            raise InputError(f"{text} {float(weight.min()):.4g}; shift it, or set `data.edge_weight = None`")

    def _check_width(self, graph: Graph) -> None:
        width = self.config["in_channels"]
        if graph.features is None or graph.num_features != width:
            text = f"the model reads {width} features per node, {graph.name!r} has {graph.num_features}"
            raise InputError(f"{text}; use the data it was trained on, or a new model (`for_data`)")

    def forward(
        self,
        graph: Any,
        links: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        edge_index: Tensor | None = None,
    ) -> Tensor:
        """Return logits: [N, out] for nodes, [L, 2] for the graph's links, [G, out] for graphs.

        Call `model(graph)`, or, more slowly, `model(data)` or `model(x, edge_index, batch)` as in PyG.
        `model(graph, links)` returns the scores [L] of other pairs `links` [2, L].
        """
        if not isinstance(graph, Graph):
            edges = edge_index if links is None else links
            graph, links = _graph_of(graph, edges, batch), None
            self.check_graph(graph)
        self._check_width(graph)  # dtypes and weights are checked once, by `prepared`
        self.check_edges(graph)
        return self.read_out(self.embed(self.prepare(graph)), graph, links)

    def read_out(self, nodes: Tensor, graph: Graph, links: Tensor | None = None) -> Tensor:
        """Turn node embeddings into the task's logits."""
        return get_task(self.task).read_out(
            nodes, graph, pooling=self.pooling, decoder=self.decoder, links=links
        )


@typed
def as_graph(data: Any) -> Graph:
    """Return `data`, a `Graph` or a PyG `Data`, as a `Graph`; raise `InputError` for anything else."""
    if isinstance(data, Graph):
        return data
    if hasattr(data, "edge_index"):
        return Graph.from_data(data)
    if isinstance(data, GraphOnDisk):
        text = f"{data.name!r} is on disk, but this function needs it in memory; give `stored.load()`, or use"
        raise InputError(f"{text} `evaluate_store`, or `batch_size` in `train`, `make_faithful` and `harden`")
    kind = type(data).__name__
    hint = "; see `fgai.hetero.HeteroView`" if kind == "HeteroData" else ""
    raise InputError(f"`data` must be an fgai Graph or a PyG Data, got {kind}{hint}")


def _graph_of(data: Any, edge_index: Tensor | None, batch: Tensor | None) -> Graph:
    if isinstance(data, Tensor):
        if edge_index is None:
            raise InputError("`edge_index` is missing; use model(graph), model(data) or model(x, edge_index)")
        return Graph.from_edges(edge_index, data.shape[0], data, batch=batch)
    arguments = arguments_from_data(data)
    read = {name: arguments[name] for name in ("edge_index", "num_nodes", "features", *VALUES)}
    return Graph.from_edges(**read, batch=getattr(data, "batch", None))


def _as_features(graph: Graph) -> Features:
    if not isinstance(graph, Graph):
        kind = type(graph).__name__
        raise InputError(f"`graph` must be a prepared `Graph`, got {kind}; call `model(data)` instead")
    if graph.features is None:
        raise InputError(f"{graph.name!r} has no node features; give `data.x`")
    return graph.features


K = TypeVar("K", bound=type[AttentionModel])

MODELS: dict[str, type[AttentionModel]] = {}  # models by class name


@typed
def register_model(kind: K) -> K:
    """Register a model class under its name; use it as a decorator.

    The model can then be built, trained, saved and loaded by name, like fgai's own. The constructor takes
    `in_channels`, `out_channels` and keyword arguments and stores them in `config`; `sizes` returns those
    that depend on the data. Running a definition again replaces the class. `InputError` if a class of another
    module has the name, or it is no subclass of `AttentionModel`.
    """
    if not isinstance(kind, type) or not issubclass(kind, AttentionModel):
        raise InputError(f"`kind` must be a subclass of `fgai.models.AttentionModel`, got {kind!r}")
    name = kind.__name__
    other = MODELS.get(name, kind)
    if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
        raise InputError(f"{name!r} is already {other.__module__}.{other.__qualname__}; rename the class")
    MODELS[name] = kind
    return kind
