"""Exact passes block by block: attention of a block of rows is computed as in a small graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fgai.attention import Limits, limits_of, overriding
from fgai.attention.limits import SAMPLE, SLACK, largest, ranges
from fgai.errors import InputError
from fgai.large.arrays import Array, _ArrayFiles, _blocks, _write_array, map_array
from fgai.large.sort import _row_blocks, _sorted_keys
from fgai.large.stored import DTYPES, StoredGraph, _Rows
from fgai.models.layer import AttentionLayer
from fgai.ops import aggregate, clip, edge_softmax, range_norm, weighted_softmax
from fgai.processes import SINGLE, ProcessGroup
from fgai.sparse import Adjacency
from fgai.sparse.adjacency import Index32

NUMBERS = 1 << 22  # numbers in memory together; order statistics of one channel take all its rows


class _RangeOptions(NamedTuple):
    clip_share: float  # at either end of each channel
    shrink: float  # those of largest norm
    sampled: bool  # take order statistics from a few thousand nodes, evenly spread


def _measure_layer(
    layer: nn.Module,
    run: Callable[[], Iterator[slice]],
    folder: Path,
    options: _RangeOptions,
    num_nodes: int,
) -> None:
    """Set the ranges of a layer's limits; `run` runs it by blocks and yields which rows of each count."""
    every = limits_of(layer)
    together = options.clip_share == options.shrink == 0  # then limits change nothing
    for group in [every] if together and every else [[limits] for limits in every]:
        _write_inputs(run, group, folder)
        for number, limits in enumerate(group):
            path = folder / f"input.{number}.npy"
            rows = map_array(path) if path.exists() else np.zeros(0)
            if len(rows) != num_nodes:
                text = f"limits of {type(layer).__name__} cannot be measured block by block"
                raise InputError(f"{text}; call it with one tensor `x`, or give `limits=False`")
            _measure(limits, rows, options)
            path.unlink()


def _write_inputs(run: Callable[[], Iterator[slice]], group: list[Limits], folder: Path) -> None:
    """Write the inputs of some limits of a layer, a file each."""
    numbers = {limits: number for number, limits in enumerate(group)}
    own = slice(None)
    with _ArrayFiles(folder) as files:

        def write(limits: Limits, _: Any, rows: Tensor) -> Tensor:
            block = rows.detach().reshape(-1, *limits.low.shape)[own].cpu().numpy()
            files.append(f"input.{numbers[limits]}", block)
            return rows

        with overriding(group, write):
            for own in run():  # noqa: B007 (read by `write`)
                pass


def _measure(limits: Limits, rows: Array, options: _RangeOptions) -> None:
    """Do what `Limits.measure` does, for rows on disk."""
    step = max(1, len(rows) // SAMPLE) if options.sampled else 1
    clip_share, shrink = options.clip_share, options.shrink
    low, high = _channel_ranges(rows if clip_share == 0 else rows[::step], clip_share)
    radius = limits.radius
    if not limits.derived:
        counted = rows[::step] if shrink else rows
        norms = [range_norm(clip(block, low, high), low, high) for block in _tensors(counted)]
        radius = largest(torch.cat(norms), shrink) * (1 + SLACK)
    usual = limits.usual
    if step == 1:
        moved = sum(int((clip(block, low, high, radius) != block).sum()) for block in _tensors(rows))
        usual = torch.tensor(moved / max(1, rows.size))
    limits.set(low, high, radius, usual)


def _channel_ranges(rows: Array, clip_share: float) -> tuple[Tensor, Tensor]:
    if clip_share == 0:
        ends = [torch.stack([block.amin(0), block.amax(0)]) for block in _tensors(rows)]
        return ranges(torch.cat(ends), 0.0)
    shape, flat = rows.shape[1:], rows.reshape(len(rows), -1)
    step = max(1, NUMBERS // max(1, len(flat)))
    columns = range(0, flat.shape[1], step)
    found = [ranges(torch.from_numpy(np.array(flat[:, at : at + step])), clip_share) for at in columns]
    low, high = (torch.cat(ends).view(shape) for ends in zip(*found, strict=True))
    return low, high


def _tensors(rows: Array) -> Iterator[Tensor]:
    """Yield rows in blocks, copied to memory."""
    for block in _blocks(rows, max(1, NUMBERS // max(1, int(np.prod(rows.shape[1:]))))):
        yield torch.from_numpy(np.array(block))


class _PassOptions(NamedTuple):
    averaged: bool  # attention over heads
    ranked: bool  # whether scores are written
    block_edges: int
    ranges: _RangeOptions | None = None  # measure the ranges of limits instead
    group: ProcessGroup = SINGLE


class _ExactPass(ABC):
    """How a model is computed on all nodes of a stored graph, layer by layer and block by block."""

    layers: list[str]  # names of the attention layers, in the order they run
    num_hops: int  # message-passing layers
    loops: bool  # whether attention layers read a self-loop at every node
    weighted = False  # whether the softmax reads the weights of edges

    def __init__(self, stored: StoredGraph) -> None:
        if not stored.has_features:
            raise InputError(f"{stored.name!r} has no node features; convert it with some")
        self._stored, self._num_nodes = stored, stored.num_nodes

    def run(self, folder: Path, options: _PassOptions) -> None:
        """Write the results to a folder; processes share the blocks."""
        self._folder, self._options, self._group = folder, options, options.group
        if self._group.is_main:
            _write_rows(folder, self._stored, self.loops, options.block_edges, weighted=self.weighted)
        self._group.barrier()
        self._edges = _Rows(map_array(folder / "rowptr.npy"), map_array(folder / "source.npy"))
        self._run()

    @abstractmethod
    def _run(self) -> None:
        """Compute layer after layer."""

    def _node_share(self, first: int) -> tuple[int, int] | None:
        """See `_ArrayFile`, for rows of nodes; None if this process writes all of them."""
        return (first, self._num_nodes) if self._group.is_distributed else None

    def _edge_share(self, first: int) -> tuple[int, int] | None:
        """Likewise for rows of edges, from those into a node on."""
        edges = self._edges
        return (int(edges.rowptr[first]), len(edges.source)) if self._group.is_distributed else None


class _Sides(NamedTuple):
    """`AttentionLayer.sides` of all nodes, mapped from files."""

    source: Array  # [N, H] or [N, H, C], read by the scores of edges from a node
    destination: Array  # [N, H] or [N, H, C], read by the scores of edges into it
    values: Array  # [N, H, C]


class _Block(NamedTuple):
    first: int  # row
    last: int  # row behind the last
    pointers: Array  # [rows + 1] from 0
    source: Array  # [edges] by number in the whole graph
    weight: Tensor | None  # [edges] or None


_Inputs = tuple[Adjacency, Tensor, Tensor, Tensor]
"""A block as a small graph, its rows first: edges and the sides of its nodes, see `_gather_sides`."""


def _read_ahead(
    sides: _Sides, blocks: Iterable[_Block], most: int, threads: int
) -> Generator[tuple[_Block, _Inputs | None]]:
    """Yield blocks in order with their inputs; threads gather those of the next blocks meanwhile."""
    queue = deque[tuple[_Block, Future[_Inputs | None]]]()
    with ThreadPoolExecutor(threads, thread_name_prefix="fgai-gather") as pool:
        try:
            for block in chain(blocks, [None] * threads):
                if block is not None:
                    queue.append((block, pool.submit(_gather, sides, block, most)))
                if queue and (block is None or len(queue) > threads):
                    first, inputs = queue.popleft()
                    yield first, inputs.result()
        finally:
            for _, inputs in queue:
                inputs.cancel()


def _gather(sides: _Sides, block: _Block, most: int) -> _Inputs | None:
    """Return the inputs of a block; None for a row of more than `most` edges, see `_attend_row`."""
    if len(block.source) > most:
        return None
    nodes, adjacency = _local(block)
    return adjacency, *_gather_sides(sides, nodes, block.last - block.first)


def _attend(
    layer: AttentionLayer, sides: _Sides, block: _Block, inputs: _Inputs | None, options: _PassOptions
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return sums [rows, H, C], attention [edges, H] or averaged [edges, 1], mean scores [edges] or None."""
    averaged, ranked = options.averaged, options.ranked
    if inputs is None:
        out, attention, raw = _attend_row(layer, sides, block, options.block_edges)
    else:
        adjacency, far, near, values = inputs
        if block.weight is None:
            out, attention = layer.fused(far, near, values, adjacency, written=True, averaged=averaged)
            scores = layer.mean_scores(far, near, adjacency) if ranked else None
            return out[: block.last - block.first], attention, scores
        raw = layer.score_edges(far, near, adjacency)
        attention = weighted_softmax(raw, block.weight, adjacency)
        out = aggregate(attention, values, adjacency)[: block.last - block.first]
    if block.weight is not None:
        least = torch.finfo(raw.dtype).tiny  # as the layer itself ranks an edge of weight 0
        raw = raw + block.weight.to(raw.dtype).clamp(min=least).log()[:, None]
    mean = attention.mean(1, keepdim=True) if averaged else attention
    return out, mean, raw.mean(1) if ranked else None


def _attend_row(
    layer: AttentionLayer, sides: _Sides, block: _Block, most: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sum, attention and scores of one row, by chunks: all scores and their softmax, then the sum."""
    chunks = [
        _Block(block.first, block.last, np.array([0, len(source)]), source, None)
        for source in np.array_split(block.source, -(-len(block.source) // most))
    ]
    raw = []
    for chunk in chunks:
        nodes, adjacency = _local(chunk)
        far, near, _ = _gather_sides(_Sides(sides.source, sides.destination, sides.source), nodes, 1)
        raw.append(layer.score_edges(far, near, adjacency))
    scores = torch.cat(raw)
    row = _adjacency(1, block.pointers, np.zeros(len(block.source), np.int32))
    weight = block.weight
    attention = edge_softmax(scores, row) if weight is None else weighted_softmax(scores, weight, row)
    out = torch.zeros(1, *sides.values.shape[1:], dtype=scores.dtype)
    shares = torch.split(attention, [len(chunk.source) for chunk in chunks])
    for chunk, own in zip(chunks, shares, strict=True):
        nodes, adjacency = _local(chunk)
        values = torch.from_numpy(np.take(sides.values, nodes, 0))
        out += aggregate(own.contiguous(), values, adjacency)[:1]
    return out, attention, scores


def _local(block: _Block) -> tuple[Array, Adjacency]:
    """Return the nodes a block reads, its rows first and the others in order, and its edges among them."""
    rows, source = block.last - block.first, block.source.astype(np.int64)
    inside = (source >= block.first) & (source < block.last)
    others, position = np.unique(source[~inside], return_inverse=True)
    local = source - block.first
    local[~inside] = rows + position
    nodes = np.concatenate([np.arange(block.first, block.last), others])
    return nodes, _adjacency(len(nodes), block.pointers, local)


def _adjacency(nodes: int, pointers: Array, source: Array) -> Adjacency:
    rowptr = np.concatenate([pointers, np.full(nodes + 1 - len(pointers), pointers[-1])])
    return _forward_adjacency(*(torch.from_numpy(part.astype(np.int32)) for part in (rowptr, source)))


def _forward_adjacency(rowptr: Tensor, source: Tensor) -> Adjacency:
    """Return edges in compressed rows of int32, without the outgoing view: only a backward pass needs it."""
    nodes = torch.arange(len(rowptr) - 1, dtype=torch.int32, device=rowptr.device)
    destination = torch.repeat_interleave(nodes, rowptr.diff(), output_size=len(source))
    none = rowptr.new_zeros(0)
    return Adjacency.from_index32(len(nodes), Index32(rowptr, source, none, none, destination))


def _gather_sides(sides: _Sides, nodes: Array, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return source side, destination side and values of some nodes; only the first `rows` have edges."""
    values = torch.from_numpy(np.take(sides.values, nodes, 0))
    far = values if sides.source is sides.values else torch.from_numpy(np.take(sides.source, nodes, 0))
    near = np.zeros((len(nodes), *sides.destination.shape[1:]), sides.destination.dtype)
    near[:rows] = sides.destination[nodes[:rows]]
    return far, torch.from_numpy(near), values


def _write_rows(
    folder: Path, stored: StoredGraph, loops: bool, block_edges: int, *, weighted: bool = True
) -> None:
    """Write `rowptr.npy`, `source.npy` and, where edges have weights and they are read, `edge_weight.npy`."""
    rowptr, source = stored.rows()
    weight = stored.array("edge_weight") if weighted else None
    counts = np.zeros(stored.num_nodes + 1, np.int64)
    with _ArrayFiles(folder) as files:
        for first, last in _row_blocks(rowptr, block_edges):
            edges = slice(int(rowptr[first]), int(rowptr[last]))
            row = np.repeat(np.arange(first, last), np.diff(rowptr[first : last + 1]))
            nodes = np.arange(first, last if loops else first)
            keys = np.concatenate([(row << 32) | source[edges], (nodes << 32) | nodes])
            order, keys, is_first = _sorted_keys(keys)
            order, keys = order[is_first], keys[is_first]
            counts[first + 1 : last + 1] = np.bincount((keys >> 32) - first, minlength=last - first)
            files.append("source", (keys & 0xFFFFFFFF).astype(DTYPES["source"]))
            if weight is not None:
                own = weight[edges]
                if len(own) and own.min() < 0:
                    raise InputError("`edge_weight` of a stored graph must be at least 0; shift it")
                own = np.concatenate([own, np.ones(len(order))])[order]
                files.append("edge_weight", own.astype(DTYPES["edge_weight"]))
    _write_array(folder / "rowptr.npy", [np.cumsum(counts)], DTYPES["rowptr"])
