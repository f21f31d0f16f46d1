"""`EnsembleInjection`: every search we have at the same threat; the worst counts, by what is reported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor

from fgai.attacks.base import Attack, Judge, Ledger
from fgai.attacks.budget import Budget
from fgai.attacks.endpoints import RULES, Sites
from fgai.attacks.injection import draw_features
from fgai.attacks.search.aims import Aim, ExplanationAim, PredictionAim
from fgai.attacks.search.climb import Climb, Found
from fgai.attacks.search.members import DONOR, MEMBERS, Member
from fgai.attacks.search.optimisers import OPTIMISERS
from fgai.attacks.search.site import Site
from fgai.attacks.search.spaces import SPACES
from fgai.attacks.search.starts import STARTS, Place
from fgai.attention import call_model, evaluating, observe, touched_rows
from fgai.checks import one_of
from fgai.errors import InputError
from fgai.graph import Graph, GraphChange
from fgai.metrics import task_scores
from fgai.objectives import Clean, Objective, Value
from fgai.recompute import Recompute
from fgai.tasks import task_of


class EnsembleInjection(Attack):
    """New nodes, searched for by all members at all sets of endpoints.

    Chosen is not the change with the largest objective but the one that does most damage to what is reported:
    the task's first score against the true labels (against the clean predictions where there are none), or for
    an explanation objective the share of the top-k that the touched nodes lost.

    Args:
        budget: what it may change; `steps`, where not 0, is the most any member takes.
        objective: as for every attack.
        k: size of the explanation.
        members: the searches.
        rules: names from `RULES`: where new nodes are joined.
    """

    name = "ensemble-injection"

    def __init__(
        self,
        budget: Budget,
        objective: str | Objective | Value = "prediction",
        *,
        k: int = 5,
        members: Sequence[Member] = MEMBERS,
        rules: Sequence[str] = tuple(RULES),
    ) -> None:
        super().__init__(budget, objective, k=k)
        self.members = tuple(
            member if not budget.steps else replace(member, steps=min(member.steps, budget.steps))
            for member in members
        )
        self.rules = tuple(one_of(rule, "rule", tuple(RULES)) for rule in rules)
        if not self.members or not self.rules:
            raise InputError("an ensemble needs at least one member and one rule for endpoints")

    @property
    def allowed_steps(self) -> int:
        """Steps of all members at all sets of endpoints."""
        return sum(member.steps for member in self.members) * len(self.rules) * self.budget.restarts

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield random noise, then the worst point of every member at every set of endpoints."""
        if graph.features is None:
            raise InputError(f"{graph.name!r} has no features to attack")
        box = self.budget.feature_box(graph)
        first = True
        for rule, endpoints in self._endpoints(graph, nodes, generator, judge).items():
            if first:
                noise = draw_features(graph, endpoints.shape[0], box, generator)
                yield GraphChange(endpoints=endpoints, features=noise)
                first = False
            place = Place(graph, endpoints, self._predicted(judge), box)
            reads = self.objective.explanation is not None
            site = Site(judge.model, graph, endpoints, judge.clean, judge.again, reads=reads)
            if judge.parent is not None and any(member.start == "donated" for member in self.members):
                place = replace(place, donated=self._donated(judge, place, generator))
            for member in self.members:
                began = perf_counter()
                found = self._climb(member, place, site, self._labels(judge, graph), generator)
                ledger.steps += found.steps
                ledger.gradient = max(ledger.gradient, found.gradient)
                ledger.members.append(
                    {
                        "member": member.name,
                        "endpoints": rule,
                        "damage": found.damage,
                        "loss": found.loss,
                        "gradient": found.gradient,
                        "steps": found.steps,
                        "seconds": perf_counter() - began,
                    }
                )
                yield GraphChange(endpoints=endpoints, features=found.features)

    def damage(self, judge: Judge, change: GraphChange, value: float) -> float:
        """Return what is reported after the change: one minus the score, or the share of the top-k lost."""
        logits, attention, attacked = judge.look(change)
        if self.objective.explanation is not None:
            touched = touched_rows(judge.clean.attention, attention)
            return float(self.objective.explanation.shares(attention, judge.clean, touched)[1])
        task, rows = task_of(attacked), judge.clean.nodes
        labels = self._labels(judge, attacked)[rows]
        return 1 - task_scores(task.name, logits[rows], labels)[task.headline]

    def _endpoints(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge
    ) -> dict[str, Tensor]:
        """Endpoints by rule; on links and small graphs only those drawn at random, the first of all draws."""
        logits = judge.clean.logits
        plain = graph.batch is None and graph.links is None
        if plain and judge.parent is not None and judge.parent is not judge.model:
            with torch.no_grad():
                logits = call_model(judge.parent, graph)
        rows = judge.clean.nodes if plain else nodes
        sites = Sites(graph, nodes, rows, logits if plain else None, (self.budget.nodes, self.budget.edges))
        rules = self.rules if plain else ("random",)
        return {rule: RULES[rule](sites, generator) for rule in rules}

    def _predicted(self, judge: Judge) -> Tensor | None:
        return judge.clean.logits.argmax(1) if judge.clean.logits.shape[0] == judge.graph.num_nodes else None

    def _labels(self, judge: Judge, graph: Graph) -> Tensor:
        """The class each row should have: the true one, or else the clean prediction."""
        predicted = judge.clean.logits.argmax(1)
        truth = task_of(graph).labels(graph)
        if truth is None:
            return predicted
        truth = truth[: predicted.shape[0]]
        return torch.where(truth >= 0, truth, predicted)

    def _climb(
        self, member: Member, place: Place, site: Site, labels: Tensor, generator: torch.Generator
    ) -> Found:
        start = STARTS[member.start](place, generator)
        space, box = SPACES[member.space], place.box
        unit = (box[1] - box[0]) / 2 if space.name == "box" else 1.0
        optimiser = OPTIMISERS[member.optimiser](start, member.rate * unit)
        aim: Aim = PredictionAim(site, member.loss, labels)
        if self.objective.explanation is not None:
            aim = ExplanationAim(site, self.objective.explanation)
        return Climb(site, aim, start, space, optimiser, box).run(member.steps)

    def _donated(self, judge: Judge, place: Place, generator: torch.Generator) -> Tensor:
        """The worst features for the parent model at the same endpoints."""
        parent = judge.parent
        assert parent is not None
        with evaluating(parent, freeze=True):
            with torch.no_grad():
                logits, attention = observe(parent, judge.graph)
            clean = Clean(logits.detach(), attention.detach(), judge.clean.nodes)
            again = Recompute(parent, judge.graph) if Recompute.fits(parent, judge.graph) else None
            reads = self.objective.explanation is not None
            site = Site(parent, judge.graph, place.endpoints, clean, again, reads=reads)
            found = self._climb(DONOR, place, site, self._labels(judge, judge.graph), generator)
        return found.features
