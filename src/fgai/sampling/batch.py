"""`MiniBatch`: a sample as a graph of its own, whose nodes and edges are known in the whole graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fgai.errors import InputError
from fgai.graph import Graph
from fgai.sampling.sample import Sample
from fgai.sparse import Adjacency, Features, SparseRows, match_edges
from fgai.store import StoredGraph
from fgai.store.manifest import EDGE_ARRAYS, NODE_ARRAYS
from fgai.store.stored import gather_rows
from fgai.typed import typed


@typed
@dataclass(frozen=True, eq=False)
class MiniBatch:
    """A part of a graph around some nodes.

    Attributes:
        graph: nodes in the order of `nodes`, edges sorted as in every `Graph`. Edges drawn twice are there
            twice.
        nodes: [n] by number in the whole graph; the first `num_seeds` are the seeds.
        edges: [e] position in the whole graph of each edge of `graph`.
        num_seeds: nodes whose output is meant; the others are there for it.
        trees: [n] the seed each node was drawn for, where trees are disjoint; else None.
    """

    graph: Graph
    nodes: Tensor
    edges: Tensor
    num_seeds: int
    trees: Tensor | None = None

    @property
    def seeds(self) -> Tensor:
        """[B] the seeds by number in the whole graph."""
        return self.nodes[: self.num_seeds]

    def match(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return where edges of the batch are in the whole graph, and where in `keys`.

        With `whole, here = batch.match(layer.keys)`, the row `layer.values[here]` belongs to the edges
        `whole` of the whole graph. Self-loops that a model added are in neither.

        Args:
            keys: [K] of edges of the batch's graph, sorted: those of a layer's attention.

        Raises:
            AttentionError: an edge is there twice, as draws with replacement may have it.
        """
        ours, theirs = match_edges(self.graph.keys, keys)
        return self.edges[ours], theirs


@typed
def mini_batch(graph: Graph | StoredGraph, sample: Sample) -> MiniBatch:
    """Put a sample together with the features, labels, masks and edge values of its nodes and edges.

    Of a stored graph only these are read.

    Args:
        graph: the whole graph.
        sample: drawn from it.

    Raises:
        InputError: the whole graph has positional encodings, links or small graphs, which a part of it cannot
            keep; or the sample is of another graph.

    Example:
        >>> from fgai.datasets import planted
        >>> from fgai.sampling import NeighbourSampler
        >>> data = planted()
        >>> batch = mini_batch(data, NeighbourSampler(data, [3, 2]).sample(torch.tensor([7, 5])))
        >>> batch.seeds.tolist(), torch.equal(batch.graph.y, data.y[batch.nodes])
        ([7, 5], True)
    """
    _check(graph, sample)
    ends = torch.stack([sample.row, sample.column])
    adjacency, order = Adjacency.build(ends, len(sample.nodes))
    edges = sample.edges[order]
    read = _from_store if isinstance(graph, StoredGraph) else _from_graph
    features, fields = read(graph, sample.nodes, edges)  # type: ignore[arg-type]
    part = Graph(adjacency, features, name=graph.name, **fields)
    return MiniBatch(part, sample.nodes, edges, sample.nodes_per_hop[0], sample.trees)


def _check(graph: Graph | StoredGraph, sample: Sample) -> None:
    kept = (
        (graph.positional, graph.batch, graph.links, graph.entry_values) if isinstance(graph, Graph) else ()
    )
    if any(part is not None for part in kept):
        raise InputError(
            f"{graph.name!r} has positional encodings, small graphs, links or `entry_values`, which a"
            " mini-batch does not keep; give the graph as it was before the model prepared it"
        )
    inside = (sample.nodes, graph.num_nodes), (sample.edges, graph.num_edges)
    if any(index.numel() and int(index.max()) >= count for index, count in inside):
        raise InputError(f"`sample` must be drawn from {graph.name!r}; it names what is not there")


def _from_store(stored: StoredGraph, nodes: Tensor, edges: Tensor) -> tuple[Features | None, dict[str, Any]]:
    rows, places = nodes.numpy(), edges.numpy()
    return stored.features(rows), {**stored.node_fields(rows), **stored.edge_fields(places)}


def _from_graph(graph: Graph, nodes: Tensor, edges: Tensor) -> tuple[Features | None, dict[str, Any]]:
    fields = {
        name: value[places]
        for names, places in ((NODE_ARRAYS, nodes), (EDGE_ARRAYS, edges))
        for name in names
        if (value := getattr(graph, name)) is not None
    }
    given = graph.features
    if given is None or not isinstance(given.base, SparseRows) or given.appended is not None:
        return None if given is None else Features.dense(given.to_dense()[nodes]), fields
    base = given.base
    indptr, indices, values = (part.detach().numpy() for part in (base.indptr, base.indices, base.values))
    return gather_rows(indptr, indices, values, nodes.numpy(), base.num_columns), fields
