"""`NeighbourSampler`: neighbours drawn hop by hop, reproducibly; `Batches`: mini-batches around them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from torch_geometric.sampler import (
    BaseSampler,
    EdgeSamplerInput,
    NegativeSampling,
    NodeSamplerInput,
    SamplerOutput,
)
from torch_geometric.sampler.neighbor_sampler import edge_sample

from fgai import checks
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.graph.fields import arguments_from_data
from fgai.large import sampling_kernels as kernels
from fgai.large.stored import EDGE_ARRAYS, NODE_ARRAYS, StoredGraph, _Rows
from fgai.sparse import Adjacency, Features, match_edges
from fgai.threads import seeded
from fgai.typed import typed

Ints = NDArray[np.int64]
_NODE = 0xFFFFFFFF  # the bits of a key that hold its node; above them is its tree
_ORDER, _BATCH = 1, 2  # purposes of random numbers, which share none


@typed
class NeighbourSampler(BaseSampler):  # type: ignore[misc]
    """Draw neighbours of some nodes, neighbours of those, and so on: a mini-batch for as many layers.

    What is drawn depends on `seed`, `epoch` and the seeds of the batch alone; with `disjoint` on each seed
    alone. Works in PyG's `NodeLoader` and `LinkLoader`; `Batches` gives fgai's own graphs.

    Args:
        graph: a `Graph`, a `StoredGraph` (memory-mapped), or a PyG `Data`, whose edges keep their order.
        fan_out: neighbours per node in each hop, the seeds' first, one per layer of the model; -1 takes all.
        replace: draw with replacement: each node then has exactly `fan_out` edges, perhaps some twice.
        disjoint: draw a separate tree for every seed; a node that several seeds reach occurs several times.
        seed: of the random numbers.

    Attributes:
        epoch: changes what is drawn; set it before each pass over the data. Persistent workers see it, too.

    Example:
        >>> import torch
        >>> star = Graph.from_edges(torch.tensor([[1, 2, 3, 4], [0, 0, 0, 0]]), 5)
        >>> sample = NeighbourSampler(star, [2]).sample(torch.tensor([0]))
        >>> sample.num_sampled_nodes, sample.num_sampled_edges, sample.row.tolist(), sample.col.tolist()
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
        self._edges: StoredGraph | _Rows = graph
        self._order: Tensor | None = None
        if not isinstance(graph, StoredGraph):
            self._edges, self._order = _read_edges(graph)
        self.num_nodes = len(self.rows.rowptr) - 1
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def epoch(self) -> int:
        """See `NeighbourSampler`."""
        return int(self._epoch)

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch.fill_(checks.whole(value, "epoch"))

    @property
    def edge_permutation(self) -> Tensor | None:
        """[E] position in the sampler's order → in `data.edge_index`; None where they are the same."""
        return self._order

    @property
    def rows(self) -> _Rows:
        """The incoming edges of the whole graph; of a stored one, each process maps them itself."""
        return self._edges.rows() if isinstance(self._edges, StoredGraph) else self._edges

    def sample(self, seeds: Tensor) -> SamplerOutput:
        """Draw around some nodes [B], by number; one that occurs twice is in the batch twice.

        In PyG's `SamplerOutput` the seeds come first in `node`, then each hop in ascending order; `col`
        ascends, `edge` has positions in the whole graph, and `batch` the seed of each node if `disjoint`.
        """
        nodes = _node_numbers(seeds, self.num_nodes, "seeds").numpy()
        stream = self._stream(_BATCH)
        if self.disjoint:
            return self._draw(nodes, kernels._each_after(stream, nodes))
        return self._draw(nodes, np.array([kernels._folded(stream, nodes)], np.uint64))

    def _draw(self, seeds: Ints, streams: NDArray[np.uint64]) -> SamplerOutput:
        """Draw neighbours hop by hop; keys hold a node and, above 32 bits, its tree."""
        rows, replace, num_trees = self.rows, self.replace, len(streams)
        keys = (np.arange(len(seeds)) << 32) | seeds if self.disjoint else seeds
        most = self.num_nodes * num_trees
        table = kernels._with_room(np.zeros(0, np.int64), min(len(keys), most))
        kernels._number_seeds(table, keys)
        begin, nodes_per_hop, hops = 0, [len(seeds)], []
        for hop, fan_out in enumerate(self.fan_out):
            nodes, trees = keys[begin:] & _NODE, keys[begin:] >> 32
            if replace and fan_out > 0:
                checks.memory(len(nodes) * fan_out, 3 * nodes.itemsize, "fan_out")
            offset = kernels._offsets(rows.rowptr, nodes, fan_out, replace)
            row, column, edges = (np.empty(offset[-1], np.int64) for _ in range(3))
            kernels._draw(rows.rowptr, nodes, trees, streams, hop, fan_out, replace, offset, edges)
            kernels._keys_of(rows.source, edges, trees, offset, begin, row, column)
            begin = len(keys)
            table = kernels._with_room(table, min(begin + len(edges), most))
            fresh = np.sort(kernels._enter(table, row))  # ascending, to read features from front to back
            kernels._number(table, fresh, begin, row)
            keys = np.concatenate([keys, fresh])
            nodes_per_hop.append(len(fresh))
            hops.append((row, column, edges))
        sources, destinations, positions = (
            torch.from_numpy(np.concatenate(parts)) for parts in zip(*hops, strict=True)
        )
        return SamplerOutput(
            node=torch.from_numpy(keys & _NODE),
            row=sources,
            col=destinations,
            edge=positions,
            batch=torch.from_numpy(keys >> 32) if self.disjoint else None,
            num_sampled_nodes=nodes_per_hop,
            num_sampled_edges=[len(edges) for *_, edges in hops],
        )

    def _stream(self, purpose: int) -> np.uint64:
        """The state from which random numbers for a purpose follow in this epoch."""
        return np.uint64(kernels._folded(np.uint64(self.seed), np.array([self.epoch, purpose])))

    def sample_from_nodes(self, index: NodeSamplerInput, **_: Any) -> SamplerOutput:
        """Draw around the nodes of one batch, for PyG's `NodeLoader`."""
        _check_index(index)
        out = self.sample(index.node)
        out.metadata = (index.input_id, index.time)
        return out

    def sample_from_edges(
        self, index: EdgeSamplerInput, neg_sampling: NegativeSampling | None = None
    ) -> SamplerOutput:
        """Draw around the ends of one batch of links and of negative pairs, for PyG's `LinkLoader`."""
        _check_index(index)
        ends = torch.cat([index.row, index.col]).numpy()
        seed = int(kernels._folded(self._stream(_BATCH), ends)) & 0xFFFFFFFF
        with seeded(seed, torch.device("cpu")):  # PyG draws the pairs from the global generator
            return edge_sample(
                index, lambda seeds, _: self.sample(seeds), self.num_nodes, self.disjoint, None, neg_sampling
            )


def _node_numbers(nodes: Tensor, count: int, name: str) -> Tensor:
    """Return a vector of nodes, given by number or as a mask, as numbers on the CPU."""
    index = checks.positions(nodes.cpu(), count, name)
    index = index.nonzero().flatten() if index.dtype == torch.bool else index
    if index.dim() != 1:
        raise InputError(f"`{name}` must be a vector of node numbers, got shape {list(index.shape)}")
    return index


def _fan_out(values: Sequence[int]) -> tuple[int, ...]:
    if not len(values):
        raise InputError("`fan_out` must hold one number of neighbours per layer, got none")
    counts = []
    for value in values:
        count = 0
        with suppress(TypeError):
            count = operator.index(value)
        if count != -1 and not 1 <= count <= checks.LARGEST:
            text = f"`fan_out` must hold whole numbers of at least 1, or -1 for all neighbours, got {value!r}"
            raise InputError(f"{text}; a model of fewer layers needs fewer of them")
        counts.append(count)
    return tuple(counts)


def _read_edges(graph: Any) -> tuple[_Rows, Tensor | None]:
    """Return the edges of a graph in memory, and their order if it is not that of the data."""
    order = None
    if isinstance(graph, Graph):
        adjacency = graph.to("cpu").adjacency
    else:
        arguments = arguments_from_data(graph)
        edges = checks.edge_index(arguments["edge_index"], arguments["num_nodes"])
        adjacency, order = Adjacency.build(edges.cpu(), arguments["num_nodes"])
        order = None if torch.equal(order, torch.arange(len(order))) else order
    adjacency.check_incoming()
    rows = _Rows(adjacency.rowptr.numpy().view(), adjacency.index32.source.numpy().view())
    for array in rows:
        array.flags.writeable = False  # as in stored graphs, so that kernels are compiled once for both
    return rows, order


def _check_index(index: Any) -> None:
    if index.time is not None or index.input_type is not None:
        raise InputError("`NeighbourSampler` does not support `time` or types of nodes; leave them out")


@typed
@dataclass(frozen=True, eq=False)
class MiniBatch:
    """A part of a graph around some nodes, the seeds."""

    graph: Graph  # nodes in the order of `nodes`, and sorted edges; those drawn twice occur twice
    nodes: Tensor  # [n] by number in the whole graph; the first `num_seeds` are the seeds
    edges: Tensor  # [e] position in the whole graph of each edge of `graph`
    num_seeds: int  # B, the nodes whose outputs are used; they depend on the others
    trees: Tensor | None = None  # [n] the seed each node was drawn for, where trees are disjoint

    @property
    def seeds(self) -> Tensor:
        """[B] the seeds by number in the whole graph."""
        return self.nodes[: self.num_seeds]

    def match(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the positions of the batch's edges in the whole graph, and in sorted `keys` [K] of a layer.

        With `whole, here = batch.match(layer.keys)`, the rows `layer.values[here]` belong to the edges
        `whole` of the whole graph. Self-loops that a model added are in neither. `AttentionError` if an edge
        occurs twice, as after drawing with replacement.
        """
        mine, others = match_edges(self.graph.keys, keys)
        return self.edges[mine], others


def _mini_batch(graph: Graph | StoredGraph, sample: SamplerOutput) -> MiniBatch:
    """Return a sample of a graph with the features, labels, masks and edge values of its nodes and edges."""
    _check(graph, sample)
    nodes = sample.node
    adjacency, order = Adjacency.build(torch.stack([sample.row, sample.col]), len(nodes))
    edges = sample.edge[order]
    if isinstance(graph, StoredGraph):
        fields: dict[str, Any] = {**graph.node_fields(nodes.numpy()), **graph.edge_fields(edges.numpy())}
        fields["features"] = graph.features(nodes.numpy())
    else:
        index = dict.fromkeys(NODE_ARRAYS, nodes) | dict.fromkeys(EDGE_ARRAYS, edges)
        values = {name: getattr(graph, name) for name in index}
        fields = {name: value[index[name]] for name, value in values.items() if value is not None}
        fields["features"] = _features(graph.features, nodes)
    part = Graph(adjacency, name=graph.name, **fields)
    return MiniBatch(part, nodes, edges, sample.num_sampled_nodes[0], sample.batch)


def _check(graph: Graph | StoredGraph, sample: SamplerOutput) -> None:
    other_fields = ("positional", "batch", "links", "entry_values")
    if any(getattr(graph, name, None) is not None for name in other_fields):
        text = f"{graph.name!r} must not have positional encodings, small graphs, links or `entry_values`"
        raise InputError(f"{text}; give the graph as it was before the model prepared it")
    inside = (sample.node, graph.num_nodes), (sample.edge, graph.num_edges)
    if any(index.numel() and int(index.max()) >= count for index, count in inside):
        raise InputError(f"`sample` must be drawn from {graph.name!r}, got nodes or edges outside it")


def _features(features: Features | None, nodes: Tensor) -> Features | None:
    if features is None:
        return None
    if features.appended is not None or features.delta is not None:
        features = Features.dense(features.to_dense())
    return features.take(nodes)


@typed
class Batches:
    """Mini-batches of a graph, stored or on the CPU: one pass in the epoch of the sampler.

    The seeds are `nodes` [M], by number or as a mask, all by default. With `shuffle` their order is drawn
    from the sampler's seed and epoch; `max_seeds` takes the first of them. `workers` are processes that make
    batches ahead. Of several processes that train together each takes every `world_size`-th batch.

    Example:
        >>> from fgai.datasets import planted
        >>> data = planted()
        >>> batches = Batches(data, NeighbourSampler(data, [5, 5]), data.y == 2, batch_size=128)
        >>> len(batches), sum(batch.num_seeds for batch in batches) == int((data.y == 2).sum())
        (4, True)
    """

    def __init__(
        self,
        graph: Graph | StoredGraph,
        sampler: NeighbourSampler,
        nodes: Tensor | None = None,
        *,
        batch_size: int = 1024,
        shuffle: bool = True,
        max_seeds: int | None = None,
        workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.batch_size = checks.whole(batch_size, "batch_size", 1)
        self.workers, self.shuffle = checks.whole(workers, "workers", 0, 1024), bool(shuffle)
        self.world_size = checks.whole(world_size, "world_size", 1)
        self.rank = checks.whole(rank, "rank", 0, self.world_size - 1)
        if isinstance(graph, Graph) and graph.device.type != "cpu":
            raise InputError(f"`graph` must be on the CPU, from where batches are taken; got {graph.device}")
        if (sampler.num_nodes, len(sampler.rows.source)) != (graph.num_nodes, graph.num_edges):
            raise InputError(f"`sampler` must draw from {graph.name!r}; it was made for another graph")
        every = torch.arange(graph.num_nodes)
        self.nodes = every if nodes is None else _node_numbers(nodes, graph.num_nodes, "nodes")
        if not len(self.nodes):
            raise InputError("`nodes` must be at least one node, got none")
        self.graph, self.sampler = graph, sampler
        most = len(self.nodes) if max_seeds is None else checks.whole(max_seeds, "max_seeds", 1)
        self.max_seeds = min(most, len(self.nodes))

    def __len__(self) -> int:
        batches = -(-self.max_seeds // self.batch_size)
        return len(range(self.rank, batches, self.world_size))

    def __iter__(self) -> Iterator[MiniBatch]:
        nodes = self.nodes
        if self.shuffle:
            numbers = kernels._each_after(self.sampler._stream(_ORDER), np.arange(len(nodes)))
            nodes = nodes[torch.from_numpy(np.argsort(numbers, kind="stable")[: self.max_seeds])]
        seeds = torch.split(nodes[: self.max_seeds], self.batch_size)[self.rank :: self.world_size]
        options: dict[str, Any] = {"batch_size": None, "num_workers": self.workers, "collate_fn": self._batch}
        # Without a generator the loader would take a number from the global one.
        yield from DataLoader(seeds, generator=torch.Generator(), **options)  # type: ignore[arg-type]

    def _batch(self, seeds: Tensor) -> MiniBatch:
        return _mini_batch(self.graph, self.sampler.sample(seeds))
