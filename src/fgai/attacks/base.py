"""`Attack`: proposes changes, never judges them; the base class checks, judges and restores."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, final

import torch
from torch import Tensor, nn

from fgai import checks
from fgai.attacks.budget import Box, Budget, check_budget, data_range, warn_if_narrow
from fgai.attacks.search.climb import SearchResult, SearchSpec, climb
from fgai.attacks.search.site import Score, _damage_at, _InjectionSite, _read_model, _sums_rows, _value_at
from fgai.attention import AttentionMap, evaluating, observe, prepared
from fgai.errors import BudgetError, InputError, ReliabilityWarning, warn
from fgai.graph import Graph, GraphChange
from fgai.graph.change import ChangedEdges
from fgai.models import as_graph
from fgai.objectives import Clean, Loss, Objective
from fgai.progress import current_stage, stage
from fgai.recompute import Recompute
from fgai.sparse import EdgeMap
from fgai.tasks import task_of
from fgai.threads import with_gradients
from fgai.trackers import Tracker
from fgai.typed import typed

MOST_SINGLE_USES = 3  # consecutive plans of partial passes used only once, before a judge makes full passes


@typed
@dataclass
class Ledger:
    """The cost and the course of an attack."""

    steps: int = 0  # gradient steps over all restarts
    forwards: int = 0  # forward passes, the judging ones included
    seconds: float = 0.0  # wall-clock time
    gradient: float = 0.0  # largest entry of any gradient, in size; 0 where none was taken
    curve: list[float] = field(default_factory=list)  # objective at each candidate that was judged
    feasible: float | None = None  # share of the candidates that meet the objective's constraint, if any
    partial: int = 0  # forward passes that computed only the rows in reach of the change
    share: float = 1.0  # mean over the forward passes of the work done, as a share of a full pass
    members: list[dict[str, Any]] = field(default_factory=list)  # of an ensemble, per member and rule
    damages: list[float] = field(default_factory=list)  # per candidate by a full pass, random noise first
    won: int = 0  # index of the chosen change among those
    rules: list[str] = field(default_factory=list)  # of an ensemble, the rule of each proposed change

    def proposals(self) -> list[tuple[dict[str, Any] | None, float]]:
        """Return the member that proposed each change, None for a restart's noise, and its damage."""
        restarts = max(1, len(self.damages) - len(self.members))
        each, rows = len(self.members) // restarts, iter(self.members)
        return [(None if i % (each + 1) == 0 else next(rows), d) for i, d in enumerate(self.damages)]

    def add(self, result: SearchResult, member: str = "", rule: str = "random") -> None:
        """Add the steps of a search and its largest gradient, and a row about the member that searched."""
        self.steps += result.steps
        self.gradient = max(self.gradient, result.gradient)
        if member:
            names = ("damage", "loss", "gradient", "steps", "seconds")
            numbers = {name: getattr(result, name) for name in names}
            self.members.append({"member": member, "endpoints": rule, **numbers})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for records."""
        return asdict(self)


@typed
@dataclass(eq=False, repr=False)
class Judge:
    """Scores changes through the attacked model; every forward pass is noted in the ledger."""

    model: nn.Module  # attacked, in eval mode
    graph: Graph  # clean, prepared for the model
    objective: Objective
    clean: Clean  # the model's output before the attack
    ledger: Ledger
    recompute: Recompute | None = None  # the model on the clean graph, ready for partial passes
    vanilla: nn.Module | None = None  # the model the attacked one was made from
    on_step: Callable[[str], None] | None = None  # called with a few words before each long step
    _last: tuple[ChangedEdges, _InjectionSite, Score] | None = None
    _single_uses: int = 0
    _work: float = 0.0
    _trace: list[Tensor] = field(default_factory=list)  # read at the end: each read would stall the device

    def __call__(self, attacked: Graph) -> Tensor:
        """Return the objective on a perturbed graph, with gradients to its features, by a full pass."""
        value = self.scored(*_read_model(self.model, attacked, self.objective.reads))
        self._trace.append(value.detach())
        return value

    def value(self, change: GraphChange) -> Tensor:
        """Return the objective after a change of the clean graph, with gradients to its features.

        Successive changes with the same edges share work; only rows in reach are computed where that pays.
        """
        if change.entry_values is not None:
            return self(change.apply(self.graph)[0])
        site = self.site(change)
        assert self._last is not None
        value = self._last[2](site.run_change(change))[0].squeeze(0)
        self.count(1, site.share, value.detach()[None])
        return value

    def site(self, change: GraphChange) -> _InjectionSite:
        """Return the model as a function of features at the edges of a change; the last one is reused."""
        if self._last is None or not self._last[0].match(change):
            if self._last is not None and self._single_uses < MOST_SINGLE_USES:
                self._single_uses = self._single_uses + 1 if self._last[1].passes < 2 else 0
            plans = _sums_rows(self.objective) and self._single_uses < MOST_SINGLE_USES
            ready, reads = self.recompute if plans else None, self.objective.reads
            site = _InjectionSite(self.model, self.graph, change, self.clean, ready, reads)
            self._last = ChangedEdges(change), site, _value_at(site, self.objective)
        return self._last[1]

    def climb(
        self,
        change: GraphChange,
        start: Tensor,
        spec: SearchSpec,
        box: Box,
        *,
        variable: str = "features",
        guide: Objective | None = None,
    ) -> SearchResult:
        """Climb from `start` [M, F] and return the point with the largest value of the objective.

        The field `variable` of `change` moves inside the box; a `guide` is a smoother objective to climb.
        Forward passes and values are noted here, steps and gradients by the attack (`Ledger.add`).
        """
        site = self.site(change)
        site.variable, passes = variable, site.passes
        (result,) = climb(site, _value_at(site, self.objective, guide), start[None], [spec], box)
        self.count(site.passes - passes, site.share, result.curve)
        return result

    def observe(self, change: GraphChange, reads: str = "heads") -> tuple[Tensor, AttentionMap]:
        """Return logits and attention after a change: one full pass, no objective."""
        self.count(1, 1.0)
        return _read_model(self.model, change.apply(self.graph)[0], reads)

    def scored(self, logits: Tensor, attention: AttentionMap) -> Tensor:
        """Return the objective of outputs of a full pass: counted, but not in the curve."""
        self.count(1, 1.0)
        return self.objective(logits, attention, self.clean)

    def announce(self, step: str) -> None:
        """Announce the next step in a few words."""
        current_stage().advance(0, step)
        if self.on_step is not None:
            self.on_step(step)

    def count(self, passes: int, share: float, values: Tensor | None = None) -> None:
        """Note forward passes of a search, each a share of a full one, and values for the curve."""
        self.ledger.forwards += passes
        self.ledger.partial += passes if share < 1 else 0
        self._work += passes * share
        self.ledger.share = self._work / max(1, self.ledger.forwards)
        if values is not None:
            self._trace.extend(values)


@typed
@dataclass(frozen=True, eq=False)
class AttackResult:
    """The strongest perturbation of a search, already checked against the budget.

    `graph` is perturbed: its first N nodes are the original ones, and `edge_map` leads from the original
    edges (of the prepared graph) into it. `value` is the objective, judged afresh; `start` its value on the
    clean graph, `noise` that under random noise of the same budget. `by_rule` holds, of an ensemble, the
    strongest change at the endpoints of each rule; else nothing.
    """

    graph: Graph
    edge_map: EdgeMap
    change: GraphChange
    value: float
    start: float
    noise: float
    ledger: Ledger
    by_rule: dict[str, GraphChange] = field(default_factory=dict)


@typed
class Attack(ABC):
    """An attack with its settings; the data comes with the call.

    It maximises `objective`: a name from `OBJECTIVES`, an `Objective`, or a function of (logits, attention,
    clean). `k` is the size of the explanation, for objectives named by a word.
    """

    name = "attack"  # in tables and records
    removes_edges = False  # whether it also removes edges of the graph
    endpoints_depend_on_model = False  # whether a model's output decides which nodes it joins or changes
    version = 1  # of the search; raised when a change of its code makes it find other numbers

    def __init__(
        self, budget: Budget, objective: str | Objective | Loss = "prediction", *, k: int = 5
    ) -> None:
        self.budget = budget
        self.objective = Objective.of(objective, k)

    @abstractmethod
    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield candidate changes of one restart; the first is random noise within the budget.

        `judge.value(change)` is the objective after a change, `judge.clean` the output of the model before.
        """

    def specification(self) -> dict[str, Any]:
        """Return what is searched and how, in plain values; with the version it decides the result."""
        return {
            "attack": self.name,
            "version": self.version,
            "objective": self.objective.name,
            "budget": asdict(self.budget),
        }

    def damage(self, judge: Judge, change: GraphChange, value: float) -> float:
        """Return what the strongest change is chosen by: the objective's value, if not overridden."""
        return value

    @property
    def follows_gradients(self) -> bool:
        """Whether it follows gradients, so that the objective makes a difference."""
        return self.budget.steps > 0

    @property
    def max_steps(self) -> int:
        """Gradient steps that all restarts may take together."""
        return self.budget.steps * self.budget.restarts

    @final
    @with_gradients
    def run(
        self,
        model: nn.Module,
        data: Any,
        *,
        seed: int = 0,
        partial: bool = True,
        vanilla: nn.Module | None = None,
        on_step: Callable[[str], None] | None = None,
        tracker: Tracker | None = None,
    ) -> AttackResult:
        """Attack `model` on `data` and return the strongest change; the model is left as it was.

        The attack goes through the model's own gradients, in eval mode. `seed` is of starts and random
        endpoints, which are the same for every model. `partial` computes only the rows in reach of a change
        where that pays, with the same values. `vanilla` is the model the attacked one was made from, read by
        attacks that choose endpoints. `on_step` gets a few words before each long step; `tracker` every value
        judged, when the search is over.

        Raises:
            BudgetError: the budget is impossible on this graph, or the attack overspent it.
            InputError: the model's output is not finite.
        """
        full_graph = as_graph(data)
        task = task_of(full_graph)
        graph = prepared(model, task.view(full_graph, self.budget.targets))
        nodes = self.budget.target_nodes(graph)
        if self.budget.nodes:
            self.budget.feature_box(graph)  # raises where there is none
            warn_if_narrow(self.budget.box, *data_range(graph))
        ledger, began = Ledger(), perf_counter()
        strongest: dict[str, tuple[float, float, GraphChange]] = {}  # by rule of endpoints, `""` of all
        noise = noise_damage = -math.inf
        label = f"{self.objective.name} attack"
        with evaluating(model, freeze=True), stage(label, self.max_steps or None):
            recompute = None
            if partial and self.follows_gradients and Recompute.fits(model, graph):
                recompute = Recompute(model, graph)
                logits, attention = recompute.clean_logits, recompute.clean_attention
            else:
                observation = observe(model, graph)
                logits, attention = observation.logits, observation.attention
            rows = task.rows(graph, self.budget.targets)
            clean = Clean(logits, attention, rows, task.labels(graph), task.name, task.headline_for(graph))
            start = float(self.objective(logits, attention, clean))
            if not math.isfinite(start):
                raise InputError(f"the model's output on {graph.name!r} must be finite; check its weights")
            judge = Judge(model, graph, self.objective, clean, ledger, recompute, vanilla, on_step)
            for restart in range(self.budget.restarts):
                generator = torch.Generator().manual_seed(checks.seed(seed) * 7_919 + restart)
                for index, change in enumerate(self.candidates(graph, nodes, generator, judge, ledger)):
                    frozen = change.detach()
                    check_budget(frozen, self.budget, graph)
                    with torch.no_grad():
                        value = float(judge.value(frozen))
                    damage = self.damage(judge, frozen, value)
                    noise = max(noise, value) if index == 0 else noise
                    noise_damage = max(noise_damage, damage) if index == 0 else noise_damage
                    ledger.damages.append(damage)
                    for rule in ("", *ledger.rules[-1:]):
                        if (damage, value) > strongest.get(rule, (-math.inf, -math.inf))[:2]:
                            strongest[rule] = damage, value, frozen
                            ledger.won = ledger.won if rule else len(ledger.damages) - 1
        if not strongest or strongest[""][1] == -math.inf:
            raise InputError(f"the model's output must be finite under some change of {self.name}")
        if ledger.steps > self.max_steps:
            raise BudgetError(f"{self.name} took {ledger.steps} steps, allowed {self.max_steps} in all")
        ledger.seconds = perf_counter() - began
        ledger.curve = torch.stack(judge._trace).tolist() if judge._trace else []
        if self.objective.constrained:
            ledger.feasible = sum(value >= 0 for value in ledger.curve) / max(1, len(ledger.curve))
        damage, value, change = strongest.pop("")
        by_rule = {rule: one for rule, (_, _, one) in strongest.items()}
        result = AttackResult(*change.apply(graph), change, value, start, noise, ledger, by_rule)
        _warn_if_weak(self, result, damage > noise_damage)
        if tracker is not None:
            _track(tracker, label, result)
        return result


class _DamageAttack(Attack):
    """Climbs the loss of the objective (for classes, one of `ROW_LOSSES`) and chooses by its damage."""

    follows_gradients = True

    def damage(self, judge: Judge, change: GraphChange, value: float) -> float:
        return float(self.objective.value(*judge.observe(change), judge.clean))

    def predicted_classes(self, judge: Judge) -> Tensor | None:
        logits = judge.clean.logits
        return logits.argmax(1) if logits.shape[0] == judge.graph.num_nodes else None

    def site(self, judge: Judge, change: GraphChange, variable: str = "features") -> _InjectionSite:
        partial = self.objective.row_losses or self.objective.top_k_margin is not None
        recompute = judge.recompute if partial else None
        reads = self.objective.reads
        return _InjectionSite(judge.model, judge.graph, change, judge.clean, recompute, reads, variable)

    def climb(
        self, site: _InjectionSite, start: Tensor, specs: Sequence[SearchSpec], box: Box
    ) -> list[SearchResult]:
        return climb(site, _damage_at(site, self.objective, [one.loss for one in specs]), start, specs, box)

    def scores_of(
        self, site: _InjectionSite, values: Tensor, losses: Sequence[str]
    ) -> list[tuple[float, float]]:
        with torch.no_grad():
            loss, damage = _damage_at(site, self.objective, losses)(site.run(values))
        return list(zip(damage.tolist(), loss.tolist(), strict=True))


def _track(tracker: Tracker, run: str, result: AttackResult) -> None:
    tracker.on_start(run, [])
    best = -math.inf
    for step, value in enumerate(result.ledger.curve):
        best = max(best, value)
        tracker.on_epoch(run, step, {"value": value, "best": best})
    totals: dict[str, float | str] = {"clean": result.start, "noise": result.noise, "attacked": result.value}
    tracker.on_end(run, {**totals, "steps": result.ledger.steps, "seconds": result.ledger.seconds})


def _warn_if_weak(attack: Attack, result: AttackResult, grew: bool) -> None:
    """Warn of a search without result, unless the damage `grew` beyond noise."""
    if not result.ledger.steps:
        return
    label = f"{attack.name} ({attack.objective.name})"
    if result.ledger.gradient == 0.0:
        code, text = "zero-gradient", f"every gradient {label} saw was exactly zero: it searched blindly"
    elif grew and type(attack).damage is not Attack.damage:
        return
    elif result.value <= result.start:
        code, text = "attack-without-effect", f"{label} did not raise its objective above clean"
    elif result.value <= result.noise:
        code = "weaker-than-noise"
        text = f"{label} found nothing stronger than random noise of its own budget"
    else:
        return
    warn(ReliabilityWarning(code, text))
