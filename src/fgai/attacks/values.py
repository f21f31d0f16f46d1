"""`ValueInjection`: new nodes that say anything a model's limits let a node say, whatever the features."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from fgai.attacks.base import Attack, Judge, Ledger
from fgai.attacks.budget import Budget
from fgai.attacks.ensemble import EnsembleInjection
from fgai.attacks.reported import ReportedAttack, member_row
from fgai.attacks.search.climb import Climb, Found
from fgai.attacks.search.optimisers import OPTIMISERS
from fgai.attacks.search.site import Site
from fgai.attacks.search.spaces import SPACES
from fgai.attention import AttentionMap, call_model, entry_limits, hearing, observe, straight_through
from fgai.errors import InputError
from fgai.graph import Graph, GraphChange
from fgai.objectives import Objective, Value
from fgai.typed import typed

UNIT = (0.0, 1.0)
CLIMBS: tuple[tuple[str, str, str, float, str], ...] = (
    ("sign", "box", "sign", 0.04, "margin"),
    ("adam margin", "tanh", "adam", 0.1, "margin"),
    ("adam reach", "tanh", "adam", 0.1, "reach"),
)
"""Name, space, optimiser, rate in units of half the box, and loss of each climb."""
STARTS = ("contained", "uniform", "corners")
INSIDE = 0.02
"""How far from a corner a climb that begins there stands: at it, tanh is flat."""


@typed
class ValueInjection(ReportedAttack):
    """New nodes searched for in the box of what the first layer's limits let a node say.

    Whatever its features, a new node behind limits is a point in that box, so the worst point is an upper
    bound on every attack by features, with any feature box, at the same endpoints. The search holds an attack
    by features: it begins, among others, at what that one found, and is never weaker than it.

    Args:
        budget: nodes, edges and targets; its `steps`, where not 0, are those of each climb.
        objective: as for every attack.
        k: size of the explanation.
        contained: the attack by features; all members of the ensemble at the seed's endpoints by default.
    """

    name = "value-injection"

    def __init__(
        self,
        budget: Budget,
        objective: str | Objective | Value = "prediction",
        *,
        k: int = 5,
        contained: Attack | None = None,
    ) -> None:
        super().__init__(budget, objective, k=k)
        self.contained = contained or EnsembleInjection(budget, objective, k=k, rules=("random",))
        self.steps = budget.steps or 200

    def specification(self) -> dict[str, Any]:
        """Return the climbs, their starts, and the attack by features, too."""
        climbs = [list(climb) for climb in CLIMBS]
        inner = self.contained.specification()
        return {**super().specification(), "climbs": climbs, "starts": list(STARTS), "contained": inner}

    @property
    def allowed_steps(self) -> int:
        """Those of the attack by features, and of all climbs from all starts, true and straight-through."""
        own = 2 * self.steps * len(CLIMBS) * len(STARTS) * self.budget.restarts
        return self.contained.allowed_steps + own

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield what the attack by features found, then the worst point of every climb in the box."""
        entry = entry_limits(judge.model)
        if not entry:
            raise InputError(
                f"the threat `values` is for models with limits, this {type(judge.model).__name__} has none;"
                " see `fgai.limit`"
            )
        stream, inner = torch.Generator().manual_seed(generator.initial_seed()), Ledger()
        worst, most, noise = GraphChange(), -1.0, None
        for change in self.contained.candidates(graph, nodes, stream, judge, inner):
            if noise is None:  # what every attack yields first
                noise = change
                yield change
            with torch.no_grad():
                damage = self.damage(judge, change.detach(), 0.0)
            if damage > most:
                worst, most = change.detach(), damage
        ledger.steps, ledger.gradient = ledger.steps + inner.steps, max(ledger.gradient, inner.gradient)
        endpoints, features = worst.endpoints, worst.features
        if endpoints is None or features is None:
            raise InputError(f"{type(self.contained).__name__} injects no nodes, so it cannot be contained")
        found = Found(features, most, 0.0, inner.gradient, inner.steps)
        ledger.members.append(member_row("features", "random", found, 0.0))
        yield worst
        said = _said(judge, worst)
        coins = torch.rand(said.shape, generator=generator).to(said) < 0.5
        starts = {
            "contained": said,
            "uniform": torch.rand(said.shape, generator=generator).to(said),
            "corners": torch.where(coins, INSIDE, 1 - INSIDE),
        }
        site = _ValueSite(judge.model, graph, endpoints, judge.clean, None, reads=self.reads)
        for name, one, seconds in self._climbs(site, starts, self.labels(judge)):
            ledger.steps += one.steps
            ledger.gradient = max(ledger.gradient, one.gradient)
            ledger.members.append(member_row(name, "random", one, seconds))
            yield GraphChange(endpoints=endpoints, features=features, voices=one.features)
        judge.spent(site.passes, 1.0)

    def _climbs(
        self, site: Site, starts: dict[str, Tensor], labels: Tensor
    ) -> Iterator[tuple[str, Found, float]]:
        start = torch.stack(list(starts.values()))
        for name, space, optimiser, rate, loss in CLIMBS:
            for straight in (False, True):
                began = perf_counter()
                unit = 0.5 if space == "box" else 1.0
                rates = start.new_full((len(start), 1, 1), rate * unit)
                climb = Climb(
                    site,
                    self.aim([loss] * len(start), site, labels),
                    start,
                    SPACES[space],
                    OPTIMISERS[optimiser](start, rates),
                    UNIT,
                )
                if straight:
                    with straight_through(site.model):
                        made = climb.run(self.steps)
                else:
                    made = climb.run(self.steps)
                seconds = (perf_counter() - began) / len(made)
                for where, found in zip(starts, made, strict=True):
                    yield f"{name} from {where}{' straight' if straight else ''}", found, seconds


class _ValueSite(Site):
    """New nodes whose voices move, in the place of features."""

    def _whole(self, features: Tensor) -> tuple[Tensor, AttentionMap | None]:
        attacked = self.template.replace(voices=features)
        if not self.reads:
            return call_model(self.model, attacked).index_select(0, self.rows), None
        seen = observe(self.model, attacked, heads="mean", grad=True)
        return seen.logits.index_select(0, self.rows), seen.attention


def _said(judge: Judge, change: GraphChange) -> Tensor:
    """Return what the first layer hears of new nodes, as points of the unit box [M, D]."""
    assert change.endpoints is not None
    count, entry = len(change.endpoints), entry_limits(judge.model)
    with torch.no_grad(), hearing(entry) as heard:
        call_model(judge.model, change.apply(judge.graph)[0])
    return torch.cat([heard[limits][0][-count:].flatten(1) for limits in entry], dim=1)
