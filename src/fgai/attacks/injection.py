"""Node injection: new nodes with random, adversarial or natural features, joined to the targets."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fgai import checks
from fgai.attacks.base import Attack, Judge, Ledger, _DamageAttack
from fgai.attacks.budget import LARGEST, Box
from fgai.attacks.endpoints import _batch_endpoints, _near_endpoints, draw_endpoints
from fgai.attacks.existing import _attacker_labels
from fgai.attacks.search.climb import SearchResult, SearchSpec, _Space
from fgai.attacks.search.members import _nodes_of_other_classes, _StartContext
from fgai.attacks.search.site import _InjectionSite
from fgai.attention import AttentionMap
from fgai.graph import Graph, GraphChange
from fgai.objectives import Clean, Objective
from fgai.typed import typed

SOURCES = 12  # real nodes that a new one may be made of
COPY_LOGIT = 4.0  # first log-weight of the copied node; 0 for the others
CLIMBS = {"from equal parts": "margin", "from copies": "margin", "from mixtures": "reach"}  # loss of each
BATCHES = 5  # of new nodes, a fifth each, as in the original
SMOOTH = 4.0  # cross-entropy, in nats, from which a node counts as misclassified and has no gradient
SINE = _Space(lambda angle, box: box.features(torch.sin(angle)))


@typed
def draw_features(graph: Graph, count: int, box: Box, generator: torch.Generator) -> Tensor:
    """Return [count, F] features drawn uniformly from `box`, e.g. `Budget.noise_box(graph)`."""
    checks.whole(count, "count", 0, LARGEST)
    noise = torch.rand(count, graph.num_features, generator=generator, dtype=torch.float32).to(box.low)
    return (box.low + (box.high - box.low) * noise).clamp(*box)


class RandomInjection(Attack):
    """New nodes with random features: the noise floor."""

    name = "random-injection"

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield one random draw."""
        endpoints = draw_endpoints(nodes, self.budget.nodes, self.budget.edges, generator, graph.batch)
        features = draw_features(graph, endpoints.shape[0], self.budget.noise_box(graph), generator)
        yield GraphChange(endpoints=endpoints, features=features)


class PGDInjection(RandomInjection):
    """New nodes whose features climb the objective by signed gradient steps inside the box.

    The first climb begins at the middle of the box, later restarts begin at random. The best point counts, so
    more steps never make the attack weaker. `Budget(steps=1, step_size=1.0)` gives FGSM.
    """

    name = "pgd-injection"

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield random noise, then the best point of the climb."""
        box = self.budget.feature_box(graph)
        (noise,) = super().candidates(graph, nodes, generator, judge, ledger)
        assert noise.endpoints is not None
        yield noise
        budget = self.budget
        spec = SearchSpec(space="box", optimiser="sign", rate=budget.step_size, steps=budget.steps)
        change, start = self.begin(graph, nodes, generator, ledger.steps // max(1, spec.steps), noise)
        start = box.middle.expand(len(noise.endpoints), -1) if start is None else start.clamp(*box)
        result = judge.climb(change, start, spec, box)
        ledger.add(result)
        yield GraphChange(endpoints=change.endpoints, features=result.features)

    def begin(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, restart: int, noise: GraphChange
    ) -> tuple[GraphChange, Tensor | None]:
        """Return the change whose features move in a restart, and the start; None for the box's middle."""
        return noise, None if restart == 0 and self.budget.steps > 0 else noise.features


class AdaptiveInjection(PGDInjection):
    """Several climbs, each from a start that suits another kind of defence; the best counts.

    Defences distrust edges between unlike nodes and edges that do not fit the large-scale structure of the
    graph, so restarts differ, in turn, in the endpoints and in the first features:

    1. endpoints at random, features from the middle of the box: as `PGDInjection`;
    2. the same endpoints, features from the average of the endpoints' own;
    3. endpoints out of one neighbourhood each, features from the average of the endpoints' own;
    4. endpoints out of one neighbourhood each, features from random noise.
    """

    name = "adaptive-injection"

    def begin(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, restart: int, noise: GraphChange
    ) -> tuple[GraphChange, Tensor | None]:
        """Return the endpoints and the features of this restart's climb."""
        change, turn = noise, restart % 4
        if turn >= 2 and graph.batch is None:
            near = _near_endpoints(graph, nodes, self.budget.nodes, self.budget.edges, generator)
            change = GraphChange(endpoints=near)
        if turn in (1, 2):
            assert change.endpoints is not None
            return change, _mean_of_endpoints(graph, change.endpoints)
        return change, None if restart == 0 else noise.features


def _mean_of_endpoints(graph: Graph, endpoints: Tensor) -> Tensor:
    assert graph.features is not None
    rows, positions = torch.unique(endpoints, return_inverse=True)
    real = graph.features.select(rows)
    out = real.new_zeros(endpoints.shape[0], graph.num_features)
    for index, position in enumerate(positions):  # row by row: all at once would lay out every endpoint again
        out[index] = real[position].mean(0)
    return out


class NaturalInjection(_DamageAttack):
    """New nodes whose features are those of real nodes of other classes, or mixtures of a few of them.

    Every new node is x = Σ_c softmax(θ)_c x_c over a few real ones, so a detector of unusual features finds
    nothing. Tried are copies, random mixtures, and mixtures whose θ climb by Adam with the budget's steps and
    step size; the one with most damage counts. Random noise is made of copies of random nodes.
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
        yield GraphChange(endpoints=endpoints, features=graph.features.select(drawn.to(graph.device)))
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
        mixture = _Space(lambda point, box: torch.einsum("bmc,mcf->bmf", point.softmax(-1), pool))
        rate, steps = self.budget.step_size, self.budget.steps
        specs = [SearchSpec(space=mixture, rate=rate, loss=loss, steps=steps) for loss in CLIMBS.values()]
        yield from zip(CLIMBS, self.climb(site, torch.stack(starts), specs, box), strict=True)


class TDGIA(RandomInjection):
    """New nodes in batches, each joined to the targets that are easiest to move, with smooth features.

    Before a batch, every target v is scored on the current graph,

        (2 + p_v) · (0.9 / d_v + 0.1 / √(e d_v)),

    p_v its probability of the clean prediction, d_v its degree plus one, e the edges of a new node. Each new
    node gets some of the best, of mixed classes. Then the features of all new nodes so far, x = middle +
    half-width · sin(u), climb by Adam on u. Under the `prediction` objective they climb

        -mean over targets of relu(4 - cross-entropy)²,

    which has no gradient at nodes that are misclassified; other objectives as they are. The objective itself
    chooses the best point of each batch. `steps` are shared by the batches, `step_size` is Adam's rate.

    Reference: Zou et al., TDGIA: Effective Injection Attacks on Graph Neural Networks, KDD 2021. Theirs ranks
    with a surrogate model and has hundreds of steps a batch; ours goes through the attacked model itself.
    """

    name = "tdgia"
    endpoints_depend_on_model = True
    version = 2

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield random noise, then the best point after each batch."""
        budget, box = self.budget, self.budget.feature_box(graph)
        _attacker_labels(graph, judge.clean.logits)  # refuses tasks other than classes of nodes
        (noise,) = super().candidates(graph, nodes, generator, judge, ledger)
        yield noise
        assert noise.features is not None
        joined, angles = nodes.new_zeros(0, budget.edges), noise.features[:0]
        attacked, logits = graph, judge.clean.logits
        guide = SMOOTH_PREDICTION if self.objective.name == "prediction" else None
        size = max(1, min(-(-budget.nodes // BATCHES), nodes.numel() // max(1, budget.edges)))
        sizes = [min(size, budget.nodes - first) for first in range(0, budget.nodes, size)]
        for index, size in enumerate(sizes):
            endpoints = _batch_endpoints(
                attacked, nodes, logits, judge.clean.logits, (size, budget.edges), generator
            )
            joined = torch.cat([joined, endpoints])
            fresh = torch.randn(size, graph.num_features, generator=generator, dtype=torch.float32)
            angles = torch.cat([angles, fresh.to(angles)])
            steps = budget.steps * (index + 1) // len(sizes) - budget.steps * index // len(sizes)
            spec = SearchSpec(space=SINE, optimiser="adam", rate=budget.step_size, steps=steps)
            result = judge.climb(GraphChange(endpoints=joined), angles, spec, box, guide=guide)
            ledger.add(result)
            assert result.last is not None
            angles, change = result.last, GraphChange(endpoints=joined, features=result.features)
            yield change
            if index < len(sizes) - 1:
                attacked = change.apply(graph)[0]
                with torch.no_grad():
                    logits, attention = judge.observe(change, self.objective.reads)
                    judge.count(0, 1.0, self.objective(logits, attention, judge.clean)[None])


def _smooth_prediction(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
    """`-mean relu(4 - cross-entropy)²` against the clean prediction; we maximise it."""
    loss = cross_entropy(logits[clean.nodes], clean.logits[clean.nodes].argmax(1), reduction="none")
    return -(SMOOTH - loss).clamp(min=0).square().mean()


SMOOTH_PREDICTION = Objective("smooth prediction", _smooth_prediction, "logits", node_mean=True)
