"""Recipes in mini-batches: the loss is that of the whole graph, on the seeds of a batch."""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fgai.attacks import draw_endpoints
from fgai.attention import LayerAttention, call_model, entry_limits, evaluating, straight_through
from fgai.attention.calls import device_of
from fgai.errors import InputError
from fgai.large.observation import StoredObservation
from fgai.large.source import _PreparedBatch, _StoredSource
from fgai.large.stored import StoredGraph
from fgai.large.streaming import _exact_pass
from fgai.large.write import write_store
from fgai.models import as_graph
from fgai.sparse import Adjacency
from fgai.tasks import task_of
from fgai.training.adversary import InjectionAdversary
from fgai.training.faithful import FaithfulBase, FaithfulLoss, StepAttack
from fgai.training.hardening import AdversarialRecipe
from fgai.training.loop import SCORE_STEPS
from fgai.training.recipes import Recipe, Step, VanillaRecipe, labelled_rows, supervised_loss
from fgai.training.settings import FaithfulSettings, HardenSettings
from fgai.training.terms import (
    Reach,
    Term,
    VanillaOutputs,
    contrast,
    layer_sharpness,
    relative_contrasts,
    spread,
)

FEW = 4  # batches from which the reach of the adversary is taken before the first epoch
EVERYWHERE = Reach([], 1.0)
_Losses = Iterator[dict[str, Tensor]]


class _StoredOutputs:
    """Logits and attention of the vanilla model on the whole graph, frozen, and the scales of the terms."""

    def __init__(self, vanilla: StoredObservation, loops: bool) -> None:
        self.vanilla, self.loops = vanilla, loops
        self.layers = range(len(vanilla.layers))
        nodes, several = 0, 0  # of the latter every node has two neighbours or more
        total, contrasts, sharpness = 0.0, [0.0] * len(self.layers), [0.0] * len(self.layers)
        for logits, rowptr, attention, _ in vanilla._node_blocks():
            rows, ranked = len(logits), int((rowptr.diff() >= 2).sum())
            destination = torch.repeat_interleave(torch.arange(rows), rowptr.diff())
            total += rows * float(spread(logits))
            for index, w in enumerate(attention):
                contrasts[index] += rows * contrast(w, rowptr)
                sharpness[index] += ranked * float(layer_sharpness(w, rowptr, destination))
            nodes, several = nodes + rows, several + ranked
        self.logit_spread = total / nodes
        self.contrasts = relative_contrasts([value / nodes for value in contrasts])
        self.sharpness = [value / max(1, several) for value in sharpness]

    def of(self, batch: _PreparedBatch) -> VanillaOutputs:
        """Return the outputs for a mini-batch; attention is divided by its sum over the neighbours drawn."""
        graph, seeds = batch.graph, batch.seeds
        logits = torch.from_numpy(self.vanilla.logits[batch.nodes.numpy()]).to(graph.device)
        looped = self.loops and not graph.has_loops
        adjacency = (graph.add_self_loops()[0] if looped else graph).adjacency
        layers = self._attention(batch, adjacency)
        into = int(adjacency.rowptr[seeds])
        return VanillaOutputs(
            logits=logits[:seeds],
            classes=logits.argmax(1),
            layers=layers,
            attention=[layer.heads()[:into] for layer in layers],
            ranking=[layer.ranking()[:into] for layer in layers],
            rowptrs=[adjacency.rowptr[: seeds + 1]] * len(layers),
            contrasts=self.contrasts,
            sharpness=self.sharpness,
            logit_spread=self.logit_spread,
            depths=list(self.layers),
        )

    def _attention(self, batch: _PreparedBatch, adjacency: Adjacency) -> tuple[LayerAttention, ...]:
        """The attention on all edges of a batch, layer by layer."""
        graph = batch.graph
        ends = [batch.nodes[end.cpu()].numpy() for end in (adjacency.source, adjacency.destination)]
        positions = self.vanilla.positions(*ends)
        layers = []
        for number, name in enumerate(self.vanilla.layers):
            w = torch.from_numpy(self.vanilla.attention(number)[positions, 0]).to(graph.device)
            sums = w.new_zeros(graph.num_nodes).index_add(0, adjacency.destination, w)
            w = w / sums[adjacency.destination].clamp(min=torch.finfo(w.dtype).tiny)
            scores = self.vanilla.scores(number)
            assert scores is not None
            ranks = torch.from_numpy(scores[positions]).to(graph.device)
            layers.append(LayerAttention.from_adjacency(adjacency, w[:, None], name, ranks))
        return tuple(layers)


class _BatchRecipe(Recipe):
    """Training batch by batch; limits take their ranges from all nodes before each epoch and validation."""

    mini_batches = True
    source: _StoredSource
    settings: Any = None  # with limits
    seeds: Tensor | None = None  # nodes of an epoch; None for all
    measured = False  # whether the ranges of limits are those of the current weights

    @property
    def steps_per_epoch(self) -> int:
        return self.source.num_steps(self.source.stored.num_nodes if self.seeds is None else len(self.seeds))

    def steps(self, model: nn.Module, epoch: int) -> Iterator[Step]:
        """Yield one step per batch."""
        self._measure(model)
        first = epoch * self.steps_per_epoch
        for number, batch in enumerate(self.source.own_batches(model, self.seeds, epoch), first):
            yield Step(0 if batch is None else batch.seeds, self._parts(model, batch, number))
            self.measured = False

    @abstractmethod
    def _parts(self, model: nn.Module, batch: _PreparedBatch | None, step: int) -> _Losses:
        """Yield the loss of this process's batch, see `Recipe.losses`; there may be none."""

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore the adversary; the weights have changed since limits were measured."""
        super().load_state(state)
        self.measured = False

    def _measure(self, model: nn.Module) -> None:
        """Take the ranges of the limits, if the weights have changed since the last time."""
        if self.settings is not None and self.settings.limits and not self.measured:
            self.source.set_ranges(model, self.settings.clip_share, self.settings.shrink, sampled=True)
            self.measured = True


class _VanillaBatches(_BatchRecipe):
    """Cross-entropy on the training nodes, batch by batch; scored on fixed batches of validation nodes."""

    name = VanillaRecipe.name

    def __init__(self, source: _StoredSource) -> None:
        self.source = source
        self.seeds, _ = labelled_rows(source.node_graph, "train_mask")
        self.val_nodes, _ = labelled_rows(source.node_graph, "val_mask")

    def start(self, model: nn.Module, seed: int) -> None:
        """Check the model; there are no vanilla outputs."""
        super().start(model, seed)
        norms = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        if norms and self.source.group.is_distributed:
            raise InputError('several processes cannot train BatchNorm; use `norm="layer"` or one process')

    def _parts(self, model: nn.Module, batch: _PreparedBatch | None, step: int) -> _Losses:
        if batch is not None:
            yield supervised_loss(model, batch.graph, *_seed_labels(batch))

    def score(self, model: nn.Module) -> float:
        """Return the validation accuracy minus a thousandth of a bounded loss, as `VanillaRecipe` does."""
        right, loss = 0.0, 0.0
        with evaluating(model), torch.no_grad():
            for batch in self.source.batches(model, self.val_nodes, 0, shuffle=False):
                rows, labels = _seed_labels(batch)
                logits = call_model(model, batch.graph).index_select(0, rows)
                right += float((logits.argmax(1) == labels).sum())
                loss += float(cross_entropy(logits, labels, reduction="sum"))
        count = len(self.val_nodes)
        return right / count - 1e-3 * float(torch.tanh(torch.tensor(loss / count)))


def _seed_labels(batch: _PreparedBatch) -> tuple[Tensor, Tensor]:
    """The rows of the seeds and their labels."""
    assert batch.graph.y is not None
    return torch.arange(batch.seeds, device=batch.graph.device), batch.graph.y[: batch.seeds]


class _FaithfulBatches(_BatchRecipe, FaithfulBase):
    """Faithful training, batch by batch over all nodes; vanilla outputs come from an exact pass.

    One adversary serves all batches and ranks: a share of its nodes joins the seeds of a batch. The share of
    seeds they reach, measured on the first batches, divides the attacked terms.
    """

    def __init__(
        self,
        vanilla: nn.Module,
        source: _StoredSource,
        settings: FaithfulSettings,
        terms: Sequence[Term] = (),
    ) -> None:
        nodes = source.node_graph.to(device_of(vanilla, source.node_graph))
        super().__init__(vanilla, nodes, settings, terms, source.feature_range)
        self.source = source
        self.val_nodes = task_of(source.node_graph).nodes(source.node_graph, "val")
        self.fit, self.val = (_mask(source, each) for each in (self.adversary.endpoint_pool, self.val_nodes))

    def start(self, model: nn.Module, seed: int) -> None:
        """Compute the vanilla outputs, and let the adversary climb a little before the first epoch."""
        self.seed = seed
        loops = _exact_pass(self.vanilla, self.source.stored).loops
        self.outputs = _StoredOutputs(self.source.observe(self.vanilla, ranked=True), loops)
        self._measure(model)
        if self.injects:
            with evaluating(model, freeze=True):
                self._start_adversary(model, self._generator(-1))

    def _start_adversary(self, model: nn.Module, generator: torch.Generator) -> None:
        self.adversary.start(generator, entry_limits(model))
        batches = list(islice(self.source.batches(model, None, 0), FEW))
        self.reach = self._reach(self.adversary, batches, self.fit, generator)
        self.validation = self.adversary.copy()
        few = list(islice(self.source.batches(model, self.val_nodes, 0, shuffle=False), FEW))
        self.validation_reach = self._reach(self.validation, few, self.val, self._generator(-2))
        for batch in islice(cycle(batches), SCORE_STEPS):
            attack = _inject(self.adversary, batch, self.fit, generator, self.reach)
            if attack is not None:
                self._loss(batch).collect_gradient(model, attack)

    def _reach(
        self,
        adversary: InjectionAdversary,
        batches: list[_PreparedBatch],
        pool: Tensor,
        generator: torch.Generator,
    ) -> Reach:
        """The shares of the seeds that an adversary reaches, over some batches."""
        layers, predictions, seeds = torch.zeros(len(self.outputs.layers)), 0.0, 0
        for batch in batches:
            attack = _inject(adversary, batch, pool, generator)
            if attack is not None:
                nodes = adversary.ascend_and_inject(batch.graph, attack.endpoints, attack.subset)[0]
                reach = self.outputs.of(batch).reach(batch.graph, nodes)
                layers += batch.seeds * torch.tensor(reach.layers)
                predictions += batch.seeds * reach.predictions
            seeds += batch.seeds
        least = 1.0 / seeds
        return Reach([max(float(value), least) for value in layers / seeds], max(predictions / seeds, least))

    def _parts(self, model: nn.Module, batch: _PreparedBatch | None, step: int) -> _Losses:
        """Yield the terms of this rank's batch; the adversary ascends on all ranks, also where none joins."""
        due, rise = self._schedule(step, self.steps_per_epoch)
        climbs, group = self.settings.steps if due != "clean" else 0, self.source.group
        generator = self._generator(step * group.size + group.rank)
        attacks: list[StepAttack] = []
        if batch is not None:
            drawn = [_inject(self.adversary, batch, self.fit, generator, self.reach) for _ in range(climbs)]
            attacks = [attack for attack in drawn if attack is not None]
            loss = self._loss(batch)
            risen = loss.vanilla_outputs.logits.new_tensor(rise)
            yield from loss.losses(model, due if attacks else "clean", attacks, risen)
        if attacks:
            self.adversary.sum_gradients()
        for _ in range(0 if attacks else climbs):
            self.adversary.ascend()
            self.adversary.sum_gradients()

    def score(self, model: nn.Module) -> float:
        """Return minus the total on the validation nodes, under a fresh attack; needs no labels."""
        self._measure(model)
        total, generator = 0.0, self._generator(-2)
        for batch in self.source.batches(model, self.val_nodes, 0, shuffle=False):
            attack = None
            if self.injects:
                attack = _inject(self.validation, batch, self.val, generator, self.validation_reach)
            total += batch.seeds * float(self._loss(batch).score(model, attack))
        return total / len(self.val_nodes)

    def _loss(self, batch: _PreparedBatch) -> FaithfulLoss:
        return FaithfulLoss(batch.graph, self.outputs.of(batch), self.settings, self.terms, sets_ranges=False)


class _HardenBatches(_VanillaBatches):
    """Adversarial training, batch by batch over the training nodes, with one adversary for all batches."""

    injects = True
    stream = AdversarialRecipe.stream

    def __init__(self, model: nn.Module, source: _StoredSource, settings: HardenSettings) -> None:
        super().__init__(source)
        self.name = settings.method
        self.settings, self.weight = settings, settings.attack_weight
        nodes = source.node_graph.to(device_of(model, source.node_graph))
        self.adversary = InjectionAdversary(nodes, settings.budget, source.feature_range)
        self.adversary.check_box()
        self.fit, self.val = (_mask(source, each) for each in (self.adversary.endpoint_pool, self.val_nodes))

    def start(self, model: nn.Module, seed: int) -> None:
        """Draw the first features."""
        super().start(model, seed)
        self._measure(model)
        self.adversary.start(self._generator(-1), entry_limits(model))
        self.validation = self.adversary.copy()

    def _parts(self, model: nn.Module, batch: _PreparedBatch | None, step: int) -> _Losses:
        """Yield the clean cross-entropy, then the attacked one; the adversary ascends on all ranks."""
        group, attack = self.source.group, None
        generator = self._generator(step * group.size + group.rank)
        if batch is not None:
            rows, labels = _seed_labels(batch)
            with straight_through(model):
                clean = cross_entropy(call_model(model, batch.graph).index_select(0, rows), labels)
            yield {"clean": clean, "total": (1 - self.weight) * clean}
            del clean
            attack = _inject(self.adversary, batch, self.fit, generator)
        if batch is not None and attack is not None:
            logits = self.adversary.attacked_logits(model, batch.graph, attack.endpoints, attack.subset)
            hit = cross_entropy(logits.index_select(0, rows), labels)
            yield {"attacked": hit, "total": self.weight * hit}
        else:
            self.adversary.ascend()
        self.adversary.sum_gradients()

    def score(self, model: nn.Module) -> float:
        """Return the mean of clean and attacked validation accuracy, ties broken by a lower clean loss."""
        self._measure(model)
        generator, right = self._generator(-2), 0.0
        for batch in self.source.batches(model, self.val_nodes, 0, shuffle=False):
            rows, labels = _seed_labels(batch)
            attack = _inject(self.validation, batch, self.val, generator)
            assert attack is not None  # all seeds are validation nodes
            self.validation.restart()
            with evaluating(model, freeze=True):
                for step in range(SCORE_STEPS + 1):
                    logits = self.validation.attacked_logits(
                        model, batch.graph, attack.endpoints, attack.subset
                    ).index_select(0, rows)
                    if step < SCORE_STEPS:
                        cross_entropy(logits, labels).backward()  # type: ignore[no-untyped-call]
            right += float((logits.argmax(1) == labels).sum())
        return (super().score(model) + right / len(self.val_nodes)) / 2


def _inject(
    adversary: InjectionAdversary,
    batch: _PreparedBatch,
    pool: Tensor,
    generator: torch.Generator,
    reach: Reach = EVERYWHERE,
) -> StepAttack | None:
    """Let a share of an adversary's nodes join new endpoints among the seeds in a pool; None without any."""
    seeds = batch.nodes[: batch.seeds]
    order = seeds.argsort()  # draws depend on which nodes there are, not on their order
    joinable = order[pool[seeds[order]]]
    if not joinable.numel():
        return None
    nodes, device = len(adversary.features), batch.graph.device
    count = min(nodes, max(1, round(nodes * joinable.numel() / int(pool.sum()))))
    some = torch.arange(nodes)
    if count < nodes:
        some = torch.randperm(nodes, generator=generator)[:count].sort().values
    each = min(adversary.budget.edges, joinable.numel())
    endpoints = draw_endpoints(joinable, count, each, generator)
    return StepAttack(adversary, endpoints.to(device), reach, some.to(device))


def _mask(source: _StoredSource, nodes: Tensor) -> Tensor:
    return torch.zeros(source.stored.num_nodes, dtype=torch.bool).index_fill_(0, nodes.cpu(), True)


class _TrainingSource(_StoredSource):
    """A stored graph and the recipes that train on its mini-batches; see `_WholeGraph`."""

    def vanilla(self) -> Recipe:
        return _VanillaBatches(self)

    def faithful(self, model: nn.Module, settings: FaithfulSettings, terms: Sequence[Term] = ()) -> Recipe:
        return _FaithfulBatches(model, self, settings, terms)

    def harden(self, model: nn.Module, settings: HardenSettings) -> Recipe:
        return _HardenBatches(model, self, settings)


@contextmanager
def stored_source(data: Any, seed: int) -> Iterator[_TrainingSource]:
    """Yield a graph as mini-batch training reads it; intermediate files are removed afterwards.

    A stored graph is given itself or as its folder; a `Graph` or PyG `Data` of nodes is stored first. The
    seed is that of the neighbours drawn, and of the split where the graph has none.
    """
    with tempfile.TemporaryDirectory(prefix="fgai-") as name:
        folder = Path(name)
        if isinstance(data, str | Path):
            data = StoredGraph(data)
        if isinstance(data, StoredGraph):
            data.verify()
        else:
            graph = as_graph(data)
            if task_of(graph).name != "node":
                name = graph.name
                raise InputError(f"`batch_size` is for nodes; {name!r} has links or graphs, leave it out")
            data = write_store(graph.to("cpu"), folder / "graph")
        yield _TrainingSource(data, folder, seed)
