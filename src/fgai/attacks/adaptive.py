"""Injection that expects a defence: new nodes that pass for members of the neighbourhood they attack."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fgai.attacks.base import Judge, Ledger
from fgai.attacks.injection import PGDInjection, climb, draw_endpoints, draw_features
from fgai.errors import InputError
from fgai.graph import Graph, GraphChange
from fgai.ops import aggregate


class AdaptiveInjection(PGDInjection):
    """Several climbs, each from where another kind of defence is blind; the best counts.

    Defences distrust edges between unlike nodes and edges that do not fit the large-scale structure of the
    graph, so restarts differ in where the new nodes are joined and in the features they begin with:

    1. endpoints at random, features from the middle of the box: what `PGDInjection` does;
    2. the same endpoints, features from the average of the endpoints' own (a disguise);
    3. endpoints out of one neighbourhood each, in disguise;
    4. endpoints out of one neighbourhood each, features from random noise; and so on in turn.

    The gradients are the model's own, through whatever it does to the graph. With fewer restarts the first
    ones are tried.
    """

    name = "adaptive-injection"

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield random noise, then the best point of this restart's climb."""
        budget, original = self.budget, graph.features
        if original is None:
            raise InputError(f"{graph.name!r} has no features to attack")
        box = budget.feature_box(graph)
        endpoints = draw_endpoints(nodes, budget.nodes, budget.edges, generator, graph.batch)
        noise = draw_features(graph, endpoints.shape[0], budget.noise_box(graph), generator)
        yield GraphChange(endpoints=endpoints, features=noise)
        restart = ledger.steps // max(1, budget.steps)
        if restart % 4 >= 2 and graph.batch is None:
            endpoints = near_endpoints(graph, nodes, budget.nodes, budget.edges, generator)
        start = noise
        if restart == 0:
            start = box.middle.expand_as(noise)
        elif restart % 4 in (1, 2):
            start = disguise(graph, endpoints).clamp(*box)
        template, _ = GraphChange(endpoints=endpoints).apply(graph)

        def objective(points: Tensor) -> Tensor:
            return judge(template.replace(features=original.append(box.features(points))))

        best = climb(objective, box.points(start), budget, ledger)
        yield GraphChange(endpoints=endpoints, features=box.features(best))


def disguise(graph: Graph, endpoints: Tensor) -> Tensor:
    """Return [M, F]: the average features of the nodes that each new node is joined to."""
    assert graph.features is not None
    rows, places = torch.unique(endpoints, return_inverse=True)
    known = graph.features.select(rows)
    out = known.new_zeros(endpoints.shape[0], graph.num_features)
    for index, place in enumerate(places):  # row by row: all at once would lay out every endpoint again
        out[index] = known[place].mean(0)
    return out


def near_endpoints(graph: Graph, nodes: Tensor, count: int, each: int, generator: torch.Generator) -> Tensor:
    """Return [count, each] endpoints, each row out of one neighbourhood.

    A row is drawn around one target: the targets that most paths of one or two edges lead to from it, and
    where those are too few, others at random.

    Args:
        graph: prepared for the model.
        nodes: [T] the targets.
        count: rows.
        each: endpoints per row, at most T.
        generator: on the CPU.
    """
    centre = nodes[torch.randint(nodes.numel(), (count,), generator=generator).to(nodes.device)]
    ones = torch.ones(graph.num_edges, 1, device=graph.device, dtype=torch.float32)
    reach = torch.zeros(graph.num_nodes, 1, count, device=graph.device, dtype=torch.float32)
    reach[centre, 0, torch.arange(count, device=graph.device)] = 1.0
    first = aggregate(ones, reach, graph.adjacency)
    paths = (first + aggregate(ones, first, graph.adjacency)).squeeze(1)[nodes]
    lots = torch.rand(paths.shape, generator=generator, dtype=torch.float32).to(paths.device)
    return nodes[(paths + lots / 2).topk(each, dim=0).indices.t()]
