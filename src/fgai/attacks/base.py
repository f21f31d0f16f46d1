"""`Attack`: proposes changes, never judges them; the base class checks, judges and restores."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any, final

import torch
from torch import Tensor, nn

from fgai import checks
from fgai.alone import with_gradients
from fgai.attacks.budget import Budget, check
from fgai.attacks.judge import Judge, Ledger
from fgai.attention import evaluating, observe, prepared
from fgai.errors import BudgetError, InputError, ReliabilityWarning, warn
from fgai.graph import Graph, GraphChange
from fgai.models import as_graph
from fgai.objectives import Clean, Loss, Objective
from fgai.progress import stage
from fgai.recompute.local import Recompute
from fgai.recompute.partial import PartialObjective
from fgai.sparse import EdgeMap
from fgai.tasks import task_of
from fgai.trackers import Tracker
from fgai.typed import typed

__all__ = ["Attack", "AttackResult", "Judge", "Ledger"]


@typed
@dataclass(frozen=True, eq=False)
class AttackResult:
    """The strongest perturbation found, already checked against the budget.

    Attributes:
        graph: perturbed; its first N nodes are the original ones.
        edge_map: of the original edges (prepared graph) into `graph`.
        change: the perturbation itself.
        value: of the objective, judged afresh.
        start: value of the objective on the clean graph.
        noise: value under random noise of the same budget.
        ledger: what was spent.
        by_rule: of an ensemble, the strongest change at the endpoints of each rule, see
            `fgai.attacks.endpoints`; else empty.
    """

    graph: Graph
    edge_map: EdgeMap
    change: GraphChange
    value: float
    start: float
    noise: float
    ledger: Ledger
    by_rule: dict[str, GraphChange] = field(default_factory=dict)


@dataclass
class _Strongest:
    """The change with the largest damage so far; of equal ones that with the largest value."""

    change: GraphChange = field(default_factory=GraphChange)
    damage: float = -math.inf
    value: float = -math.inf

    def offer(self, change: GraphChange, damage: float, value: float) -> bool:
        """Take a change if it is stronger, and return whether it is."""
        stronger = damage > self.damage or (damage == self.damage and value > self.value)
        if stronger:
            self.change, self.damage, self.value = change, damage, value
        return stronger


@typed
class Attack(ABC):
    """An attack with its settings; the data comes with the call.

    Args:
        budget: what it may spend.
        objective: what it maximises: a name from `OBJECTIVES`, an `Objective`, or a function of (logits,
            attention, clean).
        k: size of the explanation, for objectives named by a word.

    Attributes:
        name: in tables and records.
        removes: whether edges of the graph go, too.
        chooses: whether what a model says decides where it strikes.
        version: of the search; raised when a change of its code makes it find other numbers.
    """

    name = "attack"
    removes = False
    chooses = False
    version = 1

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

        `judge(attacked)` returns the objective on a perturbed graph, with gradients to its features;
        `judge.clean` holds what the model said before.
        """

    def specification(self) -> dict[str, Any]:
        """Return what is searched and how, in plain values; records name it by a hash.

        Two attacks of one specification and version find the same.
        """
        return {
            "attack": self.name,
            "version": self.version,
            "objective": self.objective.name,
            "budget": asdict(self.budget),
        }

    def damage(self, judge: Judge, change: GraphChange, value: float) -> float:
        """Return what the strongest change is chosen by: the objective's value, if not overridden.

        Args:
            judge: of this attack.
            change: checked against the budget.
            value: of the objective after it, judged afresh.
        """
        return value

    @property
    def searches(self) -> bool:
        """Whether it follows gradients, so that the objective makes a difference."""
        return self.budget.steps > 0

    @property
    def aims(self) -> bool:
        """Whether it may strike other places in another model; otherwise a seed says where, for all alike."""
        return self.chooses or self.budget.restarts > 1

    @property
    def allowed_steps(self) -> int:
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
        """Attack `model` on `data` and return the strongest change found; the model is left as it was.

        Args:
            model: attacked through its own gradients, in eval mode.
            data: a `Graph` or PyG `Data`.
            seed: of endpoints and starts; endpoints depend on nothing else, so every model gets the same.
            vanilla: the model the attacked one was made from, read by attacks that choose endpoints or try
                what broke it. None: the model itself.
            on_step: called with a few words before each long step of the search.
            tracker: told of every value judged, in order, when the search is over: to read one earlier would
                make the device wait.
            partial: compute only the rows in reach of a change where that pays; same values, fewer edges.

        Raises:
            BudgetError: if the budget is impossible on this graph or the attack overspent it.
            InputError: if the model's output is not finite, so that nothing can be compared.
        """
        given = as_graph(data)
        task = task_of(given)
        graph = prepared(model, task.view(given, self.budget.targets))
        nodes = self.budget.target_nodes(graph)
        if self.budget.nodes:
            self.budget.check_box(graph)
        ledger, began = Ledger(), perf_counter()
        best, by_rule, noise = _Strongest(), defaultdict[str, _Strongest](_Strongest), -math.inf
        label = f"{self.objective.name} attack"
        with evaluating(model, freeze=True), stage(label, self.allowed_steps or None):
            recompute = None
            if partial and self.searches and Recompute.fits(model, graph):
                recompute = Recompute(model, graph)
                logits, attention = recompute.clean_logits, recompute.clean_attention
            else:
                seen = observe(model, graph)
                logits, attention = seen.logits, seen.attention
            rows = task.rows(graph, self.budget.targets)
            clean = Clean(logits, attention, rows, task.labels(graph), task.name, task.headline_for(graph))
            start = float(self.objective(logits, attention, clean))
            if not math.isfinite(start):
                raise InputError(
                    f"the model's output on {graph.name!r} is not finite; there is nothing to attack"
                )
            shortcut = None if recompute is None else PartialObjective(recompute, self.objective, clean)
            judge = Judge(model, graph, self.objective, clean, ledger, shortcut, recompute, vanilla, on_step)
            for restart in range(self.budget.restarts):
                generator = torch.Generator().manual_seed(checks.seed(seed) * 7_919 + restart)
                for index, change in enumerate(self.candidates(graph, nodes, generator, judge, ledger)):
                    frozen = change.detach()
                    check(frozen, self.budget, graph)
                    with torch.no_grad():
                        value = float(judge.change(frozen))
                    noise = max(noise, value) if index == 0 else noise
                    damage = self.damage(judge, frozen, value)
                    ledger.damages.append(damage)
                    if best.offer(frozen, damage, value):
                        ledger.won = len(ledger.damages) - 1
                    if ledger.rules:
                        by_rule[ledger.rules[-1]].offer(frozen, damage, value)
            attacked, edge_map = best.change.apply(graph)
        if best.value == -math.inf:
            raise InputError(f"the model's output was not finite under any change {self.name} tried")
        if ledger.steps > self.allowed_steps:
            raise BudgetError(f"{self.name} took {ledger.steps} steps, allowed {self.allowed_steps} in all")
        ledger.seconds = perf_counter() - began
        ledger.curve = judge.curve()
        if self.objective.constrained:
            ledger.feasible = sum(value >= 0 for value in ledger.curve) / max(1, len(ledger.curve))
        strongest = {rule: one.change for rule, one in by_rule.items()}
        result = AttackResult(attacked, edge_map, best.change, best.value, start, noise, ledger, strongest)
        _warn_if_weak(self, result)
        if tracker is not None:
            _tell(tracker, label, result)
        return result


def _tell(tracker: Tracker, run: str, result: AttackResult) -> None:
    """Give a tracker the values that were judged, the best so far beside each."""
    tracker.on_start(run, [])
    best = -math.inf
    for step, value in enumerate(result.ledger.curve):
        best = max(best, value)
        tracker.on_epoch(run, step, {"value": value, "best": best})
    found: dict[str, float | str] = {"clean": result.start, "noise": result.noise, "attacked": result.value}
    tracker.on_end(run, {**found, "steps": result.ledger.steps, "seconds": result.ledger.seconds})


def _warn_if_weak(attack: Attack, result: AttackResult) -> None:
    """Say so when a search found nothing: its result is then no evidence of robustness."""
    if not result.ledger.steps:
        return
    label = f"{attack.name} ({attack.objective.name})"
    if result.ledger.gradient == 0.0:
        code, text = "zero-gradient", f"every gradient {label} saw was exactly zero: it searched blindly"
    elif result.value <= result.start:
        code, text = "attack-without-effect", f"{label} did not raise its objective above clean"
    elif result.value <= result.noise:
        code, text = (
            "weaker-than-noise",
            f"{label} found nothing stronger than random noise of its own budget",
        )
    else:
        return
    warn(ReliabilityWarning(code, text))
