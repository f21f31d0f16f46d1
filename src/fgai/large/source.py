"""`_StoredSource`: a stored graph in mini-batches and in exact passes, on disk or on a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fgai import checks
from fgai.attention import call_model, duplicate, evaluating, limits_of, prepared
from fgai.attention.calls import device_of
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.large.message_passing import _is_own
from fgai.large.observation import StoredObservation
from fgai.large.resident import _Resident
from fgai.large.sampling import Batches, NeighbourSampler
from fgai.large.stored import StoredGraph
from fgai.large.streaming import _hops_of, check_streamed, measure_store, observe_store
from fgai.large.write import _feature_blocks
from fgai.processes import SINGLE, ProcessGroup, current
from fgai.tasks import check_logits
from fgai.training.resume import training_fingerprint
from fgai.version import versions

T = TypeVar("T")
FAN_OUT = 10  # neighbours drawn of each node by default


class _PreparedBatch(NamedTuple):
    graph: Graph  # prepared for the model, on its device; the seeds are its first nodes
    nodes: Tensor  # [n] by number in the whole graph, on the CPU
    seeds: int  # nodes whose output is meant


class _StoredSource:
    """A stored graph in mini-batches, and in exact passes from disk or from a GPU with room for all of it."""

    def __init__(self, stored: StoredGraph, folder: Path, seed: int) -> None:
        self.stored, self.folder, self.seed = stored, folder, seed
        self.nodes = stored.nodes(seed)
        self.ranks = current()
        self.batch_size = 1
        self.fan_out: tuple[int, ...] = (FAN_OUT,)
        self.epoch_size: int | None = None
        self._loaded: _Resident | None = None
        self._crowded = False

    def prepare(
        self,
        model: nn.Module,
        batch_size: int,
        fan_out: int | Sequence[int] | None,
        epoch_size: int | None = None,
    ) -> None:
        """Set the size of batches for a model, and the number of seeds of an epoch at most."""
        check_streamed(model, self.stored)
        self.batch_size = checks.whole(batch_size, "batch_size", 1)
        self.fan_out = _fan_out(fan_out, _hops_of(model, self.stored))
        self.epoch_size = None if epoch_size is None else checks.whole(epoch_size, "epoch_size", 1)
        self.sampler = NeighbourSampler(self.stored, self.fan_out, seed=self.seed)
        (first,) = self.parts(model, torch.zeros(1, dtype=torch.long), 0)
        with evaluating(model), torch.no_grad():
            logits = call_model(model, first.graph)
        check_logits(logits, first.graph)
        self.check_classes(logits.shape[1])

    def check_classes(self, count: int) -> None:
        """Raise unless a model with so many logits per node can give every class of the graph."""
        if count < self.nodes.num_classes:
            raise InputError(
                f"the model must give {self.nodes.num_classes} logits per node for {self.stored.name!r}, got"
                f" {count}"
            )

    def parts(
        self, model: nn.Module, nodes: Tensor | None, epoch: int, **order: Any
    ) -> Iterator[_PreparedBatch]:
        """Yield mini-batches around some nodes, see `Batches`; they depend on seed, epoch and nodes alone."""
        self.sampler.epoch = epoch
        for batch in Batches(self.stored, self.sampler, nodes, batch_size=self.batch_size, **order):
            graph = batch.graph
            # That a PyG model can read the graph was checked once, on a part.
            graph = prepared(model, graph) if _is_own(model) else graph.to(device_of(model, graph))
            yield _PreparedBatch(graph, batch.nodes, batch.num_seeds)

    def own_parts(
        self, model: nn.Module, nodes: Tensor | None, epoch: int
    ) -> Iterator[_PreparedBatch | None]:
        """Yield this rank's mini-batches of `parts`, one for each step; None where it has none."""
        done, count = 0, self.stored.num_nodes if nodes is None else len(nodes)
        rank, ranks = self.ranks.rank, self.ranks.size
        own = self.parts(model, nodes, epoch, most=self.epoch_size, rank=rank, ranks=ranks)
        for done, part in enumerate(own, 1):  # noqa: B007 (read after the loop)
            yield part
        if done < self.num_steps(count):
            yield None

    def num_steps(self, count: int) -> int:
        """Steps of an epoch over so many seeds, or those it has at most; a mini-batch on every rank."""
        return -(-min(count, self.epoch_size or count) // (self.batch_size * self.ranks.size))

    def observe(
        self, model: nn.Module, *, ranked: bool = False, ranks: ProcessGroup = SINGLE
    ) -> StoredObservation:
        path = Path(ranks.first(tempfile.mkdtemp(dir=self.folder))) / "observation"
        if not ranks.several:
            observation = self._on_device(model, lambda there: there.observe(model, path, ranked=ranked))
            if observation is not None:
                return observation
        here = _streamed(model)
        return observe_store(here, self.stored, path, heads="mean", ranked=ranked, ranks=ranks)

    def set_ranges(
        self, model: nn.Module, clip_share: float, shrink: float, *, sampled: bool = False
    ) -> None:
        """Take the ranges of a model's limits from all nodes."""
        shares: dict[str, Any] = {"clip_share": clip_share, "shrink": shrink, "sampled": sampled}
        if self._on_device(model, lambda there: there.measure(model, **shares)) is not None:
            return
        here = _streamed(model)
        measure_store(here, self.stored, folder=self.folder, **shares)
        if here is not model:
            for limits, other in zip(limits_of(model), limits_of(here), strict=True):
                limits.set(other.low, other.high, other.radius, other.usual)

    def _on_device(self, model: nn.Module, run: Callable[[_Resident], T]) -> T | None:
        """Run a pass over the graph on the model's GPU, loaded once; None if there is no room for it."""
        if self._crowded or not _is_own(model):
            return None
        loaded = self._loaded is not None and self._loaded.serves(model)
        if not (loaded or _Resident.fits(model, self.stored)):
            return None
        try:
            if not loaded:
                self._loaded = None  # free its memory first
                self._loaded = _Resident(model, self.stored, self.folder)
            assert self._loaded is not None
            return run(self._loaded)
        except torch.OutOfMemoryError:  # other processes have taken the memory
            self._loaded, self._crowded = None, True
            return None

    def check_processes(self, model: nn.Module, *identity: object) -> None:
        """Raise unless all ranks train the same model on the same graph in the same way."""
        if self.ranks.several:
            self.ranks.agree({
                **{f"version of {name}": version for name, version in versions().items()},
                "graph": self.stored.fingerprint,
                "settings": repr((*identity, *self._sizes)),
                "model": self.fingerprint(model, weights=True),
            })  # fmt: skip

    def fingerprint(self, model: nn.Module, *identity: object, weights: bool = False) -> str:
        """See `training_fingerprint`; it depends on the sizes of batches, too."""
        data = self.stored.fingerprint
        return training_fingerprint(model, self.nodes, *identity, *self._sizes, weights=weights, data=data)

    @property
    def _sizes(self) -> tuple[object, ...]:
        sizes = self.batch_size, self.fan_out
        return sizes if self.epoch_size is None else (*sizes, self.epoch_size)

    @cached_property
    def feature_range(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest value of each feature, [F] each."""
        ranges = [features.range() for _, features in _feature_blocks(self.stored)]
        low, high = zip(*ranges, strict=True)
        return torch.stack(low).amin(0), torch.stack(high).amax(0)


def _fan_out(counts: int | Sequence[int] | None, layers: int) -> tuple[int, ...]:
    if counts is None or isinstance(counts, int):
        return (FAN_OUT if counts is None else counts,) * layers
    if len(counts) != layers:
        raise InputError(
            f"`fan_out` must be one number, or one for each of the model's {layers} attention layers (and"
            f" other message-passing layers), got {list(counts)}"
        )
    return tuple(counts)


def _streamed(model: nn.Module) -> nn.Module:
    """The model; of fgai's a copy on the CPU, from where they read stored graphs."""
    away = _is_own(model) and any(part.device.type != "cpu" for part in model.parameters())
    return duplicate(model).cpu() if away else model
