"""`NeighbourSampler`: neighbours drawn hop by hop, the same ones whoever draws them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.neighbor_sampler import edge_sample

from fgai import checks
from fgai.alone import seeded
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.graph.pyg_data import arguments_from_data
from fgai.sampling import kernels
from fgai.sampling.sample import GrowingSample, Ints, Sample
from fgai.sparse import Adjacency
from fgai.store import StoredGraph
from fgai.store.stored import Rows
from fgai.typed import typed

_ORDER, _BATCH = 1, 2
"""What draws are for: batches of different kinds never share any."""


@typed
class NeighbourSampler(BaseSampler):  # type: ignore[misc]
    """Draw neighbours of some nodes, neighbours of those, and so on: a mini-batch for as many layers.

    What is drawn depends on `seed`, `epoch` and the seeds of the batch, and on nothing else: not on the
    number of workers, not on other batches. With `disjoint` it depends on each seed alone. Edges are known by
    their position in the whole graph, so what is said of an edge in a batch is said of that edge.

    Works in PyG's loaders (`NodeLoader(data, node_sampler=sampler)`, `LinkLoader`) without pyg-lib and
    torch-sparse; `fgai.sampling.Batches` gives fgai's own graphs.

    Args:
        graph: a `Graph`, a `StoredGraph` (memory-mapped), or a PyG `Data`, whose edges keep their order.
        fan_out: neighbours per node in each hop, the seeds' first; -1 takes all of them. One per layer of the
            model.
        replace: draw with replacement: each node has exactly `fan_out` edges then, perhaps some twice.
        disjoint: draw a tree of its own for every seed; nodes that several seeds reach come several times.
        seed: of the draws.

    Attributes:
        epoch: enters every draw; set it before each pass over the data. Workers that live on see it, too.

    Raises:
        InputError: `fan_out` holds 0, or `graph` is none.

    Example:
        >>> import torch
        >>> star = Graph.from_edges(torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]]), 5)
        >>> sample = NeighbourSampler(star, [2]).sample(torch.tensor([0]))
        >>> sample.nodes_per_hop, sample.edges_per_hop, sample.row.tolist(), sample.column.tolist()
        ([1, 2], [2], [1, 2], [0, 0])
    """

    def __init__(
        self,
        graph: Any,
        fan_out: Sequence[int],
        *,
        replace: bool = False,
        disjoint: bool = False,
        seed: int = 0,
    ) -> None:
        self.fan_out = _fan_out(fan_out)
        self.replace, self.disjoint, self.seed = bool(replace), bool(disjoint), checks.seed(seed)
        self._stored, self._rows, self._order = _structure(graph)
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        """See `NeighbourSampler`."""
        return int(self._epoch)

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch.fill_(checks.whole(value, "epoch"))

    @property
    def num_nodes(self) -> int:
        """N of the whole graph."""
        return len(self.rows.rowptr) - 1

    @property
    def edge_permutation(self) -> Tensor | None:
        """[E] position in the sampler's order → in `data.edge_index`; None where they are the same."""
        return self._order

    @property
    def rows(self) -> Rows:
        """The incoming edges of the whole graph."""
        if self._rows is None:
            assert self._stored is not None
            self._rows = self._stored.rows()
        return self._rows

    def __getstate__(self) -> dict[str, Any]:
        """Memory-mapped edges are mapped again by whoever gets the sampler."""
        return {**self.__dict__, "_rows": self._rows if self._stored is None else None}

    def sample(self, seeds: Tensor) -> Sample:
        """Draw around some nodes.

        Args:
            seeds: [B] by number; one that comes twice is in the batch twice. Isolated ones come alone.

        Raises:
            InputError: they are no numbers of nodes.
        """
        given = checks.positions(seeds.cpu(), self.num_nodes, "seeds")
        given = given.nonzero().flatten() if given.dtype == torch.bool else given
        if given.dim() != 1:
            raise InputError(f"`seeds` must be a vector of node numbers, got shape {list(given.shape)}")
        return self._sample(given.numpy())

    def _sample(self, seeds: Ints) -> Sample:
        stream = self.stream(_BATCH)
        streams = (
            kernels.each_after(stream, seeds)
            if self.disjoint
            else np.array([kernels.folded(stream, seeds)], np.uint64)
        )
        growing = GrowingSample(self.rows, seeds, streams, replace=self.replace, disjoint=self.disjoint)
        for fan_out in self.fan_out:
            growing.add_hop(fan_out)
        return growing.finished()

    def stream(self, purpose: int) -> np.uint64:
        """Where draws for a purpose begin in this epoch."""
        return np.uint64(kernels.folded(np.uint64(self.seed), np.array([self.epoch, purpose])))

    def order(self, count: int) -> Ints:
        """A random order of `count` items in this epoch: that of the batches' seeds."""
        return np.argsort(kernels.each_after(self.stream(_ORDER), np.arange(count)), kind="stable")

    def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput:
        """Draw around the nodes of one batch, for PyG's `NodeLoader`."""
        _refuse(index)
        out = self._output(index.node)
        out.metadata = (index.input_id, index.time)
        return out

    def sample_from_edges(
        self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> SamplerOutput:
        """Draw around the ends of one batch of links, for PyG's `LinkLoader`; pairs beside them too."""
        _refuse(index)
        ends = torch.cat([index.row, index.col]).numpy()
        seed = int(kernels.folded(self.stream(_BATCH), ends)) & 0xFFFFFFFF
        with seeded(seed, torch.device("cpu")):  # PyG draws the pairs from the global generator
            return edge_sample(
                index, lambda seeds, _: self._output(seeds), self.num_nodes, self.disjoint, None, neg_sampling
            )

    def _output(self, seeds: Tensor) -> SamplerOutput:
        found = self.sample(seeds)
        return SamplerOutput(
            node=found.nodes,
            row=found.row,
            col=found.column,
            edge=found.edges,
            batch=found.trees,
            num_sampled_nodes=found.nodes_per_hop,
            num_sampled_edges=found.edges_per_hop,
        )


def _fan_out(given: Sequence[int]) -> tuple[int, ...]:
    if not len(given):
        raise InputError("`fan_out` must hold one number of neighbours per layer, got none")
    return tuple(_neighbours(count) for count in given)


def _neighbours(count: Any) -> int:
    try:
        found = operator.index(count)
    except TypeError:
        found = 0
    if found != -1 and not 1 <= found <= checks.LARGEST:
        raise InputError(
            f"`fan_out` must hold whole numbers of at least 1, or -1 for all neighbours, got {count!r};"
            " a model of fewer layers needs fewer of them"
        )
    return found


def _structure(graph: Any) -> tuple[StoredGraph | None, Rows | None, Tensor | None]:
    """The store or the edges of a graph, and their order where it is not the graph's own."""
    if isinstance(graph, StoredGraph):
        graph.rows()
        return graph, None, None
    if isinstance(graph, Graph):
        return None, _rows(graph.to("cpu").adjacency), None
    given = arguments_from_data(graph)
    edges = checks.edge_index(given["edge_index"], given["num_nodes"])
    adjacency, order = Adjacency.build(edges.cpu(), given["num_nodes"])
    same = torch.equal(order, torch.arange(len(order)))
    return None, _rows(adjacency), None if same else order


def _rows(adjacency: Adjacency) -> Rows:
    adjacency.check_incoming()
    parts = (part.numpy().view() for part in (adjacency.rowptr, adjacency.index32.source))
    return Rows(*(_read_only(part) for part in parts))


def _read_only(array: Any) -> Any:
    array.flags.writeable = False  # as those of a store are, so that kernels are compiled once for both
    return array


def _refuse(index: Any) -> None:
    if index.time is not None or index.input_type is not None:
        raise InputError("`NeighbourSampler` draws from graphs of one kind without times; leave them out")
