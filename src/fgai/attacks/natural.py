"""`NaturalInjection`: new nodes that look like old ones."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import torch
from torch import Tensor

from fgai.attacks.base import Judge, Ledger
from fgai.attacks.injection import draw_endpoints
from fgai.attacks.reported import ReportedAttack, member_row
from fgai.attacks.search.climb import Climb, Found
from fgai.attacks.search.optimisers import Adam
from fgai.attacks.search.site import Site
from fgai.attacks.search.spaces import mixtures
from fgai.attacks.search.starts import Place, strangers
from fgai.errors import InputError
from fgai.graph import Graph, GraphChange

MODELS = 12
"""Real nodes that a new one may be made of."""
SURE = 4.0
"""How much likelier the model a climb begins at is than the others, as a logarithm."""
LOSSES = ("margin", "margin", "reach")
"""What each climb maximises: from equal parts, from the worst copies, from the worst mixtures."""


class NaturalInjection(ReportedAttack):
    """New nodes whose features are those of real nodes of other classes, or mixtures of a few of them.

    A detector that looks at features sees nothing it has not seen: every new node lies in the convex hull of
    a few real ones, x = Σ_c softmax(θ)_c x_c. Tried are copies, random mixtures, and mixtures whose weights θ
    climb by Adam, with the budget's steps and step size; the one that does most damage to what is reported
    counts. What no defence by limits on features can remove stays below this.

    Random noise, the first candidate, is made of copies of random nodes.
    """

    name = "natural-injection"

    @property
    def allowed_steps(self) -> int:
        """Steps of all climbs of all restarts."""
        return self.budget.steps * self.budget.restarts * len(LOSSES)

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield copies of random nodes, then the worst copies, mixtures and climbs from both."""
        if graph.features is None:
            raise InputError(f"{graph.name!r} has no features to attack")
        endpoints = draw_endpoints(nodes, self.budget.nodes, self.budget.edges, generator, graph.batch)
        drawn = torch.randint(graph.num_nodes, (endpoints.shape[0],), generator=generator)
        noise = graph.features.select(drawn.to(graph.device))
        yield GraphChange(endpoints=endpoints, features=noise)
        place = Place(graph, endpoints, self.predicted(judge), self.budget.feature_box(graph))
        site = self.site(judge.model, graph, endpoints, judge.clean, judge.recompute)
        pool = graph.features.select(strangers(place, MODELS, generator).flatten())
        pool = pool.view(endpoints.shape[0], MODELS, graph.num_features)
        judge.tell("copies and mixtures of real nodes")
        for found in self._searched(site, place, pool, generator, ledger):
            yield GraphChange(endpoints=endpoints, features=found.features)
        judge.spent(site.passes, site.share)

    def _searched(
        self,
        site: Site,
        place: Place,
        pool: Tensor,
        generator: torch.Generator,
        ledger: Ledger,
    ) -> Iterator[Found]:
        """The worst copies and random mixtures, and what climbs from equal parts and from both find."""
        count = pool.shape[0]
        shares = torch.rand(MODELS, count, MODELS, generator=generator, dtype=torch.float32)
        shares = shares.clamp(min=1e-6).log().neg().to(pool)
        shares = shares / shares.sum(2, keepdim=True)  # exponential over their sum: uniform on the simplex
        copies = torch.eye(MODELS, device=pool.device, dtype=pool.dtype)[:, None].expand(-1, count, -1)
        starts = [torch.zeros_like(copies[0])]
        for name, weights in (("copies", copies), ("mixtures", shares)):
            began = perf_counter()
            best, found = self._tried(site, weights, pool)
            starts.append(SURE * best if name == "copies" else best.clamp(min=1e-6).log())
            ledger.members.append(member_row(name, "random", found, perf_counter() - began))
            yield found
        began = perf_counter()
        start, space = torch.stack(starts), mixtures(pool)
        rates = start.new_full((len(LOSSES), 1, 1), self.budget.step_size)
        climb = Climb(site, self.aim(LOSSES, site), start, space, Adam(start, rates), place.box)
        made = climb.run(self.budget.steps)
        seconds = (perf_counter() - began) / len(made)
        for name, found in zip(("from equal parts", "from copies", "from mixtures"), made, strict=True):
            ledger.steps += found.steps
            ledger.gradient = max(ledger.gradient, found.gradient)
            ledger.members.append(member_row(name, "random", found, seconds))
            yield found

    def _tried(self, site: Site, weights: Tensor, pool: Tensor) -> tuple[Tensor, Found]:
        """The worst of several mixtures: weights [B, M, C] of real nodes [M, C, F]."""
        with torch.no_grad():
            features = torch.einsum("bmc,mcf->bmf", weights, pool)
            loss, damage = self.aim([LOSSES[0]] * len(weights), site)(site.view(features))
            scores = list(zip(damage.tolist(), loss.tolist(), strict=True))
        worst = max(range(len(scores)), key=scores.__getitem__)
        return weights[worst], Found(features[worst], *scores[worst], 0.0, 0)
