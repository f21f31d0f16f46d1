"""Node injection: a few new nodes with random or adversarial features, joined to the targets."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fgai import checks
from fgai.attacks.base import Attack, Judge, Ledger
from fgai.attacks.budget import LARGEST, Box
from fgai.attacks.endpoints import _near_endpoints, draw_endpoints
from fgai.attacks.search.climb import SearchSpec
from fgai.graph import Graph, GraphChange
from fgai.typed import typed


@typed
def draw_features(graph: Graph, count: int, box: Box, generator: torch.Generator) -> Tensor:
    """Return [count, F] features drawn uniformly from the box, as `Budget.noise_box` returns one."""
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

    The climb of the first restart begins at the middle of the box, from which every corner is within reach;
    later restarts begin at random. The best point counts, so more steps never make the attack weaker.
    With `Budget(steps=1, step_size=1.0)` it is FGSM: one step, from the middle to a corner.
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
        restart = ledger.steps // max(1, spec.steps)
        change, start = self.begin(graph, nodes, generator, restart, noise)
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
    graph, so restarts differ in where the new nodes are joined and in the features they begin with:

    1. endpoints at random, features from the middle of the box: as `PGDInjection`;
    2. the same endpoints, features from the average of the endpoints' own;
    3. endpoints out of one neighbourhood each, features from the average of the endpoints' own;
    4. endpoints out of one neighbourhood each, features from random noise; and so on in turn.

    The gradients are the model's own, through whatever it does to the graph.
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
    """Return [M, F]: the average features of the nodes that each new node is joined to."""
    assert graph.features is not None
    rows, positions = torch.unique(endpoints, return_inverse=True)
    real = graph.features.select(rows)
    out = real.new_zeros(endpoints.shape[0], graph.num_features)
    for index, position in enumerate(positions):  # row by row: all at once would lay out every endpoint again
        out[index] = real[position].mean(0)
    return out
