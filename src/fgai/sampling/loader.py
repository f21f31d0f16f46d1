"""`Batches`: all nodes of interest once, in mini-batches that depend on the seed and the epoch alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fgai import checks
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.sampling.batch import MiniBatch, mini_batch
from fgai.sampling.sampler import NeighbourSampler
from fgai.store import StoredGraph
from fgai.typed import typed


@typed
class Batches:
    """Mini-batches of a graph, made by this process or by workers: the same ones either way.

    Going through it makes one pass in the sampler's epoch; set `sampler.epoch` before the next one for
    another order and other neighbours.

    Args:
        graph: what the batches are parts of; in memory it must be on the CPU.
        sampler: draws from this graph.
        nodes: [M] whose outputs are meant, by number or as a mask; all by default.
        batch_size: seeds of a batch; the last one has fewer. One larger than there are nodes gives one batch.
        shuffle: draw the order from the sampler's seed and epoch; else it is that of `nodes`.
        most: seeds of a pass, the first of the order; None for all.
        workers: processes that make batches ahead; 0 makes them here.
        rank: of `ranks` processes that share the batches: this one takes every `ranks`-th, from this one on.
        ranks: how many share them; the last batches may be there for the first ranks alone.

    Raises:
        InputError: the nodes are not in the graph, there is none, or the sampler is of another graph.

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
        most: int | None = None,
        workers: int = 0,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.batch_size = checks.whole(batch_size, "batch_size", 1)
        self.workers, self.shuffle = checks.whole(workers, "workers", 0, 1024), bool(shuffle)
        self.ranks = checks.whole(ranks, "ranks", 1)
        self.rank = checks.whole(rank, "rank", 0, self.ranks - 1)
        if isinstance(graph, Graph) and graph.device.type != "cpu":
            raise InputError(f"`graph` must be on the CPU, from where batches are taken; got {graph.device}")
        if (sampler.num_nodes, len(sampler.rows.source)) != (graph.num_nodes, graph.num_edges):
            raise InputError(f"`sampler` must draw from {graph.name!r}; it was made for another graph")
        every = torch.arange(graph.num_nodes)
        chosen = every if nodes is None else checks.positions(nodes.cpu(), graph.num_nodes, "nodes")
        chosen = chosen.nonzero().flatten() if chosen.dtype == torch.bool else chosen
        if chosen.dim() != 1 or not chosen.numel():
            raise InputError(f"`nodes` must be a vector of at least one node, got shape {list(chosen.shape)}")
        self.graph, self.sampler, self.nodes = graph, sampler, chosen
        self.most = len(chosen) if most is None else min(checks.whole(most, "most", 1), len(chosen))

    def __len__(self) -> int:
        batches = -(-self.most // self.batch_size)
        return len(range(self.rank, batches, self.ranks))

    def __iter__(self) -> Iterator[MiniBatch]:
        nodes = self.nodes
        if self.shuffle:
            nodes = nodes[torch.from_numpy(self.sampler.order(len(nodes))[: self.most])]
        parts = list(torch.split(nodes[: self.most], self.batch_size))[self.rank :: self.ranks]
        generator = torch.Generator()  # or the loader would take a number from the global one
        yield from DataLoader(
            parts,  # type: ignore[arg-type]
            batch_size=None,
            collate_fn=self._made,  # type: ignore[arg-type]
            num_workers=self.workers,
            generator=generator,
        )

    def _made(self, seeds: Tensor) -> MiniBatch:
        return mini_batch(self.graph, self.sampler.sample(seeds))
