"""`make_faithful`, with its loss and recipe: from a trained attention model to a stable one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fgai.attention import (
    call_model,
    can_be_limited,
    entry_limits,
    evaluating,
    model_name,
    observe,
    straight_through,
)
from fgai.attention.interface import originals
from fgai.bounds.scores import check_two_layers
from fgai.errors import FgaiWarning, InputError, warn
from fgai.graph import Graph
from fgai.progress import show_progress
from fgai.tasks import task_of
from fgai.threads import with_gradients
from fgai.trackers import Tracker
from fgai.training.adversary import InjectionAdversary
from fgai.training.fine_tuning import _fine_tune, _open_source
from fgai.training.limiting import _range_pass, set_ranges
from fgai.training.loop import SCORE_STEPS
from fgai.training.recipes import Draws, Recipe
from fgai.training.settings import FaithfulSettings, _resolve_settings
from fgai.training.terms import (
    Reach,
    StepContext,
    Term,
    VanillaOutputs,
    WeightedTerms,
    certified,
    first_rows,
    weighted_terms,
)
from fgai.typed import typed

M = TypeVar("M", bound=nn.Module)
RAMP = 0.5  # share of the epochs in which attacked terms rise to their weight


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
    """Return a faithful copy of a trained attention model, which itself does not change.

    A copy of the model gets limits (see `fgai.limit`) and is fine-tuned with the loss terms of
    `fgai.training.terms`; the weights of the best validation epoch are kept. Labels are not used.

    With `check` the model is trained once more with tightened settings if, on the validation nodes, its
    predictions shift under a short attack by more than half of the vanilla model's shift, or it keeps fewer
    than 90 % of the vanilla classes or 85 % of the top 5 neighbours in the sharpest layer. The better model
    is returned; a `ReliabilityWarning` names what it fails. Only node classification on whole graphs, with
    `prediction_stability` and at least 60 epochs, is checked. A training that diverges is repeated with half
    the learning rate. There is one retry at most.

    With `batch_size` an epoch is a pass over all nodes, or `epoch_size` of them, with a step for each
    mini-batch; vanilla outputs and ranges come from exact passes over the whole graph. A stored graph is
    never loaded whole. Several processes share the batches inside `fgai.large.process_group`.

    Args:
        model: trained; fgai's GAT, GATv2, GT or any PyG model whose attention can be recorded.
        data: the graph it was trained on; with `batch_size` also a stored graph or its folder. Without masks
            it trains on all nodes.
        settings: see `FaithfulSettings`.
        seed: of the adversary's draws.
        terms: loss terms of your own, see `fgai.training.term`.
        check: attack the result, and train once more if it is not stable.
        progress: show a bar; None shows it on a terminal only.
        checkpoint: folder to save the training in and to resume from.
        checkpoint_every: epochs between saves.
        tracker: called every epoch, see `fgai.trackers`; a second training is a run of its own, `fgai-2`.
        batch_size: nodes of a mini-batch, for models that `fgai.large.observe_store` supports.
        fan_out: neighbours drawn of each node, one number or one per layer, -1 for all; 10 by default.
        epoch_size: nodes of an epoch of mini-batches, drawn anew for each; all by default.
        **overrides: single settings by name, e.g. `epochs=50`; these win over `settings`.

    Returns:
        A model of the same class, in eval mode, with its `history` (`history.attempts`: trainings it took).

    Raises:
        InputError: an unknown setting, a value that is not allowed, or two terms of one name.
        AttentionError: the model has no attention that can be recorded.
    """
    (model,) = originals(model)
    with show_progress(progress), _open_source(data, seed, batch_size, fan_out, epoch_size) as source:
        settings = _resolve_settings(FaithfulSettings, settings, overrides, model, source.node_graph)
        if settings.limits and not can_be_limited(model):
            text = "has a layer that cannot be limited, so it is trained without limits; add some with"
            warn(FgaiWarning(f"{model_name(model)} {text} `fgai.attention.register_limits`"))
            settings = settings.replace(limits=False)
        source.prepare(model, batch_size, fan_out, epoch_size)
        if batch_size is None:
            source.draw_links(seed)

        def recipe(settings: FaithfulSettings) -> Any:
            if batch_size is None:
                return FaithfulRecipe(model, source.graph, settings, terms)
            return source.faithful(model, settings, terms)

        return _fine_tune(
            model,
            source,
            recipe,
            settings,
            tuple((term.name, term.on, term.weight) for term in terms),
            check=check and batch_size is None and settings.prediction_stability > 0,
            seed=seed,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            progress=progress,
            tracker=tracker,
        )


class StepAttack(NamedTuple):
    """The attack of one training step: arguments of `ascend_and_inject`, and what it can change."""

    adversary: InjectionAdversary
    endpoints: Tensor
    reach: Reach
    subset: Tensor | None = None


@dataclass(frozen=True, eq=False)
class FaithfulLoss:
    """The loss of one step on the whole graph or a mini-batch, prepared for the model.

    In a mini-batch only the seeds count: they are its first nodes, and the edges into them its first edges.
    With `sets_ranges` limits take their ranges from the clean passes; in a mini-batch they stay as they are.
    """

    graph: Graph
    vanilla_outputs: VanillaOutputs
    settings: FaithfulSettings
    terms: WeightedTerms
    sets_ranges: bool = True

    def losses(
        self, model: nn.Module, graphs: str, attacks: Sequence[StepAttack], ramp: Tensor
    ) -> Iterator[dict[str, Tensor]]:
        """Yield the clean terms, then the attacked terms, which see the clean outputs without gradients.

        `graphs` is `clean`, `attacked` or `both`. There is an attack for each ascent step; the last one's
        terms train the model. Dropout is off and batch norms keep the vanilla statistics.
        """
        model.eval()
        reference = self.vanilla_context(model)
        if graphs != "attacked":
            reference = replace(self.clean_context(model, sampled=True), ramp=ramp)
            yield self.terms.loss(self.terms.select("clean"), reference)
            for term in self.terms.select("clean", own_pass=True):
                yield self.terms.loss([term], reference)
            layers = tuple(layer.detach() for layer in reference.layers)
            reference = replace(reference, logits=reference.logits.detach(), layers=layers)
        if graphs == "clean":
            return
        *earlier, last = attacks
        for attack in earlier:
            self.collect_gradient(model, attack, reference)
        values = self.attacked_terms(model, last, reference)
        yield {**values, "total": values["total"] * ramp}

    def collect_gradient(
        self, model: nn.Module, attack: StepAttack, reference: StepContext | None = None
    ) -> None:
        """Add the gradient of the attacked terms to the adversary; the reference is vanilla by default."""
        with evaluating(model, freeze=True):
            total = self.attacked_terms(model, attack, reference or self.vanilla_context(model))["total"]
            total.backward()  # type: ignore[no-untyped-call]
        attack.adversary.sum_gradients()

    def score(self, model: nn.Module, attack: StepAttack | None) -> Tensor:
        """Return minus the total under an attack that starts again; does not wait for the device."""
        with evaluating(model, freeze=True):
            with torch.no_grad():
                clean = self.clean_context(model)
                terms = [*self.terms.select("clean"), *self.terms.select("clean", own_pass=True)]
                total = self.terms.loss(terms, clean)["total"]
            if attack is None:
                return -total
            attack.adversary.restart()
            for step in range(SCORE_STEPS + 1):
                attacked = self.attacked_terms(model, attack, clean)["total"]
                if step < SCORE_STEPS:
                    attacked.backward()  # type: ignore[no-untyped-call]
            return -(total + attacked).detach()

    def clean_context(self, model: nn.Module, *, sampled: bool = False) -> StepContext:
        """Run the model on the clean graph and set the ranges of its limits in the same pass."""
        shares, ranked = self.settings.shares, self.terms.need_explanation
        ranges = _range_pass(model, *shares, sampled=sampled) if self.sets_ranges else nullcontext()
        with ranges, straight_through(model):
            observation = observe(model, self.graph, heads="mean", grad=True, ranked=ranked)
        return replace(
            self.vanilla_context(model),
            logits=first_rows(observation.logits, self.vanilla_outputs.logits),
            layers=observation.attention.layers,
            has_explanations=ranked,
        )

    def vanilla_context(self, model: nn.Module) -> StepContext:
        """Return a context with the vanilla model's outputs in place of the model's on the clean graph."""
        outputs = self.vanilla_outputs
        return StepContext(model, self.graph, outputs, self.settings, outputs.logits, outputs.layers)

    def attacked_terms(
        self, model: nn.Module, attack: StepAttack, reference: StepContext
    ) -> dict[str, Tensor]:
        """Return the attacked terms and their total."""
        graph, edge_map = attack.adversary.ascend_and_inject(self.graph, attack.endpoints, attack.subset)
        attention = None
        with attack.adversary.using_points(attack.subset), straight_through(model):
            if self.terms.need_attention:
                observation = observe(model, graph, heads="mean", grad=True, ranked=False)
                logits, attention = observation.logits, []
                pairs = zip(reference.layers, observation.attention, strict=True)
                for index, (old, new) in enumerate(pairs):  # in a mini-batch, only edges into seeds
                    same = old.adjacency is self.graph.adjacency and new.adjacency is graph.adjacency
                    after = edge_map.after if same else torch.searchsorted(new.keys, old.keys)
                    # The backward pass of `index_select`, unlike that of brackets, does not sort.
                    values = new.heads().index_select(0, after)
                    attention.append(first_rows(values, self.vanilla_outputs.attention[index]))
            else:
                logits = call_model(model, graph)
        logits = logits[: len(self.vanilla_outputs.logits)]
        context = replace(reference, attacked_logits=logits, attacked_attention=attention, reach=attack.reach)
        return self.terms.loss(self.terms.select("attacked"), context)


@typed
class FaithfulBase(Recipe):
    """Base of faithful training on whole graphs and in mini-batches; see also `InjectionAdversary`."""

    name = "fgai"
    stream = 0x5DEECE66D  # its own, so that these draws change neither dropout nor evaluations

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
            check_two_layers(vanilla)
        self.injects = bool(self.terms.select("attacked"))
        self.adversary = InjectionAdversary(graph, settings.budget, feature_range)
        if self.injects:
            self.adversary.check_box()

    def _schedule(self, step: int, steps_per_epoch: int = 1) -> tuple[str, float]:
        """Return the graphs of a step, first both and then in turn, and the factor of the attacked terms."""
        ramp = min(1.0, (step + 1) / max(1.0, RAMP * self.settings.epochs * steps_per_epoch))
        if not self.injects:
            return "clean", ramp
        if step == 0:
            return "both", ramp
        return "clean" if step % 2 == 0 else "attacked", ramp


class FaithfulRecipe(FaithfulBase):
    """Faithful training on a whole graph, prepared for the vanilla model."""

    capturable = True

    def start(self, model: nn.Module, seed: int) -> None:
        """Compute the vanilla outputs; the adversary then takes some steps before the first epoch."""
        super().start(model, seed)
        self.validation: StepAttack | None = None
        with evaluating(self.vanilla, freeze=True):
            outputs = VanillaOutputs.of(self.vanilla, self.graph)
        self.loss = FaithfulLoss(self.graph, outputs, self.settings, self.terms)
        if self.injects:
            with evaluating(model, freeze=True):
                self._start_adversary(model, self._generator(-1))

    def _start_adversary(self, model: nn.Module, generator: torch.Generator) -> None:
        outputs, graph, adversary = self.loss.vanilla_outputs, self.graph, self.adversary
        if self.settings.limits:
            set_ranges(model, graph, *self.settings.shares)
        adversary.start(generator, entry_limits(model))
        self.reach = outputs.reach(graph, adversary.ascend_and_inject(graph, self._endpoints(generator))[0])
        validation, endpoints = adversary.validation_attack(self._generator(-2))
        reach = self.reach
        if graph.batch is not None:  # this attack joins the validation graphs alone
            reach = outputs.reach(graph, validation.ascend_and_inject(graph, endpoints)[0])
        self.validation = StepAttack(validation, endpoints, reach)
        for _ in range(SCORE_STEPS):
            attack = StepAttack(adversary, self._endpoints(generator), self.reach)
            self.loss.collect_gradient(model, attack)

    def _endpoints(self, generator: torch.Generator) -> Tensor:
        return self.adversary.draw(generator).to(self.graph.device)

    def losses(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield the terms of the graphs whose turn it is, see `FaithfulLoss.losses`."""
        return self.losses_from(model, self._draw(epoch).to(self.graph.device))

    def draw(self, epoch: int) -> Draws | None:
        """Return the endpoints of every ascent step and the ramp; `kind` says on which graphs."""
        return self._draw(epoch) if task_of(self.graph).fixed_graph else None

    def _draw(self, epoch: int) -> Draws:
        graphs, factor = self._schedule(epoch)
        ramp = torch.tensor(factor, dtype=self.loss.vanilla_outputs.logits.dtype)
        if graphs == "clean":
            return Draws(graphs, {"ramp": ramp})
        generator = self._generator(epoch)
        endpoints = torch.stack([self.adversary.draw(generator) for _ in range(self.settings.steps)])
        return Draws(graphs, {"endpoints": endpoints, "ramp": ramp})

    def losses_from(self, model: nn.Module, draws: Draws) -> Iterator[dict[str, Tensor]]:
        """Yield the same as `losses`, from draws on the device."""
        endpoints = draws.tensors.get("endpoints", ())
        attacks = [StepAttack(self.adversary, each, self.reach) for each in endpoints]
        return self.loss.losses(model, draws.kind, attacks, draws.tensors["ramp"])

    def score_tensor(self, model: nn.Module) -> Tensor:
        """Return minus the total under a new attack on validation nodes; needs no labels."""
        return self.loss.score(model, self.validation)
