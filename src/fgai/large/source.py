"""`_StoredSource`: a stored graph as mini-batches, and exact passes over it, from disk or on a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fgai import checks
from fgai.attention import (
    call_model,
    duplicate,
    evaluating,
    limits_of,
    measuring,
    model_name,
    observe,
    prepared,
)
from fgai.attention.calls import device_of
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.large.arrays import _blocks, _write_array, map_array
from fgai.large.blocks import _forward_adjacency, _write_rows
from fgai.large.message_passing import _is_own
from fgai.large.observation import StoredObservation, _write_manifest
from fgai.large.sampling import Batches, NeighbourSampler
from fgai.large.stored import StoredGraph
from fgai.large.streaming import _exact_pass, _LayerPass, _measure_store, observe_store, pass_size
from fgai.large.write import _feature_blocks, _new_folder
from fgai.processes import SINGLE, ProcessGroup, current
from fgai.sparse import Features
from fgai.tasks import check_logits
from fgai.training.resume import training_fingerprint
from fgai.version import versions

FAN_OUT = 10  # neighbours drawn per node by default
BLOCK = 1 << 22  # edges, or rows of a result, that are in the memory of the machine together
MEMORY_SHARE = 0.5  # of a GPU's free memory, for a graph and a pass over it; the rest is for training
EDGE_BYTES = 16  # memory of an edge beside its attention: both of its ends, its weight, and sums


class _PreparedBatch(NamedTuple):
    graph: Graph  # prepared for the model, on its device; the seeds are its first nodes
    nodes: Tensor  # [n] by number in the whole graph, on the CPU
    seeds: int  # number of nodes whose output enters the loss


class _GpuGraph:
    """A stored graph in the memory of a GPU, where passes take seconds."""

    def __init__(self, model: nn.Module, stored: StoredGraph, folder: Path) -> None:
        self._stored, self._loops = stored, _LayerPass(model, stored).loops
        self.device = next(model.parameters()).device
        with tempfile.TemporaryDirectory(dir=folder) as name:
            _write_rows(Path(name), stored, self._loops, BLOCK)
            self.graph = _load(Path(name), stored, self.device)

    @staticmethod
    def fits(model: nn.Module, stored: StoredGraph) -> bool:
        """Whether a model is on a GPU with room for the graph, a pass over it, and as much again."""
        device = next(model.parameters()).device
        if device.type != "cuda" or not _has_small_tensors(model, stored):
            return False
        return _needed_bytes(model, stored) <= MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]

    def matches(self, model: nn.Module) -> bool:
        loops = _LayerPass(model, self._stored).loops
        return loops == self._loops and next(model.parameters()).device == self.device

    def observe(self, model: nn.Module, path: Path, *, ranked: bool = False) -> StoredObservation:
        """Write logits and attention, heads averaged, as `observe_store` does, but no states."""
        observation = observe(model, self.graph, heads="mean", ranked=ranked)
        index, layers = self.graph.adjacency.index32, observation.attention.layers
        arrays = {"rowptr": index.rowptr.long(), "source": index.source, "logits": observation.logits}
        arrays |= {f"attention.{number}": layer.values for number, layer in enumerate(layers)}
        if ranked:
            arrays |= {f"scores.{number}": layer.ranking() for number, layer in enumerate(layers)}
        with _new_folder(path) as work:
            for name, values in arrays.items():
                blocks = (block.cpu().numpy() for block in _blocks(values, BLOCK))
                kind = values.new_zeros(0).cpu().numpy().dtype
                _write_array(work.folder / f"{name}.npy", blocks, kind, tuple(values.shape[1:]))
            names = _LayerPass(model, self._stored).layers
            _write_manifest(work.folder, model_name(model), self._stored.fingerprint, names)
        return StoredObservation(path)

    def measure(self, model: nn.Module, clip_share: float, shrink: float, *, sampled: bool = False) -> None:
        """Set the ranges of a model's limits from all nodes, see `_measure_store`."""
        if limits_of(model):
            ranges = measuring(model, clip_share, shrink=shrink, sampled=sampled)
            with evaluating(model), torch.no_grad(), ranges:
                call_model(model, self.graph)


def _needed_bytes(model: nn.Module, stored: StoredGraph) -> int:
    nodes, edges, width = stored.num_nodes, stored.num_edges + stored.num_nodes, stored.num_features
    peak = pass_size(model, nodes, edges, width, heads="each").peak
    return 4 * nodes * width + 2 * peak + EDGE_BYTES * edges


def _has_small_tensors(model: nn.Module, stored: StoredGraph) -> bool:
    """Whether every tensor of a pass has fewer than 2³¹ entries, as the kernels require."""
    nodes, edges = stored.num_nodes, stored.num_edges + stored.num_nodes
    layers = [stage.layer for stage in _LayerPass(model, stored).stages]
    widest = max(stored.num_features, *(layer.heads * layer.channels for layer in layers))
    return bool(max(nodes * widest, edges * max(layer.heads for layer in layers)) < 2**31)


def _load(folder: Path, stored: StoredGraph, device: torch.device) -> Graph:
    """Return the graph with the rows of a folder; dense features are copied block by block."""
    rowptr, source = (
        torch.from_numpy(np.array(map_array(folder / f"{name}.npy"), np.int32)).to(device)
        for name in ("rowptr", "source")
    )
    weight = folder / "edge_weight.npy"
    weights = torch.from_numpy(np.array(map_array(weight))).to(device) if weight.exists() else None
    if stored.array("x") is None:
        features = stored.features(slice(None))
        assert features is not None
        features = features.to(device)
    else:
        x = torch.empty(stored.num_nodes, stored.num_features, device=device)
        for first, rows in _feature_blocks(stored):
            block = rows.to_dense()
            x[first : first + len(block)] = block
        features = Features.dense(x)
    return Graph(_forward_adjacency(rowptr, source), features, name=stored.name, edge_weight=weights)


class _StoredSource:
    """A stored graph as mini-batches, and exact passes over it, from disk or on a GPU with room for it."""

    def __init__(self, stored: StoredGraph, folder: Path, seed: int) -> None:
        self.stored, self.folder, self.seed = stored, folder, seed
        self.node_graph = stored.nodes(seed)
        self.group = current()
        self.batch_size = 1
        self.fan_out: tuple[int, ...] = (FAN_OUT,)
        self.epoch_size: int | None = None
        self._gpu_graph: _GpuGraph | None = None
        self._gpu_is_full = False

    def prepare(
        self,
        model: nn.Module,
        batch_size: int,
        fan_out: int | Sequence[int] | None,
        epoch_size: int | None = None,
    ) -> None:
        """Set the size of batches for a model, and the largest number of seeds of an epoch."""
        hops = _exact_pass(model, self.stored).num_hops
        self.batch_size = checks.whole(batch_size, "batch_size", 1)
        if fan_out is None or isinstance(fan_out, int):
            self.fan_out = (FAN_OUT if fan_out is None else fan_out,) * hops
        elif len(fan_out) == hops:
            self.fan_out = tuple(fan_out)
        else:
            text = f"`fan_out` must be one number, or one for each of the model's {hops} attention layers"
            raise InputError(f"{text} (and other message-passing layers), got {list(fan_out)}")
        self.epoch_size = None if epoch_size is None else checks.whole(epoch_size, "epoch_size", 1)
        self.sampler = NeighbourSampler(self.stored, self.fan_out, seed=self.seed)
        (first,) = self.batches(model, torch.zeros(1, dtype=torch.long), 0)
        with evaluating(model), torch.no_grad():
            logits = call_model(model, first.graph)
        check_logits(logits, first.graph)
        self.check_classes(logits.shape[1])

    def check_classes(self, count: int) -> None:
        """Raise unless a model with so many logits per node can predict every class of the graph."""
        if count < self.node_graph.num_classes:
            classes = f"{self.node_graph.num_classes} logits per node for {self.stored.name!r}"
            raise InputError(f"the model must give {classes}, got {count}")

    def batches(
        self, model: nn.Module, nodes: Tensor | None, epoch: int, **options: Any
    ) -> Iterator[_PreparedBatch]:
        """Yield mini-batches around some nodes, see `Batches`; they depend on seed, epoch and nodes alone."""
        self.sampler.epoch = epoch
        for batch in Batches(self.stored, self.sampler, nodes, batch_size=self.batch_size, **options):
            graph = batch.graph
            # `batched_for` has checked that a PyG model can read the graph.
            graph = prepared(model, graph) if _is_own(model) else graph.to(device_of(model, graph))
            yield _PreparedBatch(graph, batch.nodes, batch.num_seeds)

    def own_batches(
        self, model: nn.Module, nodes: Tensor | None, epoch: int
    ) -> Iterator[_PreparedBatch | None]:
        """Yield this process's mini-batches, one for each step; None where it has none."""
        count = self.stored.num_nodes if nodes is None else len(nodes)
        rank, size = self.group.rank, self.group.size
        own = self.batches(model, nodes, epoch, max_seeds=self.epoch_size, rank=rank, world_size=size)
        yield from islice(chain(own, repeat(None)), self.num_steps(count))

    def num_steps(self, count: int) -> int:
        """Return the steps of an epoch over so many seeds; in each, all processes have a mini-batch."""
        return -(-min(count, self.epoch_size or count) // (self.batch_size * self.group.size))

    def observe(
        self, model: nn.Module, *, ranked: bool = False, group: ProcessGroup = SINGLE
    ) -> StoredObservation:
        """Return logits and attention of all nodes, heads averaged, see `observe_store`."""
        path = Path(group.broadcast(tempfile.mkdtemp(dir=self.folder))) / "observation"
        if not group.is_distributed and self._run_on_gpu(
            model, lambda graph: graph.observe(model, path, ranked=ranked)
        ):
            return StoredObservation(path)
        return observe_store(_on_cpu(model), self.stored, path, heads="mean", ranked=ranked, group=group)

    def set_ranges(
        self, model: nn.Module, clip_share: float, shrink: float, *, sampled: bool = False
    ) -> None:
        shares: dict[str, Any] = {"clip_share": clip_share, "shrink": shrink, "sampled": sampled}
        if self._run_on_gpu(model, lambda graph: graph.measure(model, **shares)):
            return
        on_cpu = _on_cpu(model)
        _measure_store(on_cpu, self.stored, folder=self.folder, **shares)
        if on_cpu is not model:
            for limits, other in zip(limits_of(model), limits_of(on_cpu), strict=True):
                limits.set(other.low, other.high, other.radius, other.usual)

    def _run_on_gpu(self, model: nn.Module, run: Callable[[_GpuGraph], object]) -> bool:
        """Run a pass over the graph on the model's GPU, loaded once; False if there is no room for it."""
        if self._gpu_is_full or not _is_own(model):
            return False
        try:
            if self._gpu_graph is None or not self._gpu_graph.matches(model):
                if not _GpuGraph.fits(model, self.stored):
                    return False
                self._gpu_graph = None  # free its memory first
                self._gpu_graph = _GpuGraph(model, self.stored, self.folder)
            run(self._gpu_graph)
        except torch.OutOfMemoryError:  # other processes have taken the memory
            self._gpu_graph, self._gpu_is_full = None, True
        return not self._gpu_is_full

    def check_processes(self, model: nn.Module, *identity: object) -> None:
        """Check that all processes train the same model on the same graph in the same way."""
        if self.group.is_distributed:
            self.group.require_equal({
                **{f"version of {name}": version for name, version in versions().items()},
                "graph": self.stored.fingerprint,
                "settings": repr((*identity, *self._sizes)),
                "model": self.fingerprint(model, weights=True),
            })  # fmt: skip

    def fingerprint(self, model: nn.Module, *identity: object, weights: bool = False) -> str:
        """See `training_fingerprint`; it depends on the sizes of batches, too."""
        return training_fingerprint(
            model, self.node_graph, *identity, *self._sizes, weights=weights, data=self.stored.fingerprint
        )

    @property
    def _sizes(self) -> tuple[object, ...]:
        sizes = self.batch_size, self.fan_out
        return sizes if self.epoch_size is None else (*sizes, self.epoch_size)

    @cached_property
    def feature_range(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest value of each feature, [F] each."""
        low, high = zip(*[features.range() for _, features in _feature_blocks(self.stored)], strict=True)
        return torch.stack(low).amin(0), torch.stack(high).amax(0)


def _on_cpu(model: nn.Module) -> nn.Module:
    """Return a model, or a copy on the CPU of one of fgai's, which read stored graphs there."""
    on_gpu = any(parameter.device.type != "cpu" for parameter in model.parameters())
    return duplicate(model).cpu() if on_gpu and _is_own(model) else model
