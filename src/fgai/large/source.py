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
from fgai.training.resume import run_label
from fgai.version import versions

T = TypeVar("T")
FAN_OUT = 10  # neighbours that are drawn of each node where nothing is said


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

    def batched_for(
        self,
        model: nn.Module,
        batch_size: int,
        fan_out: int | Sequence[int] | None,
        epoch_size: int | None = None,
    ) -> None:
        """Say for which model batches are, how large, and how many seeds an epoch has at most."""
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
        self,
        model: nn.Module,
        nodes: Tensor | None,
        epoch: int,
        *,
        shuffle: bool = True,
        most: int | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> Iterator[_PreparedBatch]:
        """Yield mini-batches around some nodes; they depend on the seed, the epoch and the nodes alone."""
        self.sampler.epoch = epoch
        order: dict[str, Any] = {"shuffle": shuffle, "most": most, "rank": rank, "ranks": ranks}
        for batch in Batches(self.stored, self.sampler, nodes, batch_size=self.batch_size, **order):
            yield _PreparedBatch(_ready(model, batch.graph), batch.nodes, batch.num_seeds)

    def own_parts(
        self, model: nn.Module, nodes: Tensor | None, epoch: int
    ) -> Iterator[_PreparedBatch | None]:
        """Yield this rank's mini-batches of `parts`, one for each step; None where it has none."""
        done, count = 0, self.stored.num_nodes if nodes is None else len(nodes)
        shared: dict[str, Any] = {"rank": self.ranks.rank, "ranks": self.ranks.size}
        own = self.parts(model, nodes, epoch, most=self.epoch_size, **shared)
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
        place = Path(ranks.first(tempfile.mkdtemp(dir=self.folder))) / "seen"
        if not ranks.several:
            found = self._on_device(model, lambda there: there.observe(model, place, ranked=ranked))
            if found is not None:
                return found
        options: dict[str, Any] = {"heads": "mean", "ranked": ranked, "ranks": ranks}
        return observe_store(_streamed(model), self.stored, place, **options)

    def set_ranges(
        self, model: nn.Module, clip_share: float, shrink: float, *, sampled: bool = False
    ) -> None:
        """Take the ranges of a model's limits from all nodes."""
        sizes = clip_share, shrink
        if self._on_device(model, lambda there: there.measure(model, *sizes, sampled=sampled)) is not None:
            return
        here = _streamed(model)
        measure_store(
            here, self.stored, clip_share=clip_share, shrink=shrink, sampled=sampled, folder=self.folder
        )
        if here is not model:
            for mine, found in zip(limits_of(model), limits_of(here), strict=True):
                mine.set(found.low, found.high, found.radius, found.usual)

    def _on_device(self, model: nn.Module, run: Callable[[_Resident], T]) -> T | None:
        """What a pass gives over the graph on the model's GPU, loaded once; None if it has no room for it."""
        if not _is_own(model):
            return None
        known = self._loaded is not None and self._loaded.serves(model)
        if self._crowded or not (known or _Resident.fits(model, self.stored)):
            return None
        try:
            if not known:
                self._loaded = None  # gone before the next one comes
                self._loaded = _Resident(model, self.stored, self.folder)
            assert self._loaded is not None
            return run(self._loaded)
        except torch.OutOfMemoryError:  # others have taken what was free
            self._loaded, self._crowded = None, True
            return None

    def agree(self, model: nn.Module, *settings: object) -> None:
        """Make sure that all ranks train the same model on the same graph in the same way."""
        if self.ranks.several:
            self.ranks.agree({
                **{f"version of {name}": version for name, version in versions().items()},
                "graph": self.stored.fingerprint,
                "settings": repr((*settings, *self._sizes)),
                "model": self.label(model, weights=True),
            })  # fmt: skip

    def label(self, model: nn.Module, *parts: object, weights: bool = False) -> str:
        """Name what is trained on what, see `run_label`; batches of another size are another training."""
        data = self.stored.fingerprint
        return run_label(model, self.nodes, *parts, *self._sizes, weights=weights, data=data)

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


def _fan_out(given: int | Sequence[int] | None, layers: int) -> tuple[int, ...]:
    if given is None or isinstance(given, int):
        return (FAN_OUT if given is None else given,) * layers
    if len(given) != layers:
        raise InputError(
            f"`fan_out` must be one number, or one for each of the model's {layers} attention layers (and"
            f" other message-passing layers), got {list(given)}"
        )
    return tuple(given)


def _ready(model: nn.Module, graph: Graph) -> Graph:
    """Return a mini-batch as a model reads it; that a PyG model can read it was checked once, on a part."""
    return prepared(model, graph) if _is_own(model) else graph.to(device_of(model, graph))


def _streamed(model: nn.Module) -> nn.Module:
    """The model; of fgai's a copy on the CPU, from where they read stored graphs."""
    away = _is_own(model) and any(part.device.type != "cpu" for part in model.parameters())
    return duplicate(model).cpu() if away else model
