"""Graph classification: a row of logits for every small graph of a block-diagonal batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fgai.checks import one_of, whole
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.graph.fields import FILL
from fgai.sparse import Adjacency
from fgai.sparse.adjacency import pointers
from fgai.sparse.valid import LARGEST, check_index
from fgai.tasks.base import Task, _node_mask
from fgai.typed import typed

POOLINGS = ("mean", "max")


class GraphTask(Task):
    """Whole graphs are classified; masks are those of their nodes, constant inside each graph.

    A model in training sees the graphs for training and validation only; under test, those of the test part.
    An attack joins each new node to nodes of one graph.
    """

    name: ClassVar[str] = "graph"
    rows_are: ClassVar[str] = "graphs"
    scores: ClassVar[Mapping[str, str]] = {"accuracy": "accuracy", "roc_auc": "class_auc"}
    row_per_graph: ClassVar[bool] = True
    linear_read_out: ClassVar[str] = "mean"
    training: ClassVar[Mapping[str, Any]] = {"nodes": 1, "edges": 3, "k": 2}  # a graph has few nodes
    split_function: ClassVar[str] = "fgai.datasets.fold_split"

    def fits(self, graph: Graph) -> bool:
        """A batch, without links to predict."""
        return graph.batch is not None and graph.links is None

    def view(self, graph: Graph, targets: str) -> Graph:
        """The small graphs of a part alone."""
        rows = self.rows(graph, targets)
        return graph if rows.numel() == graph.num_graphs else _take_graphs(graph, rows)

    def count(self, graph: Graph) -> int:
        """G."""
        return graph.num_graphs

    def rows(self, graph: Graph, targets: str) -> Tensor:
        """The small graphs of a part; all without a split."""
        mask = _node_mask(graph, targets)
        if mask is None:
            return torch.arange(graph.num_graphs, device=graph.device)
        graphs: Tensor = torch.unique(_batch_of(graph)[mask])
        return graphs

    def labels(self, graph: Graph) -> Tensor | None:
        """The graphs' classes."""
        return graph.graph_y

    def rows_predicted_from(self, graph: Graph, nodes: Tensor) -> Tensor:
        """Graphs with at least one of `nodes`."""
        out = torch.zeros(graph.num_graphs, dtype=torch.bool, device=graph.device)
        out[_batch_of(graph)[nodes.nonzero().flatten()]] = True
        return out

    def row_of(self, graph: Graph) -> Tensor:
        """The node's graph."""
        return _batch_of(graph)

    def read_out(self, nodes: Tensor, graph: Graph, *, pooling: str = "mean", **_: Any) -> Tensor:
        """Mean or maximum over the nodes of each graph, [G, D]."""
        return pool(nodes, graph.batch, graph.num_graphs, pooling)

    def edge_groups(self, graph: Graph, rowptr: Tensor) -> Tensor | None:
        """[G+1] where the edges of each small graph begin, the nodes of a batch standing graph by graph."""
        return rowptr[pointers(_batch_of(graph), graph.num_graphs)]

    def explanation_values(self, values: Tensor, graph: Graph, rows: Tensor) -> dict[str, Tensor]:
        """`graphs`: the values of the graphs asked for."""
        return {"graphs": values[:, rows]}


def _batch_of(graph: Graph) -> Tensor:
    if graph.batch is None:
        raise InputError(f"{graph.name!r} is one graph, not a batch of several; give `batch`")
    return graph.batch


def _take_graphs(graph: Graph, rows: Tensor) -> Graph:
    """Return a batch of the small graphs with these numbers [R], in their old order."""
    if not rows.numel():
        raise InputError(f"a part of the split of {graph.name!r} holds no graphs")
    batch, features = _batch_of(graph), graph.features
    if features is not None and (features.appended is not None or features.delta is not None):
        raise InputError("small graphs are taken from a batch as loaded, not from a perturbed one")
    chosen = torch.zeros(graph.num_graphs, dtype=torch.bool, device=graph.device)
    chosen[rows] = True
    keep = chosen[batch]
    nodes = keep.nonzero().flatten()
    new_node, new_graph = keep.long().cumsum(0) - 1, chosen.long().cumsum(0) - 1
    edges = keep[graph.adjacency.destination].nonzero().flatten()
    source, destination = new_node[graph.edge_index[:, edges]]
    node_fields = ("y", "train_mask", "val_mask", "test_mask", "positional", "positional_values")
    indices = dict.fromkeys(node_fields, nodes) | dict.fromkeys(FILL, edges)
    fields = {n: None if getattr(graph, n) is None else getattr(graph, n)[i] for n, i in indices.items()}
    return Graph(
        Adjacency.from_sorted(source, destination, nodes.numel()),
        None if features is None else features.take(nodes),
        batch=new_graph[batch[nodes]],
        graph_y=None if graph.graph_y is None else graph.graph_y[chosen],
        name=graph.name,
        **fields,
    )


@typed
def pool(nodes: Tensor, batch: Tensor | None, num_graphs: int, how: str) -> Tensor:
    """Mean or maximum of `nodes` [N, D] over each small graph → [G, D]; a graph without nodes gives zeros."""
    whole(num_graphs, "num_graphs", 0, LARGEST)
    if nodes.dim() != 2 or not nodes.is_floating_point():
        got = f"{nodes.dtype} {tuple(nodes.shape)}"
        raise InputError(f"`nodes` must be floating-point of shape [nodes, width], got {got}")
    if batch is None:
        batch = torch.zeros(nodes.shape[0], dtype=torch.long, device=nodes.device)
    elif batch.shape != nodes.shape[:1] or batch.dtype != torch.int64:
        got = f"{batch.dtype} {tuple(batch.shape)}"
        raise InputError(f"`batch` must be one graph number per node (torch.long), got {got}")
    else:
        check_index(batch, num_graphs, "batch")
    if one_of(how, "pooling", POOLINGS) == "mean" and nodes.is_cuda:
        # Sums over sorted rows: the same from run to run, which adding in any order is not.
        ordered, order = torch.sort(batch, stable=True)
        bounds = pointers(ordered, num_graphs)
        rows = nodes.index_select(0, order)
        total = torch.segment_reduce(rows, "sum", offsets=bounds, initial=0.0, unsafe=True)
        return total / bounds.diff().clamp(min=1)[:, None]
    if how == "mean":
        total = nodes.new_zeros(num_graphs, nodes.shape[1]).index_add(0, batch, nodes)
        return total / torch.bincount(batch, minlength=num_graphs).clamp(min=1)[:, None]
    index = batch[:, None].expand_as(nodes)
    out = nodes.new_zeros(num_graphs, nodes.shape[1])
    return out.scatter_reduce(0, index, nodes, "amax", include_self=False)
