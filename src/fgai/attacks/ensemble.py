"""`EnsembleInjection`: every search at the same threat; the largest reported damage counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from fgai.attacks.base import Judge, Ledger, _DamageAttack
from fgai.attacks.budget import Budget
from fgai.attacks.endpoints import RULES, _EndpointContext
from fgai.attacks.injection import PGDInjection, draw_features
from fgai.attacks.search.climb import SearchResult
from fgai.attacks.search.members import (
    DONOR,
    EXPLANATION_MEMBERS,
    GRADIENTS,
    PREDICTION_MEMBERS,
    STARTS,
    Member,
    _batches,
    _saturated_layer,
    _StartContext,
    _with_temperature,
)
from fgai.attacks.search.site import Score, _damage_at, _InjectionSite, _read_model
from fgai.attention import call_model, evaluating, prepared, straight_through
from fgai.checks import one_of
from fgai.errors import InputError, ReliabilityWarning, warn
from fgai.graph import Graph, GraphChange
from fgai.objectives import READS, Clean, Loss, Objective
from fgai.recompute import Recompute
from fgai.typed import typed

MASKED = 0.01  # how much more damage a search without gradients may do before a warning of masked gradients
EVOLUTION = "evolution"
BASELINE = "plain sign"
POPULATION, GENERATIONS = 16, 12
SPREAD, RATE = 0.7, 0.5
GAIN = 6.0  # how hard mixtures of the evolution are pushed towards corners of the box
BASELINES = ((10, 0.1, 1), (50, 0.05, 3))  # steps, step size and restarts of `standard` and `strong`
SHORT = ("sign", "momentum", "adam small margin", "adam others", "adam others reach", "straight momentum")
SHORT_RULES = ("random", "cover", "weakest")


@typed
class EnsembleInjection(_DamageAttack):
    """New nodes, searched for by all members at all sets of endpoints; the change with most damage counts.

    The ledger's `members` has the result of each at each set of endpoints. `budget.steps`, where not 0, is
    the most any member takes. `members` are the searches, by default those of the objective; `rules` name
    where new nodes are joined, see `RULES`; `baselines` are (steps, step size, restarts) of `PGDInjection`s,
    and the ensemble is never weaker than these.
    """

    name = "ensemble-injection"
    endpoints_depend_on_model = True

    def __init__(
        self,
        budget: Budget,
        objective: str | Objective | Loss = "prediction",
        *,
        k: int = 5,
        members: Sequence[Member] | None = None,
        rules: Sequence[str] = tuple(RULES),
        baselines: Sequence[tuple[int, float, int]] = BASELINES,
    ) -> None:
        super().__init__(budget, objective, k=k)
        if any(not isinstance(one, tuple) or len(one) != 3 for one in baselines):
            raise InputError(f"`baselines` must be (steps, step size, restarts) each, got {baselines!r}")
        self.baselines = [
            PGDInjection(replace(budget, steps=steps, step_size=size, restarts=starts), objective, k=k)
            for steps, size, starts in baselines
        ]
        if members is None:
            members = PREDICTION_MEMBERS if self.objective.reads == "logits" else EXPLANATION_MEMBERS
        if not all(isinstance(member, Member) for member in members):
            raise InputError("`members` must hold `Member`s, see fgai.attacks.search.members")
        self.members = tuple(
            member if not budget.steps else replace(member, steps=min(member.steps, budget.steps))
            for member in members
        )
        self.rules = tuple(one_of(rule, "rule", tuple(RULES)) for rule in rules)
        if not self.members or not self.rules:
            raise InputError("`members` and `rules` must not be empty; leave them out for the defaults")

    def specification(self) -> dict[str, Any]:
        """Return the members, the rules for endpoints and the plain attacks, too."""
        return {
            **super().specification(),
            "members": [asdict(member) for member in self.members],
            "rules": list(self.rules),
            "baselines": [baseline.specification() for baseline in self.baselines],
        }

    @property
    def max_steps(self) -> int:
        """Steps of all members at all sets of endpoints."""
        climbed = sum(member.steps for member in self.members) * len(self.rules)
        plain = sum(baseline.max_steps for baseline in self.baselines)
        return (climbed + plain) * self.budget.restarts

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield random noise, then the worst point of every member at every set of endpoints."""
        box, predicted = self.budget.feature_box(graph), self.predicted_classes(judge)
        if layer := _saturated_layer(judge.clean.attention):
            text = (
                f"attention of layer {layer[0]!r} gives one neighbour everything at {layer[1]:.0%} of nodes:"
                " its softmax is saturated, and gradients through it vanish"
            )
            warn(ReliabilityWarning("saturated-attention", text))
        useful = {name: fits(judge.model, judge.clean.attention) for name, fits in GRADIENTS.items()}
        members = [member for member in self.members if useful[member.gradient]]
        donated = [member for member in self.members if member.start == "donated"]
        for index, (rule, endpoints) in enumerate(self._endpoints(graph, nodes, generator, judge).items()):
            if index == 0:
                noise = draw_features(graph, endpoints.shape[0], self.budget.noise_box(graph), generator)
                ledger.rules.append(rule)
                yield GraphChange(endpoints=endpoints, features=noise)
                yield from self._run_baselines(graph, nodes, generator, judge, ledger)
            context = _StartContext(graph, endpoints, predicted, box, f"{generator.initial_seed()} {rule}")
            if donated and (vanilla := judge.vanilla) is not None:
                with evaluating(vanilla, freeze=True):
                    steps = max(member.steps for member in donated)
                    site = self._site_of(vanilla, context, judge.clean)
                    (result,) = self._climbs([replace(DONOR, steps=steps)], context, site)
                context = replace(context, donated=result.features)
            site = self.site(judge, GraphChange(endpoints=endpoints))
            pairs = self._search(members, rule, context, site, judge)
            for member, result in pairs:
                ledger.add(result, member.name, rule)
            results = [result for _, result in pairs]
            if index == 0:
                judge.announce(f"{rule} endpoints: {EVOLUTION}")
                evolved = _evolution_search(
                    site, _damage_at(site, self.objective, [DONOR.loss] * POPULATION), context
                )
                ledger.add(evolved, EVOLUTION, rule)
                _warn_if_masked(evolved, results)
                results.append(evolved)
            judge.count(site.passes, site.share)
            for result in results:
                ledger.rules.append(rule)
                yield GraphChange(endpoints=endpoints, features=result.features)

    def _run_baselines(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield what each baseline finds, restart by restart, with the random numbers it has by itself."""
        for baseline in self.baselines:
            own, budget = Ledger(), baseline.budget
            for restart in range(budget.restarts):
                began = perf_counter()
                stream = torch.Generator().manual_seed(generator.initial_seed() + restart)
                *_, change = baseline.candidates(graph, nodes, stream, judge, own)
                with torch.no_grad():
                    damage = self.damage(judge, change.detach(), 0.0)
                assert change.features is not None
                numbers = (damage, 0.0, own.gradient, budget.steps)
                result = SearchResult(change.features, *numbers, seconds=perf_counter() - began)
                ledger.add(result, BASELINE)
                ledger.rules.append("random")
                yield change

    def _endpoints(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge
    ) -> dict[str, Tensor]:
        """Endpoints by rule, those of the seed first, which are the only ones on links and small graphs."""
        clean, shape = judge.clean, (self.budget.nodes, self.budget.edges)
        if graph.batch is not None or graph.links is not None:
            context = _EndpointContext(graph, nodes, nodes, None, shape)
            return {"random": RULES["random"](context, generator)}
        logits = clean.logits
        if judge.vanilla is not None:
            with torch.no_grad(), evaluating(judge.vanilla):
                logits = call_model(judge.vanilla, prepared(judge.vanilla, graph))
        context = _EndpointContext(graph, nodes, clean.nodes, logits, shape, clean.logits, clean.labels)
        return {rule: RULES[rule](context, generator) for rule in self.rules}

    def _search(
        self, members: Sequence[Member], rule: str, context: _StartContext, site: _InjectionSite, judge: Judge
    ) -> list[tuple[Member, SearchResult]]:
        results: list[tuple[Member, SearchResult]] = []
        for batch in _batches(members):
            others = len(batch) - 1
            more = "" if not others else f" and {batch[1].name if others == 1 else f'{others} more'}"
            judge.announce(f"{rule} endpoints: {batch[0].name}{more}")
            if results:
                worst = max((one for _, one in results), key=lambda one: (one.damage, one.loss))
                context = replace(context, incumbent=worst.features)
            search = self._smooth if batch[0].gradient == "smooth" else self._climbs
            through = straight_through if batch[0].gradient == "straight" else nullcontext
            with through(judge.model):
                results += zip(batch, search(batch, context, site), strict=True)
        return results

    def _climbs(
        self, batch: Sequence[Member], context: _StartContext, site: _InjectionSite
    ) -> list[SearchResult]:
        """Let members that share their gradient and the number of steps climb side by side."""
        starts = [STARTS[one.start](context, context.stream(one.name)) for one in batch]
        return self.climb(site, torch.stack(starts), batch, context.box)

    def _smooth(
        self, batch: Sequence[Member], context: _StartContext, site: _InjectionSite
    ) -> list[SearchResult]:
        """Climb a softer copy of the model, and judge its worst points on the model itself."""
        soft = _with_temperature(site.model, context.graph)
        if soft is None:
            return self._climbs([replace(member, steps=0) for member in batch], context, site)
        with evaluating(soft, freeze=True):
            results = self._climbs(batch, context, self._site_of(soft, context, site.clean))
        features = torch.stack([one.features for one in results])
        scores = self.scores_of(site, features, [member.loss for member in batch])
        return [replace(one, damage=d, loss=loss) for one, (d, loss) in zip(results, scores, strict=True)]

    def _site_of(self, model: nn.Module, context: _StartContext, attacked: Clean) -> _InjectionSite:
        """Return another model, in eval mode, as a function of the features of the same new nodes."""
        graph, reads = prepared(model, context.graph), max("ranking", self.objective.reads, key=READS.index)
        with torch.no_grad():
            logits, attention = _read_model(model, graph, reads)
        recompute = Recompute(model, graph) if Recompute.fits(model, graph) else None
        clean = replace(attacked, logits=logits, attention=attention)
        judge = Judge(model, graph, self.objective, clean, Ledger(), recompute)
        return self.site(judge, GraphChange(endpoints=context.endpoints))


def _prototypes(context: _StartContext, generator: torch.Generator) -> Tensor:
    """Directions [P, F] in units of the box: mean features of the classes, centred, and random signs."""
    graph = context.graph
    assert graph.features is not None
    drawn = torch.randint(0, 2, (8, graph.num_features), generator=generator).to(context.middle) * 2 - 1
    if context.labels is None:
        return drawn
    count = int(context.labels.max()) + 1
    rows = torch.randperm(graph.num_nodes, generator=generator)[:2000].to(graph.device)
    points, label = context.box.points(graph.features.select(rows)), context.labels[rows]
    mean = points.new_zeros(count, points.shape[1]).index_add(0, label, points)
    mean = mean / torch.bincount(label, minlength=count).clamp(min=1)[:, None] - points.mean(0)
    return torch.cat([mean / mean.abs().amax(1, keepdim=True).clamp(min=1e-9), drawn])


@torch.no_grad()
def _evolution_search(site: _InjectionSite, score: Score, context: _StartContext) -> SearchResult:
    """Return the worst features of an evolution strategy, which rounding and saturation do not stop."""
    began, generator = perf_counter(), context.stream(EVOLUTION)
    basis = _prototypes(context, generator)
    mean = torch.zeros(context.endpoints.shape[0], basis.shape[0], dtype=torch.float32)
    best, top = context.middle, (float("-inf"), float("-inf"))
    for _ in range(GENERATIONS):
        noise = torch.randn(POPULATION, *mean.shape, generator=generator, dtype=torch.float32)
        noise[POPULATION // 2 :] = -noise[: POPULATION // 2]
        mixed = (mean + SPREAD * noise).to(basis)
        features = context.box.features(torch.tanh(GAIN * mixed @ basis))
        loss, damage = score(site.run(features))
        scores = list(zip(damage.tolist(), loss.tolist(), strict=True))
        winner = max(range(POPULATION), key=lambda i: scores[i])
        if scores[winner] > top:
            best, top = features[winner].clone(), scores[winner]
        order = sorted(range(POPULATION), key=lambda i: scores[i])
        rank = torch.empty(POPULATION, dtype=torch.float32)
        rank[order] = torch.linspace(-1.0, 1.0, POPULATION, dtype=torch.float32)
        mean += RATE * (rank[:, None, None] * noise).mean(0) * 4
    return SearchResult(best, *top, seconds=perf_counter() - began)


def _warn_if_masked(evolved: SearchResult, climbed: Sequence[SearchResult]) -> None:
    zero = sum(one.steps > 0 and one.gradient == 0.0 for one in climbed)
    if zero:
        text = f"{zero} of {len(climbed)} climbs had gradients of exactly zero, so they searched at random"
        warn(ReliabilityWarning("zero-gradient", text))
    most = max((one.damage for one in climbed), default=0.0)
    if evolved.damage > most + MASKED:
        text = (
            f"a search without gradients did more damage ({evolved.damage:.3f}) than every climb"
            f" ({most:.3f}): the model may mask its gradients, and these numbers do not show robustness"
        )
        warn(ReliabilityWarning("masked-gradients", text))


@typed
class ShortEnsemble(EnsembleInjection):
    """The strongest members of `EnsembleInjection`, 100 steps each: about a minute on a small graph."""

    name = "ensemble-short"

    def __init__(
        self, budget: Budget, objective: str | Objective | Loss = "prediction", *, k: int = 5
    ) -> None:
        budget = replace(budget, steps=budget.steps or 100)
        super().__init__(budget, objective, k=k, rules=SHORT_RULES, baselines=BASELINES[:1])
        self.members = tuple(member for member in self.members if member.name in SHORT)
