"""`make_faithful`: from a trained attention model to one whose attention and predictions are stable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fgai.alone import with_gradients
from fgai.attention import can_be_limited, entry_limits, evaluating, model_name
from fgai.attention.interface import originals
from fgai.bounds.scores import check_followed
from fgai.errors import FgaiWarning, InputError, warn
from fgai.graph import Graph
from fgai.progress import shown
from fgai.tasks import task_of
from fgai.trackers import Tracker
from fgai.training.adversary import InjectionAdversary
from fgai.training.capture import Drawn
from fgai.training.fine_tuning import _fine_tune
from fgai.training.limiting import set_ranges
from fgai.training.loop import PROBE, Recipe, epoch_seed
from fgai.training.loss import FaithfulLoss, InjectedNodes
from fgai.training.retry import MIN_EPOCHS, _StabilityCheck
from fgai.training.settings import FaithfulSettings, _resolve
from fgai.training.source import _open_source
from fgai.training.targets import Targets
from fgai.training.terms import Term, certified, weighted_terms
from fgai.typed import typed

M = TypeVar("M", bound=nn.Module)
RAMP = 0.5
"""Share of the epochs over which attacked terms rise to their weight: a vanilla model is so unstable that the
full terms would move the copy far from it at once."""


@typed
@with_gradients
def make_faithful(
    model: M,
    data: Any,
    settings: FaithfulSettings | None = None,
    *,
    seed: int = 0,
    terms: Sequence[Term] = (),
    check: bool = True,
    progress: bool | None = None,
    checkpoint: Path | str | None = None,
    checkpoint_every: int = 25,
    tracker: Tracker | None = None,
    batch_size: int | None = None,
    fan_out: int | Sequence[int] | None = None,
    epoch_size: int | None = None,
    **overrides: Any,
) -> M:
    """Return a faithful version of a trained attention model; the given one is untouched.

    A copy of the model gets limits (see `fgai.limit`) and is fine-tuned with the loss terms of
    `fgai.training.terms`; the weights of the best validation epoch are kept. Labels are not used.

    With `check` both models are attacked on the validation nodes for a few steps. If the faithful model's
    predictions shift by more than half of the vanilla model's shift, or its predictions or explanations
    differ from the vanilla model's, it is trained once more with tightened settings and the better model is
    returned; a `ReliabilityWarning` names what is still missing. Trainings of fewer than 60 epochs, of
    mini-batches, without `prediction_stability`, and other tasks than node classification are not checked. A
    training that diverges is repeated with half the learning rate. There is one retry at most.

    With `batch_size` an epoch is a pass over all nodes (`epoch_size`), a step for each mini-batch; vanilla
    outputs and the ranges of limits come from exact passes over the whole graph. A stored graph is never
    loaded whole. Several processes share the batches inside `fgai.large.process_group`.

    Args:
        model: trained; fgai's GAT, GATv2, GT or any PyG model the recorder supports.
        data: the graph it was trained on, a `Graph` or PyG `Data`; with `batch_size` also a stored graph or
            its folder. Labels are not used; without masks it trains on all nodes.
        settings: see `FaithfulSettings`; every graph has the same defaults.
        seed: of the adversary's draws.
        terms: loss terms of your own, see `fgai.training.term`; one with the name of a built-in replaces it.
        check: attack the result on validation nodes, and train once more if it is not stable.
        progress: show a bar; None shows it on a terminal only.
        checkpoint: folder to save the training in and to resume from.
        checkpoint_every: epochs between saves.
        tracker: called every epoch, see `fgai.trackers`; a second training is a run of its own, `fgai-2`.
        batch_size: nodes of a mini-batch; None trains on the whole graph. For the models of
            `fgai.large.observe_store`.
        fan_out: neighbours drawn of each node, one number or one per layer, -1 for all; 10 by default.
        epoch_size: nodes of an epoch of mini-batches, drawn anew for each; all of them by default.
        **overrides: single settings by name, e.g. `epochs=50`, `similarity=4.0`; these win over `settings`.

    Returns:
        A model of the same class, in eval mode, with its `history` (`history.attempts`: trainings it took).

    Raises:
        InputError: a setting that is not known or not allowed, or a term that is none.
        AttentionError: the model has no attention that can be recorded.
    """
    (model,) = originals(model)
    with shown(progress), _open_source(data, seed, batch_size, fan_out, epoch_size) as source:
        settings = _settings(model, source.nodes, settings, overrides)
        source.batched_for(model, batch_size, fan_out, epoch_size)
        if batch_size is None:
            source.fix_links(seed)

        def recipe(settings: FaithfulSettings) -> Any:
            if batch_size is None:
                return Faithful(model, source.graph, settings, terms)
            return source.faithful(model, settings, terms)

        stability = None
        if check and batch_size is None and settings.epochs >= MIN_EPOCHS and settings.prediction_stability:
            stability = _StabilityCheck(model, source.graph, seed, settings.box)
        described = tuple((term.name, term.on, term.weight) for term in terms)
        options: dict[str, Any] = {"progress": progress, "tracker": tracker, "seed": seed}
        options |= {"checkpoint": checkpoint, "checkpoint_every": checkpoint_every}
        return _fine_tune(model, source, recipe, settings, stability, described, **options)


def _settings(
    model: nn.Module, graph: Graph, settings: FaithfulSettings | None, overrides: dict[str, Any]
) -> FaithfulSettings:
    """The settings of a training, without limits for a model that cannot have them."""
    settings = _resolve(FaithfulSettings, settings, overrides, model, graph)
    if settings.limits and not can_be_limited(model):
        text = "has a layer that cannot be limited, so it is trained without limits; add some with"
        warn(FgaiWarning(f"{model_name(model)} {text} `fgai.attention.register_limits`"))
        settings = settings.replace(limits=False)
    return settings


@typed
class FaithfulRecipe(Recipe):
    """Adversary and schedule of faithful training, on the whole graph or in mini-batches.

    Args:
        vanilla: trained; only read.
        graph: whose nodes the adversary joins.
        settings: see `FaithfulSettings`.
        terms: of the user, see `fgai.training.term`.
        feature_range: smallest and largest value of each feature, [F] each, if the graph does not hold them.
    """

    name = "fgai"

    def __init__(
        self,
        vanilla: nn.Module,
        graph: Graph,
        settings: FaithfulSettings,
        terms: Sequence[Term] = (),
        feature_range: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.vanilla, self.graph, self.settings = vanilla, graph, settings
        self.terms = weighted_terms(settings, terms)
        if certified in self.terms.weights:
            if not settings.limits:
                raise InputError("the term `certified` needs limits, give `limits=True`")
            check_followed(vanilla)
        self.injects = bool(self.terms.select("attacked"))
        self.adversary = InjectionAdversary(graph, settings.budget, feature_range)
        if self.injects:
            self.adversary.check_box()
        self.seed = 0

    def state(self) -> dict[str, Tensor]:
        """Return the adversary's features."""
        return self.adversary.state() if self.injects else {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore the adversary's features."""
        if state:
            self.adversary.load_state(state)

    def _due(self, step: int, steps_per_epoch: int = 1) -> tuple[str, float]:
        """Terms that are due in a step, and the ramp: the graphs take turns after a first step on both."""
        ramp = min(1.0, (step + 1) / max(1.0, RAMP * self.settings.epochs * steps_per_epoch))
        if not self.injects:
            return "clean", ramp
        if step == 0:
            return "both", ramp
        return "clean" if step % 2 == 0 else "attacked", ramp

    def _generator(self, step: int) -> torch.Generator:
        # A stream of its own: no draw here moves dropout or the evaluation's endpoints.
        return torch.Generator().manual_seed(epoch_seed(self.seed, step) ^ 0x5DEECE66D)


class Faithful(FaithfulRecipe):
    """Faithful training on a whole graph, prepared for the vanilla model."""

    capturable = True

    def start(self, model: nn.Module, seed: int) -> None:
        """Compute the vanilla targets, and let the adversary climb a little before the first epoch."""
        self.seed = seed
        self.probe: InjectedNodes | None = None
        with evaluating(self.vanilla, freeze=True):
            targets = Targets.of(self.vanilla, self.graph)
        self.loss = FaithfulLoss(self.graph, targets, self.settings, self.terms)
        if self.injects:
            with evaluating(model, freeze=True):
                self._start_adversary(model, self._generator(-1))

    def _start_adversary(self, model: nn.Module, generator: torch.Generator) -> None:
        """Draw the first features, set up the probe, and climb against the model, which is still vanilla."""
        targets, graph, settings = self.loss.targets, self.graph, self.settings
        if settings.limits:
            set_ranges(model, graph, settings.clip_share, settings.shrink)
        self.adversary.start(generator, entry_limits(model))
        self.reach = reach = targets.reach(graph, self.adversary.attacked(generator)[0])
        adversary, endpoints = self.adversary.probe(self._generator(-2))
        if graph.batch is not None:  # the probe joins the validation graphs alone, a few of all
            reach = targets.reach(graph, adversary.joined(endpoints)[0])
        self.probe = InjectedNodes(adversary, endpoints, reach)
        for _ in range(PROBE):
            endpoints = self.adversary.draw(generator).to(graph.device)
            self.loss.ascend(model, InjectedNodes(self.adversary, endpoints, self.reach))

    def parts(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield the terms that are due, see `FaithfulLoss.parts`."""
        return self.replayed(model, self._drawn(epoch).to(self.graph.device))

    def draw(self, epoch: int) -> Drawn | None:
        """Return the endpoints of every ascent step and the ramp; the kind says which terms are due."""
        return self._drawn(epoch) if task_of(self.graph).steady else None

    def _drawn(self, epoch: int) -> Drawn:
        due, risen = self._due(epoch)
        ramp = torch.tensor(risen, dtype=self.loss.targets.logits.dtype)
        if due == "clean":
            return Drawn(due, {"ramp": ramp})
        generator = self._generator(epoch)
        endpoints = torch.stack([self.adversary.draw(generator) for _ in range(self.settings.steps)])
        return Drawn(due, {"endpoints": endpoints, "ramp": ramp})

    def replayed(self, model: nn.Module, drawn: Drawn) -> Iterator[dict[str, Tensor]]:
        """Yield the same from draws on the device."""
        steps = drawn.tensors.get("endpoints")
        attacks = [
            InjectedNodes(self.adversary, endpoints, self.reach)
            for endpoints in (() if steps is None else steps.unbind())
        ]
        return self.loss.parts(model, drawn.kind, attacks, drawn.tensors["ramp"])

    def measure(self, model: nn.Module) -> Tensor:
        """Return minus the total under a fresh attack on validation nodes; needs no labels."""
        return self.loss.score(model, self.probe)
