"""`NaturalInjection`: new nodes that look like old ones."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import torch
from torch import Tensor

from fgai.attacks.base import Judge, Ledger, _DamageAttack
from fgai.attacks.budget import Box, Budget
from fgai.attacks.endpoints import draw_endpoints
from fgai.attacks.search.climb import SearchResult, SearchSpec, _Space
from fgai.attacks.search.members import _nodes_of_other_classes, _StartContext
from fgai.attacks.search.site import _InjectionSite
from fgai.attacks.threats import Threat, register_threat
from fgai.graph import Graph, GraphChange

SOURCES = 12  # real nodes that a new one may be made of
COPY_LOGIT = 4.0  # log-weight at which a climb begins of the node it copies; 0 of the others
CLIMBS = {"from equal parts": "margin", "from copies": "margin", "from mixtures": "reach"}
"""The loss of each climb: from equal parts, from the worst copies, from the worst mixtures."""


class NaturalInjection(_DamageAttack):
    """New nodes whose features are those of real nodes of other classes, or mixtures of a few of them.

    Every new node lies in the convex hull of a few real ones, x = Σ_c softmax(θ)_c x_c, so a detector of
    unusual features finds nothing. Tried are copies, random mixtures, and mixtures whose weights θ climb by
    Adam, with the budget's steps and step size; the one with most damage counts. Random noise, the first
    candidate, is made of copies of random nodes.
    """

    name = "natural-injection"

    @property
    def max_steps(self) -> int:
        """Steps of all climbs of all restarts."""
        return self.budget.steps * self.budget.restarts * len(CLIMBS)

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield copies of random nodes, then the worst copies, mixtures and climbs from both."""
        box = self.budget.feature_box(graph)
        assert graph.features is not None
        endpoints = draw_endpoints(nodes, self.budget.nodes, self.budget.edges, generator, graph.batch)
        drawn = torch.randint(graph.num_nodes, (endpoints.shape[0],), generator=generator)
        noise = graph.features.select(drawn.to(graph.device))
        yield GraphChange(endpoints=endpoints, features=noise)
        site = self.site(judge, GraphChange(endpoints=endpoints))
        context = _StartContext(graph, endpoints, self.predicted_classes(judge), box)
        pool = graph.features.select(_nodes_of_other_classes(context, SOURCES, generator).flatten())
        pool = pool.view(endpoints.shape[0], SOURCES, graph.num_features)
        judge.announce("copies and mixtures of real nodes")
        for name, result in self._searched(site, box, pool, generator):
            ledger.add(result, name)
            yield GraphChange(endpoints=endpoints, features=result.features)
        judge.count(site.passes, site.share)

    def _searched(
        self, site: _InjectionSite, box: Box, pool: Tensor, generator: torch.Generator
    ) -> Iterator[tuple[str, SearchResult]]:
        """Search by copies, random mixtures and climbs; points are log-weights [M, C] of `pool` [M, C, F]."""
        count = pool.shape[0]
        shares = torch.rand(SOURCES, count, SOURCES, generator=generator, dtype=torch.float32)
        shares = shares.clamp(min=1e-6).log().neg().to(pool)
        shares = shares / shares.sum(2, keepdim=True)  # exponential over their sum: uniform on the simplex
        copies = torch.eye(SOURCES, device=pool.device, dtype=pool.dtype)[:, None].expand(-1, count, -1)
        starts = [torch.zeros_like(copies[0])]
        for name, weights in (("copies", copies), ("mixtures", shares)):
            began = perf_counter()
            features = torch.einsum("bmc,mcf->bmf", weights, pool)
            scores = self.scores_of(site, features, ["margin"] * SOURCES)
            worst = max(range(SOURCES), key=scores.__getitem__)
            chosen = weights[worst]
            starts.append(COPY_LOGIT * chosen if name == "copies" else chosen.clamp(min=1e-6).log())
            yield name, SearchResult(features[worst], *scores[worst], seconds=perf_counter() - began)
        mixture = _Space(
            start=lambda point, box: point,
            features=lambda point, box: torch.einsum("bmc,mcf->bmf", point.softmax(-1), pool),
        )
        rate, steps = self.budget.step_size, self.budget.steps
        specs = [SearchSpec(space=mixture, rate=rate, loss=loss, steps=steps) for loss in CLIMBS.values()]
        yield from zip(CLIMBS, self.climb(site, torch.stack(starts), specs, box), strict=True)


register_threat(
    Threat(
        "natural",
        NaturalInjection,
        Budget(nodes=20, edges=20, steps=200, step_size=0.1),
        "20 nodes × 20 edges that look like real ones: copies and mixtures of nodes of other classes",
        Budget(nodes=1, edges=3, steps=200, step_size=0.1),
    )
)
