"""`ValueInjection`: new nodes with any values that a model's limits allow, whatever the features."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fgai.attacks.base import Attack, Judge, Ledger, _DamageAttack
from fgai.attacks.budget import Box, Budget
from fgai.attacks.ensemble import EnsembleInjection
from fgai.attacks.search.climb import SearchResult, SearchSpec, _Space
from fgai.attacks.search.site import _InjectionSite
from fgai.attention import Limits, call_model, entry_limits, overriding, straight_through
from fgai.errors import InputError
from fgai.graph import Graph, GraphChange
from fgai.objectives import Loss, Objective
from fgai.typed import typed

UNIT = _Space(
    start=lambda values, box: values.clamp(0.0, 1.0),
    features=lambda point, box: point,
    project=lambda point, box: point.clamp_(0.0, 1.0),
    half=0.5,
)
CLIMBS = {
    "sign": SearchSpec(space=UNIT, optimiser="sign", rate=0.04),
    "adam margin": SearchSpec(),
    "adam reach": SearchSpec(loss="reach"),
}
STARTS = ("contained", "uniform", "corners")
INSIDE = 0.02  # distance from the corner at which a climb begins: at the corner itself, tanh is flat


@typed
class ValueInjection(_DamageAttack):
    """New nodes searched for in the box of values that the first layer's limits allow a node.

    Behind limits all that attention reads of a new node is a point in that box, so the damage at the worst
    point bounds every attack by features, with any feature box, at the same endpoints (of GAT and GATv2; a GT
    also passes features on beside attention, and those stay as they are). The search may miss that point, but
    is never weaker than `feature_attack`, by default the ensemble at the seed's endpoints, from whose result
    it starts. `steps` of the budget, where not 0, are those of each climb.
    """

    name = "value-injection"
    endpoints_depend_on_model = True
    version = 2

    def __init__(
        self,
        budget: Budget,
        objective: str | Objective | Loss = "prediction",
        *,
        k: int = 5,
        feature_attack: Attack | None = None,
    ) -> None:
        super().__init__(budget, objective, k=k)
        self.feature_attack = feature_attack or EnsembleInjection(budget, objective, k=k, rules=("random",))
        self.steps = budget.steps or 200

    def specification(self) -> dict[str, Any]:
        """Return the climbs, their starts, and the attack by features, too."""
        climbs = [
            [name, "box" if one.space is UNIT else one.space, one.optimiser, one.rate, one.loss]
            for name, one in CLIMBS.items()
        ]
        inner = self.feature_attack.specification()
        return {**super().specification(), "climbs": climbs, "starts": list(STARTS), "contained": inner}

    @property
    def max_steps(self) -> int:
        """Those of the attack by features, and of all climbs, true and straight-through."""
        own = 2 * self.steps * len(CLIMBS) * len(STARTS) * self.budget.restarts
        return self.feature_attack.max_steps + own

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield the result of the attack by features, then the worst point of every climb in the box."""
        entry = entry_limits(judge.model)
        if not entry:
            raise InputError(
                f"the threat `values` needs a model with limits, this {type(judge.model).__name__} has none;"
                " add them with `fgai.limit`"
            )
        stream, inner = torch.Generator().manual_seed(generator.initial_seed()), Ledger()
        worst, most, noise = GraphChange(), float("-inf"), None
        for change in self.feature_attack.candidates(graph, nodes, stream, judge, inner):
            if noise is None:  # what every attack yields first
                noise = change
                yield change
            with torch.no_grad():
                damage = self.damage(judge, change.detach(), 0.0)
            if damage > most:
                worst, most = change.detach(), damage
        endpoints, features = worst.endpoints, worst.features
        if endpoints is None or features is None:
            raise InputError(f"`values` needs injected nodes, got {type(self.feature_attack).__name__}")
        ledger.add(SearchResult(features, most, 0.0, inner.gradient, inner.steps), "features")
        yield worst
        values = _entry_values(judge, worst)
        coins = torch.rand(values.shape, generator=generator, dtype=torch.float32).to(values) < 0.5
        starts = {
            "contained": values,
            "uniform": torch.rand(values.shape, generator=generator, dtype=torch.float32).to(values),
            "corners": torch.where(coins, values.new_tensor(INSIDE), values.new_tensor(1 - INSIDE)),
        }
        site = self.site(judge, worst, variable="entry_values")
        for name, result in self._climbs(site, starts):
            ledger.add(result, name)
            yield GraphChange(endpoints=endpoints, features=features, entry_values=result.features)
        judge.count(site.passes, site.share)

    def _climbs(self, site: _InjectionSite, starts: dict[str, Tensor]) -> Iterator[tuple[str, SearchResult]]:
        """Climb from every start in every way, all side by side; then again, straight through the limits."""
        pairs = list(itertools.product(CLIMBS, starts))
        start = torch.stack([starts[where] for _, where in pairs])
        specs = [replace(CLIMBS[name], steps=self.steps) for name, _ in pairs]
        box = Box.of(0.0, 1.0, start[0, 0])
        for through, more in ((nullcontext, ""), (straight_through, " straight")):
            with through(site.model):
                results = self.climb(site, start, specs, box)
            for (name, where), result in zip(pairs, results, strict=True):
                yield f"{name} from {where}{more}", result


def _entry_values(judge: Judge, change: GraphChange) -> Tensor:
    """Return the values of new nodes at the first layer, as points of the unit box [M, D]."""
    assert change.endpoints is not None
    count, entry = len(change.endpoints), entry_limits(judge.model)
    points: dict[Limits, Tensor] = {}

    def keep_points(limits: Limits, clip: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        out = clip(x)
        points.setdefault(limits, limits.to_unit_box(out[-count:].view(count, *limits.low.shape)).flatten(1))
        return out

    with torch.no_grad(), overriding(entry, keep_points):
        call_model(judge.model, change.apply(judge.graph)[0])
    return torch.cat([points[limits] for limits in entry], dim=1)
