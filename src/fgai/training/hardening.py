"""`harden`: adversarial training behind limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fgai.alone import with_gradients
from fgai.attention import call_model, entry_limits, evaluating, limits_of, straight_through
from fgai.attention.interface import originals
from fgai.graph import Graph
from fgai.progress import shown
from fgai.trackers import Tracker
from fgai.training.adversary import InjectionAdversary
from fgai.training.capture import Drawn
from fgai.training.fine_tuning import _fine_tune
from fgai.training.limiting import _range_pass, set_ranges
from fgai.training.loop import PROBE, epoch_seed
from fgai.training.recipes import Vanilla
from fgai.training.retry import MIN_EPOCHS, _StabilityCheck
from fgai.training.settings import HardenSettings, _resolve
from fgai.training.source import _open_source
from fgai.typed import typed

M = TypeVar("M", bound=nn.Module)


@typed
class Adversarial(Vanilla):
    """Cross-entropy on the clean graph and on one with adversarial nodes.

    The injected features climb the cross-entropy by the gradient of the training step itself and are kept
    from epoch to epoch; endpoints are new every epoch.

    Args:
        graph: prepared for the model, with labels and masks.
        settings: see `HardenSettings`.
    """

    capturable = True

    def __init__(self, graph: Graph, settings: HardenSettings) -> None:
        super().__init__(graph)
        self.name = settings.method
        self.settings, self.weight = settings, settings.attack_weight
        self.shares = settings.clip_share, settings.shrink
        self.adversary = InjectionAdversary(graph, settings.budget)
        self.adversary.check_box()
        self.seed = 0

    def start(self, model: nn.Module, seed: int) -> None:
        """Draw the first features."""
        self.seed = seed
        if limits_of(model):
            set_ranges(model, self.graph, *self.shares)
        self.adversary.start(self._generator(-1), entry_limits(model))
        self.probe, self.probe_endpoints = self.adversary.probe(self._generator(-2))

    def parts(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield the clean cross-entropy, then the attacked one, each with its weight."""
        endpoints = self.adversary.draw(self._generator(epoch)).to(self.graph.device)
        return self._parts(model, *self.batch(epoch), endpoints)

    def draw(self, epoch: int) -> Drawn | None:
        """Return the endpoints of the adversary's nodes."""
        if not self.task.steady:
            return None
        return Drawn("step", {"endpoints": self.adversary.draw(self._generator(epoch))})

    def replayed(self, model: nn.Module, drawn: Drawn) -> Iterator[dict[str, Tensor]]:
        """See `parts`."""
        return self._parts(model, *self.batch(0), drawn.tensors["endpoints"])

    def _parts(
        self, model: nn.Module, graph: Graph, rows: Tensor, labels: Tensor, endpoints: Tensor
    ) -> Iterator[dict[str, Tensor]]:
        with _range_pass(model, *self.shares, sampled=True), straight_through(model):
            clean = cross_entropy(call_model(model, graph).index_select(0, rows), labels)
        yield {"clean": clean, "total": (1 - self.weight) * clean}
        del clean
        attacked = self.adversary.joined(endpoints)[0].replace(links=graph.links)
        with self.adversary.sending_values(), straight_through(model):
            hit = cross_entropy(call_model(model, attacked).index_select(0, rows), labels)
        yield {"attacked": hit, "total": self.weight * hit}

    def measure(self, model: nn.Module) -> Tensor:
        """Return the mean of clean and attacked validation score."""
        self.probe.restart()
        with torch.no_grad(), _range_pass(model, *self.shares):
            clean = super().measure(model)
        with evaluating(model, freeze=True):
            for step in range(PROBE + 1):
                attacked, _ = self.probe.joined(self.probe_endpoints)
                with self.probe.sending_values(), straight_through(model):
                    logits = call_model(model, attacked)
                if step < PROBE:
                    loss = cross_entropy(logits.index_select(0, self.val_nodes), self.val_y)
                    loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            return (clean + self.grade(logits)) / 2

    def state(self) -> dict[str, Tensor]:
        """Return the adversary's features."""
        return self.adversary.state()

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore the adversary's features."""
        self.adversary.load_state(state)

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(epoch_seed(self.seed, epoch) ^ 0x2545F4914)


@typed
@with_gradients
def harden(
    model: M,
    data: Any,
    settings: HardenSettings | None = None,
    *,
    seed: int = 0,
    check: bool = True,
    progress: bool | None = None,
    checkpoint: Path | str | None = None,
    checkpoint_every: int = 25,
    tracker: Tracker | None = None,
    batch_size: int | None = None,
    fan_out: int | Sequence[int] | None = None,
    **overrides: Any,
) -> M:
    """Return a version of a trained model with stable predictions; the given one is untouched.

    A copy of the model gets limits (see `fgai.limit`) and is fine-tuned by cross-entropy on the clean graph
    and on one with injected nodes. It needs labels and does not keep the model's explanations: for those use
    `make_faithful`. The check is that of `make_faithful` for predictions alone.

    With `batch_size` an epoch is a pass over the training nodes, a step for each mini-batch; injected nodes
    join these alone. The ranges of limits come from exact passes over the whole graph. Such trainings are
    not checked. Several processes share the batches inside `fgai.large.process_group`.

    Args:
        model: trained; fgai's, or any PyG model.
        data: the graph it was trained on, a `Graph` or PyG `Data`, with labels and masks; with `batch_size`
            also a stored graph or its folder.
        settings: see `HardenSettings`; every graph has the same defaults.
        seed: of the adversary's draws.
        check: attack the result on validation nodes, and train once more if it is not stable.
        progress: show a bar; None shows it on a terminal only.
        checkpoint: folder to save the training in and to resume from.
        checkpoint_every: epochs between saves.
        tracker: called every epoch, see `fgai.trackers`; a second training is a run of its own, `harden-2`.
        batch_size: training nodes of a mini-batch; None trains on the whole graph. For the models of
            `fgai.large.observe_store`.
        fan_out: neighbours drawn of each node, one number or one per layer, -1 for all; 10 by default.
        **overrides: single settings by name, e.g. `epochs=50`; these win over `settings`.

    Returns:
        A model of the same class, in eval mode, with its `history`.

    Raises:
        InputError: a setting that is not known or not allowed, or no labels in `train_mask`.
        AttentionError: limits, and a layer that cannot be limited.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train("GAT", data, epochs=5)
        >>> len(fgai.harden(model, data, epochs=2, nodes=3, edges=3).history.terms)
        2
    """
    (model,) = originals(model)
    with shown(progress), _open_source(data, seed, batch_size, fan_out) as source:
        settings = _resolve(HardenSettings, settings, overrides, model, source.nodes)
        source.batched_for(model, batch_size, fan_out)

        def recipe(settings: HardenSettings) -> Any:
            return (
                Adversarial(source.graph, settings) if batch_size is None else source.harden(model, settings)
            )

        stability = None
        if check and batch_size is None and settings.epochs >= MIN_EPOCHS:
            stability = _StabilityCheck(model, source.graph, seed, settings.box, faithful=False)
        options: dict[str, Any] = {"progress": progress, "tracker": tracker, "seed": seed}
        options |= {"checkpoint": checkpoint, "checkpoint_every": checkpoint_every}
        return _fine_tune(model, source, recipe, settings, stability, **options)
