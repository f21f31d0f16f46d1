"""Recipes in mini-batches: what is minimised is that of the whole graph, seed by seed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fgai.attacks import draw_endpoints
from fgai.attention import LayerAttention, call_model, entry_limits, evaluating, straight_through
from fgai.attention.calls import device_of
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.large.observation import StoredObservation
from fgai.large.sort import _row_blocks
from fgai.large.source import _PreparedBatch, _StoredSource
from fgai.large.stored import StoredGraph, open_store
from fgai.large.streaming import _reads_loops
from fgai.large.write import write_store
from fgai.models import as_graph
from fgai.sparse import Adjacency
from fgai.tasks import task_of
from fgai.training.adversary import InjectionAdversary
from fgai.training.faithful import FaithfulRecipe
from fgai.training.hardening import Adversarial
from fgai.training.loop import PROBE, Recipe, Step, epoch_seed
from fgai.training.loss import FaithfulLoss, InjectedNodes
from fgai.training.recipes import Vanilla, labelled, supervised
from fgai.training.settings import FaithfulSettings, HardenSettings
from fgai.training.targets import Reach, Targets, contrast, layer_sharpness, relative_contrasts, spread
from fgai.training.terms import Term

BLOCK = 1 << 18  # edges and nodes that are in memory together


class _StoredTargets:
    """Logits and attention of the vanilla model on the whole graph, frozen, and the scales of the terms."""

    def __init__(self, found: StoredObservation, loops: bool) -> None:
        self.found, self.loops = found, loops
        self.layers = range(len(found.layers))
        nodes, many = 0, 0
        total, contrasts, sharpness = 0.0, [0.0] * len(self.layers), [0.0] * len(self.layers)
        for logits, rowptr, attention in self._blocks():
            rows, several = len(logits), int((rowptr.diff() >= 2).sum())
            destination = torch.repeat_interleave(torch.arange(rows), rowptr.diff())
            total += rows * float(spread(logits))
            for index, w in enumerate(attention):
                contrasts[index] += rows * contrast(w, rowptr)
                sharpness[index] += several * float(layer_sharpness(w, rowptr, destination))
            nodes, many = nodes + rows, many + several
        self.scale = total / nodes
        self.contrasts = relative_contrasts([value / nodes for value in contrasts])
        self.sharpness = [value / max(1, many) for value in sharpness]

    def _blocks(self) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Logits, row pointers and attention per layer, of blocks of rows."""
        rowptr = self.found.rows.rowptr
        for first, last in _row_blocks(rowptr, BLOCK, BLOCK):
            edges = slice(int(rowptr[first]), int(rowptr[last]))
            attention = [np.array(self.found.attention(layer)[edges, 0]) for layer in self.layers]
            yield (
                torch.from_numpy(np.array(self.found.logits[first:last])),
                torch.from_numpy(np.array(rowptr[first : last + 1]) - rowptr[first]),
                [torch.from_numpy(w) for w in attention],
            )

    def of(self, part: _PreparedBatch) -> Targets:
        """Return the targets of a mini-batch; attention is divided by its sum over the neighbours drawn."""
        graph, seeds = part.graph, part.seeds
        logits = torch.from_numpy(self.found.logits[part.nodes.numpy()]).to(graph.device)
        adjacency = self._adjacency(graph)
        layers = self._attention(part, adjacency)
        rowptr = adjacency.rowptr
        into = int(rowptr[seeds])
        values = [layer.heads()[:into] for layer in layers]
        rowptrs = [rowptr[: seeds + 1]] * len(layers)
        return Targets(
            logits=logits[:seeds],
            classes=logits.argmax(1),
            layers=layers,
            attention=values,
            ranking=[layer.ranking()[:into] for layer in layers],
            rowptrs=rowptrs,
            contrasts=self.contrasts,
            sharpness=self.sharpness,
            scale=self.scale,
            depths=list(range(len(self.found.layers))),
        )

    def _adjacency(self, graph: Graph) -> Adjacency:
        """The edges that the attention layers read in a batch, with the self-loops that they add."""
        looped = self.loops and not graph.has_loops
        return (graph.add_self_loops()[0] if looped else graph).adjacency

    def _attention(self, part: _PreparedBatch, adjacency: Adjacency) -> tuple[LayerAttention, ...]:
        """The attention on all edges of a batch, layer by layer."""
        graph: Graph = part.graph
        ends = [part.nodes[end.cpu()].numpy() for end in (adjacency.source, adjacency.destination)]
        places = self.found.positions(*ends)
        layers = []
        for layer in self.layers:
            w = torch.from_numpy(self.found.attention(layer)[places, 0]).to(graph.device)
            sums = w.new_zeros(graph.num_nodes).index_add(0, adjacency.destination, w)
            w = w / sums[adjacency.destination].clamp(min=torch.finfo(w.dtype).tiny)
            scores = self.found.scores(layer)
            assert scores is not None
            ranks = torch.from_numpy(scores[places]).to(graph.device)
            layers.append(LayerAttention.on(adjacency, w[:, None], self.found.layers[layer], ranks))
        return tuple(layers)


FEW = 4  # batches from which the reach of the adversary is taken before the first epoch


class _VanillaBatches(Recipe):
    """Cross-entropy on the training nodes, batch by batch; scored on fixed batches of validation nodes."""

    name = Vanilla.name
    batched = True

    def __init__(self, whole: _StoredSource) -> None:
        self.whole = whole
        self.train_nodes, _ = labelled(whole.nodes, "train_mask")
        self.val_nodes, _ = labelled(whole.nodes, "val_mask")

    def start(self, model: nn.Module, seed: int) -> None:
        """Nothing to freeze."""
        norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        if norms and self.whole.ranks.several:
            raise InputError(
                'BatchNorm is not supported with several processes; use `norm="layer"` or one process'
            )

    @property
    def steps_per_epoch(self) -> int:
        return self.whole.num_steps(len(self.train_nodes))

    def steps(self, model: nn.Module, epoch: int) -> Iterator[Step]:
        """Yield one step per batch of training nodes."""
        for part in self.whole.own_parts(model, self.train_nodes, epoch):
            yield Step(0 if part is None else part.seeds, self._parts(model, part))

    def _parts(self, model: nn.Module, part: _PreparedBatch | None) -> Iterator[dict[str, Tensor]]:
        if part is not None:
            yield supervised(model, part.graph, *_lesson(part))

    def score(self, model: nn.Module) -> float:
        """Return the validation accuracy minus a thousandth of a bounded loss, as `Vanilla` does."""
        right, loss = 0.0, 0.0
        with evaluating(model), torch.no_grad():
            for part in self.whole.parts(model, self.val_nodes, 0, shuffle=False):
                rows, labels = _lesson(part)
                logits = call_model(model, part.graph).index_select(0, rows)
                right += float((logits.argmax(1) == labels).sum())
                loss += float(cross_entropy(logits, labels, reduction="sum"))
        count = len(self.val_nodes)
        return right / count - 1e-3 * float(torch.tanh(torch.tensor(loss / count)))


def _lesson(part: _PreparedBatch) -> tuple[Tensor, Tensor]:
    """The rows of the seeds and their labels."""
    assert part.graph.y is not None
    return torch.arange(part.seeds, device=part.graph.device), part.graph.y[: part.seeds]


class _MeasuredLimits:
    """Limits whose ranges are taken from all nodes where the weights have changed since the last time."""

    whole: _StoredSource
    settings: Any
    measured = False

    def _measure(self, model: nn.Module) -> None:
        """Take the ranges of the limits, before an epoch or a validation."""
        if self.settings.limits and not self.measured:
            self.whole.set_ranges(model, self.settings.clip_share, self.settings.shrink, sampled=True)
            self.measured = True


class _FaithfulBatches(_MeasuredLimits, FaithfulRecipe):
    """Faithful training, batch by batch over all nodes.

    Vanilla targets and the ranges of limits come from exact passes over the whole graph, the latter every
    epoch. One adversary serves all batches and ranks: a batch borrows a share of its nodes, which join seeds
    alone. The share of seeds they reach, measured on the first batches, divides the attacked terms.
    """

    batched = True

    def __init__(
        self,
        vanilla: nn.Module,
        whole: _StoredSource,
        settings: FaithfulSettings,
        terms: Sequence[Term] = (),
    ) -> None:
        nodes = whole.nodes.to(device_of(vanilla, whole.nodes))
        super().__init__(vanilla, nodes, settings, terms, whole.feature_range)
        self.whole, self.count = whole, whole.stored.num_nodes
        self.val_nodes = task_of(whole.nodes).nodes(whole.nodes, "val")
        self.fit, self.val = (_mask(each, self.count) for each in (self.adversary.nodes, self.val_nodes))

    def start(self, model: nn.Module, seed: int) -> None:
        """Freeze the vanilla targets, and let the adversary climb a little before the first epoch."""
        self.seed = seed
        loops = _reads_loops(self.vanilla, self.whole.stored)
        self.targets = _StoredTargets(self.whole.observe(self.vanilla, ranked=True), loops)
        self._measure(model)
        if self.injects:
            with evaluating(model, freeze=True):
                self._start_adversary(model, self._generator(-1))

    def _start_adversary(self, model: nn.Module, generator: torch.Generator) -> None:
        self.adversary.start(generator, entry_limits(model))
        parts = list(islice(self.whole.parts(model, None, 0), FEW))
        self.reach = self._reach(self.adversary, parts, self.fit, generator)
        self.probe = self.adversary.restarted()
        few = list(islice(self.whole.parts(model, self.val_nodes, 0, shuffle=False), FEW))
        self.probe_reach = self._reach(self.probe, few, self.val, self._generator(-2))
        for part in islice(cycle(parts), PROBE):
            attack = self._attack(part, generator)
            if attack is not None:
                self._loss(part).ascend(model, attack)

    def _reach(
        self,
        adversary: InjectionAdversary,
        parts: list[_PreparedBatch],
        pool: Tensor,
        generator: torch.Generator,
    ) -> Reach:
        """Which shares of the seeds an adversary reaches, over some batches."""
        layers, predictions, seeds = torch.zeros(len(self.targets.layers)), 0.0, 0
        for part in parts:
            attack = self._injection(adversary, part, pool, Reach([], 1.0), generator)
            if attack is not None:
                found = self.targets.of(part).reach(part.graph, attack.join(part.graph)[0])
                layers += part.seeds * torch.tensor(found.layers)
                predictions += part.seeds * found.predictions
            seeds += part.seeds
        least = 1.0 / seeds
        return Reach([max(float(value), least) for value in layers / seeds], max(predictions / seeds, least))

    @property
    def steps_per_epoch(self) -> int:
        return self.whole.num_steps(self.count)

    def steps(self, model: nn.Module, epoch: int) -> Iterator[Step]:
        """Yield one step per batch of all nodes; with `turns`, clean and attacked ones alternate."""
        self._measure(model)
        first = epoch * self.steps_per_epoch
        for number, part in enumerate(self.whole.own_parts(model, None, epoch), first):
            yield Step(0 if part is None else part.seeds, self._parts(model, part, number))
            self.measured = False

    def _parts(self, model: nn.Module, part: _PreparedBatch | None, step: int) -> Iterator[dict[str, Tensor]]:
        """The terms of this rank's batch; the adversary climbs on all ranks, also where it joins none."""
        due, rise = self._due(step, self.steps_per_epoch)
        climbs, ranks = self.settings.steps if due != "clean" else 0, self.whole.ranks
        generator = self._generator(step * ranks.size + ranks.rank)
        attacks: list[InjectedNodes] = []
        if part is not None:
            found = [self._attack(part, generator) for _ in range(climbs)]
            attacks = [attack for attack in found if attack is not None]
            loss = self._loss(part)
            risen = loss.targets.logits.new_tensor(rise)
            yield from loss.parts(model, due if attacks else "clean", attacks, risen)
        if attacks:
            self.adversary.add_up()
        for _ in range(0 if attacks else climbs):
            self.adversary.climb()
            self.adversary.add_up()

    def score(self, model: nn.Module) -> float:
        """Return minus the total on the validation nodes, under a fresh attack; needs no labels."""
        self._measure(model)
        total, generator = 0.0, self._generator(-2)
        for part in self.whole.parts(model, self.val_nodes, 0, shuffle=False):
            probe = None
            if self.injects:
                probe = self._injection(self.probe, part, self.val, self.probe_reach, generator)
            total += part.seeds * float(self._loss(part).score(model, probe))
        return total / len(self.val_nodes)

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take the adversary's features back; the model has other weights, too, since it was measured."""
        super().load_state(state)
        self.measured = False

    def _loss(self, part: _PreparedBatch) -> FaithfulLoss:
        return FaithfulLoss(part.graph, self.targets.of(part), self.settings, self.terms, measures=False)

    def _attack(self, part: _PreparedBatch, generator: torch.Generator) -> InjectedNodes | None:
        """Return the training's own adversary at fresh endpoints; None in a batch it cannot join."""
        return self._injection(self.adversary, part, self.fit, self.reach, generator)

    def _injection(
        self,
        adversary: InjectionAdversary,
        part: _PreparedBatch,
        pool: Tensor,
        reach: Reach,
        generator: torch.Generator,
    ) -> InjectedNodes | None:
        found = _borrowed(adversary, part, pool, generator)
        return None if found is None else InjectedNodes(adversary, found[0], reach, found[1])


class _HardenBatches(_MeasuredLimits, _VanillaBatches):
    """Adversarial training, batch by batch over the training nodes.

    The ranges of limits come from exact passes over the whole graph every epoch. One adversary serves all
    batches and ranks: a batch borrows a share of its nodes, which join seeds alone.
    """

    name = Adversarial.name

    def __init__(self, model: nn.Module, whole: _StoredSource, settings: HardenSettings) -> None:
        super().__init__(whole)
        self.settings, self.weight, self.seed = settings, settings.attack_weight, 0
        nodes = whole.nodes.to(device_of(model, whole.nodes))
        self.adversary = InjectionAdversary(nodes, settings.budget, whole.feature_range)
        self.adversary.check_box()
        self.fit, self.val = (
            _mask(each, whole.stored.num_nodes) for each in (self.adversary.nodes, self.val_nodes)
        )

    def start(self, model: nn.Module, seed: int) -> None:
        """Draw the first features."""
        super().start(model, seed)
        self.seed = seed
        self._measure(model)
        self.adversary.start(self._generator(-1), entry_limits(model))
        self.probe = self.adversary.restarted()

    def steps(self, model: nn.Module, epoch: int) -> Iterator[Step]:
        """Yield one step per batch of training nodes."""
        self._measure(model)
        first = epoch * self.steps_per_epoch
        for number, part in enumerate(self.whole.own_parts(model, self.train_nodes, epoch), first):
            yield Step(0 if part is None else part.seeds, self._both(model, part, number))
            self.measured = False

    def _both(self, model: nn.Module, part: _PreparedBatch | None, step: int) -> Iterator[dict[str, Tensor]]:
        """The clean cross-entropy, then the attacked one; the adversary climbs on all ranks."""
        ranks, found = self.whole.ranks, None
        generator = self._generator(step * ranks.size + ranks.rank)
        if part is not None:
            rows, labels = _lesson(part)
            with straight_through(model):
                clean = cross_entropy(call_model(model, part.graph).index_select(0, rows), labels)
            yield {"clean": clean, "total": (1 - self.weight) * clean}
            del clean
            found = _borrowed(self.adversary, part, self.fit, generator)
        if part is not None and found is not None:
            attacked = self.adversary.joined_to(part.graph, *found)[0]
            with self.adversary.sending_values(found[1]), straight_through(model):
                hit = cross_entropy(call_model(model, attacked).index_select(0, rows), labels)
            yield {"attacked": hit, "total": self.weight * hit}
        else:
            self.adversary.climb()
        self.adversary.add_up()

    def score(self, model: nn.Module) -> float:
        """Return the mean of clean and attacked validation accuracy, ties broken by a lower clean loss."""
        self._measure(model)
        generator = self._generator(-2)
        right = held = loss = 0.0
        for part in self.whole.parts(model, self.val_nodes, 0, shuffle=False):
            rows, labels = _lesson(part)
            with evaluating(model), torch.no_grad():
                logits = call_model(model, part.graph).index_select(0, rows)
            right += float((logits.argmax(1) == labels).sum())
            loss += float(cross_entropy(logits, labels, reduction="sum"))
            logits = self._probed(model, part, generator).index_select(0, rows)
            held += float((logits.argmax(1) == labels).sum())
        count = len(self.val_nodes)
        return (right / count - 1e-3 * float(torch.tanh(torch.tensor(loss / count))) + held / count) / 2

    def _probed(self, model: nn.Module, part: _PreparedBatch, generator: torch.Generator) -> Tensor:
        """The logits of a batch of validation nodes under an attack that begins here."""
        rows, labels = _lesson(part)
        found = _borrowed(self.probe, part, self.val, generator)
        assert found is not None  # all seeds are validation nodes
        self.probe.restart()
        with evaluating(model, freeze=True):
            for step in range(PROBE + 1):
                attacked = self.probe.joined_to(part.graph, *found)[0]
                with self.probe.sending_values(found[1]), straight_through(model):
                    logits = call_model(model, attacked)
                if step < PROBE:
                    loss = cross_entropy(logits.index_select(0, rows), labels)
                    loss.backward()  # type: ignore[no-untyped-call]
        return logits.detach()

    def state(self) -> dict[str, Tensor]:
        """Return the adversary's features."""
        return self.adversary.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take the adversary's features back; the model has other weights, too, since it was measured."""
        self.adversary.load_state(state)
        self.measured = False

    def _generator(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(epoch_seed(self.seed, step) ^ 0x2545F4914)


def _borrowed(
    adversary: InjectionAdversary, part: _PreparedBatch, pool: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor] | None:
    """Endpoints [m, e] among the seeds that are in a pool, and which nodes of an adversary [m] join them.

    As many as the batch has of the pool; None where it has none.
    """
    seeds = part.nodes[: part.seeds]
    order = seeds.argsort()  # draws depend on which nodes there are, not on their order
    joined = order[pool[seeds[order]]]
    if not joined.numel():
        return None
    nodes, device = len(adversary.features), part.graph.device
    count = min(nodes, max(1, round(nodes * joined.numel() / int(pool.sum()))))
    some = torch.arange(nodes)
    if count < nodes:
        some = torch.randperm(nodes, generator=generator)[:count].sort().values
    each = min(adversary.budget.edges, joined.numel())
    endpoints = draw_endpoints(joined, count, each, generator)
    return endpoints.to(device), some.to(device)


def _mask(nodes: Tensor, count: int) -> Tensor:
    mask = torch.zeros(count, dtype=torch.bool)
    mask[nodes.cpu()] = True
    return mask


class _TrainingSource(_StoredSource):
    """A stored graph and the recipes that train on its mini-batches; see `fgai.training.source`."""

    def vanilla(self) -> _VanillaBatches:
        return _VanillaBatches(self)

    def faithful(
        self, model: nn.Module, settings: FaithfulSettings, terms: Sequence[Term] = ()
    ) -> _FaithfulBatches:
        """Return faithful training in mini-batches."""
        return _FaithfulBatches(model, self, settings, terms)

    def harden(self, model: nn.Module, settings: HardenSettings) -> _HardenBatches:
        """Return adversarial training in mini-batches."""
        return _HardenBatches(model, self, settings)


@contextmanager
def stored_source(data: Any, seed: int) -> Iterator[_TrainingSource]:
    """Give a graph as mini-batch training reads it; intermediate files are removed afterwards.

    Args:
        data: a stored graph or its folder; a `Graph` or PyG `Data` of nodes, which is stored first.
        seed: of the neighbours drawn, and of the split where the graph has none.

    Raises:
        InputError: links or small graphs, which mini-batches do not keep.
        DataError: the folder holds no stored graph, or a damaged one.
    """
    with tempfile.TemporaryDirectory(prefix="fgai-") as name:
        folder = Path(name)
        if isinstance(data, str | Path):
            data = open_store(data)
        if isinstance(data, StoredGraph):
            data.verify()
        else:
            graph = as_graph(data)
            if task_of(graph).name != "node":
                raise InputError(
                    f"`batch_size` is for tasks of nodes; {graph.name!r} has links or small graphs, leave it"
                    " out"
                )
            data = write_store(graph.to("cpu"), folder / "graph")
        yield _TrainingSource(data, folder, seed)
