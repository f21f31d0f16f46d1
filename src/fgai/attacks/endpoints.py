"""Where new nodes are joined: at random, or by rules that read the graph and the vanilla model.

A rule never reads the attacked model, so every method meets the same endpoints. All give the same number of
nodes and edges, taken from the targets, distinct within a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fgai.attacks.injection import draw_endpoints
from fgai.attacks.tdgia import defect_scores
from fgai.compiled import compiled
from fgai.graph import Graph


@dataclass(frozen=True, eq=False)
class Sites:
    """What a rule may read.

    Attributes:
        graph: prepared, clean.
        nodes: [P] that may be joined.
        rows: [T] nodes whose predictions are attacked.
        logits: [N, C] of the vanilla model on the clean graph; None where there is a row per link or graph.
        shape: new nodes, and edges of each.
    """

    graph: Graph
    nodes: Tensor
    rows: Tensor
    logits: Tensor | None
    shape: tuple[int, int]


Rule = Callable[[Sites, torch.Generator], Tensor]
"""(what may be read, generator) → endpoints [M, e]."""


def random_endpoints(sites: Sites, generator: torch.Generator) -> Tensor:
    """The seed's own, as every attack draws them."""
    return draw_endpoints(sites.nodes, *sites.shape, generator, sites.graph.batch)


def cover_endpoints(sites: Sites, generator: torch.Generator) -> Tensor:
    """Greedy cover: the targets next to the most low-degree targets.

    An attacked node u moves by about 1/d_u for each of its neighbours that moves, so joining v is worth

        Σ_{u ∈ N(v) ∪ {v}, u a target} relu(1 − covered_u) / d_u,

    where every endpoint next to u covers a part 2/d_u of it. Endpoints are taken one after the other, the
    best first. They are dealt out so that each new node gets targets of one predicted class.
    """
    adjacency, wanted = sites.graph.adjacency, min(sites.shape[0] * sites.shape[1], sites.nodes.numel())
    target = np.zeros(sites.graph.num_nodes)
    target[sites.rows.cpu().numpy()] = 1.0
    allowed = np.zeros(sites.graph.num_nodes, dtype=np.bool_)
    allowed[sites.nodes.cpu().numpy()] = True
    pointers, source = (t.cpu().numpy() for t in (adjacency.rowptr, adjacency.source))
    return _dealt(torch.from_numpy(_cover(pointers, source, target, allowed, wanted)), sites, generator)


@compiled
def _cover(
    rowptr: np.ndarray, source: np.ndarray, left: np.ndarray, allowed: np.ndarray, count: int
) -> np.ndarray:
    """Take the allowed node that is worth most, `count` times; `left`: what is not covered of each target."""
    nodes = rowptr.shape[0] - 1
    worth, chosen = np.zeros(nodes), np.empty(count, dtype=np.int64)
    degree = np.maximum(1, rowptr[1:] - rowptr[:-1]).astype(np.float64)
    for u in range(nodes):
        if left[u] > 0:
            worth[u] += left[u] / degree[u]
            for e in range(rowptr[u], rowptr[u + 1]):
                if source[e] != u:
                    worth[source[e]] += left[u] / degree[u]
    for turn in range(count):
        best = -1
        for v in range(nodes):
            if allowed[v] and (best < 0 or worth[v] > worth[best]):
                best = v
        allowed[best] = False
        chosen[turn] = best
        for place in range(rowptr[best] - 1, rowptr[best + 1]):
            u = best if place < rowptr[best] else source[place]
            if left[u] <= 0 or (place >= rowptr[best] and u == best):
                continue
            gone = min(left[u], 2.0 / degree[u])
            left[u] -= gone
            worth[u] -= gone / degree[u]
            for e in range(rowptr[u], rowptr[u + 1]):
                if source[e] != u:
                    worth[source[e]] -= gone / degree[u]
    return chosen


def defect_endpoints(sites: Sites, generator: torch.Generator) -> Tensor:
    """TDGIA's rule: few neighbours, and a sure vanilla model: see `fgai.attacks.tdgia.defect_scores`."""
    if sites.logits is None:
        return random_endpoints(sites, generator)
    sure = sites.logits[sites.nodes].softmax(1).amax(1)
    degree = (sites.graph.adjacency.degree[sites.nodes] + (not sites.graph.has_loops)).to(sure)
    order = defect_scores(degree, sure, sites.shape[1]).argsort(descending=True, stable=True)
    return _dealt(sites.nodes[order[: sites.shape[0] * sites.shape[1]]].cpu(), sites, generator)


def _dealt(chosen: Tensor, sites: Sites, generator: torch.Generator) -> Tensor:
    """Deal endpoints to rows, those of one predicted class together; too few are filled up at random."""
    count, each = sites.shape
    if sites.logits is not None:
        label = sites.logits.argmax(1).cpu()[chosen]
        chosen = chosen[label.argsort(stable=True)]
    missing = count * each - chosen.numel()
    device = sites.nodes.device
    if missing <= 0:
        return chosen.view(count, each).to(device)
    whole = chosen.numel() // each
    rows = draw_endpoints(sites.nodes, count - whole, each, generator)
    return torch.cat([chosen[: whole * each].view(whole, each).to(device), rows])


RULES: dict[str, Rule] = {
    "random": random_endpoints,
    "cover": cover_endpoints,
    "defects": defect_endpoints,
}
