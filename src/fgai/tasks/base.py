"""`Task`: everything that differs between nodes, links and graphs, `NodeTask`, and the tasks by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fgai.cache import cached_on
from fgai.checks import one_of
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.typed import typed

PARTS = ("train", "val", "test", "fit")
"""Parts of a split; `fit` is training and validation together."""
IMBALANCED = 0.7  # share of the labelled nodes in one class above which accuracy says little


class Task(ABC):
    """What is predicted on a graph.

    A model returns one row of logits for everything there is to classify: each node, each pair of nodes in
    `graph.links`, or each small graph of a batch. Training, attacks, metrics and certificates work on those
    rows; only the methods below depend on the task. Add a subclass of your own by `register_task`.
    """

    name: ClassVar[str]  # `node`, `link`, `graph` or another
    rows_are: ClassVar[str]  # what a row of the logits stands for, in words
    # name in records → metric, headline first: one of `METRICS`, or `class_auc`, `link_auc`, `link_precision`
    scores: ClassVar[Mapping[str, str]]
    selected_by: ClassVar[str | None] = None  # the score that chooses the epoch to keep; None for accuracy
    fixed_graph: ClassVar[bool] = True  # the same in every epoch, so that training steps can be captured
    row_per_node: ClassVar[bool] = False  # row i of the logits is the vector a model gives node i, unchanged
    row_per_graph: ClassVar[bool] = False  # a row is a small graph, pooled and with a budget of its own
    needs_links: ClassVar[bool] = False  # rows are the pairs in `graph.links`
    linear_read_out: ClassVar[str] = ""  # `product` or `mean` of nodes' vectors, for certificates; else empty
    checks_stability: ClassVar[bool] = False  # faithful training is checked by attacks on validation rows
    training: ClassVar[Mapping[str, Any]] = {}  # other defaults of `FaithfulSettings` and `HardenSettings`
    split_function: ClassVar[str] = "fgai.datasets.random_split"  # what makes a split, for error messages
    class_names: ClassVar[tuple[str, ...] | None] = None  # by number, where the task decides the classes

    @property
    def headline(self) -> str:
        """The name of the first score."""
        return next(iter(self.scores))

    def headline_for(self, graph: Graph) -> str:
        """The name of the score by which predictions on a graph are judged; the first by default."""
        return self.headline

    @abstractmethod
    def fits(self, graph: Graph) -> bool:
        """Whether this is what a graph is for."""

    def view(self, graph: Graph, targets: str) -> Graph:
        """Return the graph a model reads when `targets` are predicted; itself where it already is that."""
        return graph

    def epoch(self, graph: Graph, generator: torch.Generator) -> Graph:
        """Return the graph of one training epoch, with whatever is drawn anew."""
        return graph

    @abstractmethod
    def count(self, graph: Graph) -> int:
        """Rows of the logits."""

    @abstractmethod
    def rows(self, graph: Graph, targets: str) -> Tensor:
        """[T] the rows of a part of the split; all where there is no split."""

    @abstractmethod
    def labels(self, graph: Graph) -> Tensor | None:
        """[rows] classes, -1 where unknown, or None."""

    def nodes(self, graph: Graph, targets: str) -> Tensor:
        """The nodes that an attack on `targets` may join or change: by default those of the mask, or all."""
        mask = _node_mask(graph, targets)
        return (
            torch.arange(graph.num_nodes, device=graph.device) if mask is None else mask.nonzero().flatten()
        )

    @abstractmethod
    def rows_predicted_from(self, graph: Graph, nodes: Tensor) -> Tensor:
        """Bool [rows]: what is predicted from at least one of `nodes` (bool [N])."""

    @abstractmethod
    def row_of(self, graph: Graph) -> Tensor:
        """[N] the row that stands for each node, -1 where there is none."""

    def node_labels(self, graph: Graph) -> Tensor | None:
        """[N] classes of the rows that stand for the nodes, -1 where unknown, or None."""
        labels, row = self.labels(graph), self.row_of(graph)
        return None if labels is None else torch.where(row >= 0, labels[row], -1)

    def has_part(self, graph: Graph, targets: str) -> bool:
        """Whether the graph has this part of the split."""
        return _node_mask(graph, targets) is not None

    def out_channels(self, graph: Graph) -> int:
        """Width of a model's output for each node: by default the number of classes."""
        return graph.num_classes

    def read_out(self, nodes: Tensor, graph: Graph, **options: Any) -> Tensor:
        """Turn vectors of nodes [N, D] into the logits; for node tasks these are the vectors themselves.

        Models pass their options: `pooling` of small graphs (see `pool`), `decoder` of links (`dot` or
        `cosine`), and the pairs `links` [2, L] to decode instead of those of the graph, or None.
        """
        return nodes

    def edge_groups(self, graph: Graph, rowptr: Tensor) -> Tensor | None:
        """[groups + 1] offsets of edges ranked together; None: the incoming edges of each node."""
        return None

    def explanation_values(self, values: Tensor, graph: Graph, rows: Tensor) -> dict[str, Tensor]:
        """Turn values per layer and neighbourhood [layers, N] into values per explained row of `rows` [T].

        They are [layers, ·] by kind. `values` are per group of edges of `edge_groups`, if any. Empty where
        rows are nodes.
        """
        return {}


def _node_mask(graph: Graph, targets: str) -> Tensor | None:
    """Bool [N] of a part of the split, or None where the graph has none."""
    one_of(targets, "targets", PARTS)
    if targets == "fit":
        masks = [mask for mask in (graph.train_mask, graph.val_mask) if mask is not None]
        return torch.stack(masks).any(0) if masks else None
    mask: Tensor | None = getattr(graph, f"{targets}_mask")
    return mask


class NodeTask(Task):
    """Every node is classified; the split is one of nodes, and so is the reach of an attack."""

    name: ClassVar[str] = "node"
    rows_are: ClassVar[str] = "nodes"
    scores: ClassVar[Mapping[str, str]] = {name: name for name in ("f1", "balanced_accuracy", "macro_f1")}
    row_per_node: ClassVar[bool] = True
    checks_stability: ClassVar[bool] = True

    def headline_for(self, graph: Graph) -> str:
        """Balanced accuracy if one class has more than 70 % of all labelled nodes, else micro-F1."""
        balanced = "balanced_accuracy"
        return balanced if balanced in self.scores and _largest_share(graph) > IMBALANCED else self.headline

    def fits(self, graph: Graph) -> bool:
        """One graph, without links to predict."""
        return graph.links is None and graph.batch is None

    def count(self, graph: Graph) -> int:
        """N."""
        return graph.num_nodes

    def rows(self, graph: Graph, targets: str) -> Tensor:
        """The nodes of a mask; all nodes without one."""
        return super().nodes(graph, targets)

    def nodes(self, graph: Graph, targets: str) -> Tensor:
        """The same nodes."""
        return self.rows(graph, targets)

    def labels(self, graph: Graph) -> Tensor | None:
        """The nodes' classes."""
        return graph.y

    def rows_predicted_from(self, graph: Graph, nodes: Tensor) -> Tensor:
        """The nodes themselves."""
        return nodes

    def row_of(self, graph: Graph) -> Tensor:
        """The node's own."""
        return torch.arange(graph.num_nodes, device=graph.device)


def _largest_share(graph: Graph) -> float:
    """Share of the most frequent class among all nodes whose class is known; 0 if none is."""

    def share() -> float:
        labels = torch.zeros(0) if graph.y is None else graph.y[graph.y >= 0]
        return float(torch.bincount(labels).max()) / labels.numel() if labels.numel() else 0.0

    return cached_on(graph, "fgai.tasks.node", share)


TASKS: dict[str, Task] = {}


@typed
def register_task(task: Task) -> Task:
    """Add a task by its name to models, datasets, training, evaluation and the command line, and return it.

    Of several tasks that fit a graph, the one registered last is taken. `InputError` if the name is taken, or
    there is nothing to score it by.
    """
    if task.name in TASKS:
        raise InputError(f"the task {task.name!r} exists already; choose another name")
    if not task.scores:
        raise InputError(f"the task {task.name!r} needs `scores`: at least one name and its function")
    TASKS[task.name] = task
    return task


@typed
def get_task(name: str) -> Task:
    """Return a task by its name."""
    return TASKS[one_of(name, "task", tuple(TASKS))]


@typed
def task_of(graph: Graph) -> Task:
    """Return the task a graph is for: links if it carries some, graphs if it is a batch, nodes otherwise."""
    for task in reversed(TASKS.values()):
        if task.fits(graph):
            return task
    raise InputError(f"{graph.name!r} fits none of the tasks {', '.join(TASKS)}")


@typed
def check_logits(logits: Tensor, graph: Graph) -> None:
    """Raise `InputError` unless logits have a row for everything to classify and a column per class."""
    task = task_of(graph)
    rows, classes = task.count(graph), graph.num_classes
    if logits.dim() == 2 and logits.shape[0] == rows and logits.shape[1] >= classes:
        return
    labels = task.labels(graph)
    labelled = None if labels is None else labels[labels >= 0]
    lowest = 0 if labelled is None or not labelled.numel() else int(labelled.min())
    hint = f"; labels begin at {lowest}, classes are counted from 0: use `y - {lowest}`" if lowest else ""
    text = f"the model must return logits [{rows}, {max(2, classes)}] on {graph.name!r}"
    raise InputError(f"{text}, got {tuple(logits.shape)}{hint}")
