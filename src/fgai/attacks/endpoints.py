"""Where new nodes are joined: at random, or by rules that read the graph and a model.

`random`, `cover` and `defects` read the vanilla model at most, so every method meets the same endpoints and
may be compared node by node (`SHARED_RULES`). `weakest` reads the attacked model. All give the same number
of nodes and edges, taken from the targets, distinct within a row.
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
        attacked: [N, C] logits of the attacked model on the clean graph; None like `logits`.
        labels: [N] the class every node should have; None like `logits`.
    """

    graph: Graph
    nodes: Tensor
    rows: Tensor
    logits: Tensor | None
    shape: tuple[int, int]
    attacked: Tensor | None = None
    labels: Tensor | None = None


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
    weight = torch.zeros(sites.graph.num_nodes, dtype=torch.float64)
    weight[sites.rows.cpu()] = 1.0
    return _dealt(_covering(sites, weight), sites, generator)


def weakest_endpoints(sites: Sites, generator: torch.Generator) -> Tensor:
    """Greedy cover of the targets that are closest to a wrong prediction of the attacked model.

    As `cover_endpoints`, with the weight exp(−3 · margin) of every target that is right on the clean graph,
    margin being the distance of its own probability to the best other one; targets that are wrong already
    weigh nothing.
    """
    if sites.attacked is None or sites.labels is None:
        return random_endpoints(sites, generator)
    share = sites.attacked[sites.rows].double().softmax(1)
    own = share.gather(1, sites.labels[sites.rows, None]).squeeze(1)
    best = share.scatter(1, sites.labels[sites.rows, None], -1.0).amax(1)
    weight = torch.zeros(sites.graph.num_nodes, dtype=torch.float64)
    weight[sites.rows.cpu()] = torch.where(own > best, (-3 * (own - best)).exp(), 0.0).cpu()
    return _dealt(_covering(sites, weight), sites, generator)


def _covering(sites: Sites, weight: Tensor) -> Tensor:
    """Return the endpoints of a greedy cover of nodes with these weights [N], the best first."""
    adjacency, count = sites.graph.adjacency, min(sites.shape[0] * sites.shape[1], sites.nodes.numel())
    allowed = np.zeros(sites.graph.num_nodes, dtype=np.bool_)
    allowed[sites.nodes.cpu().numpy()] = True
    pointers, source = (t.cpu().numpy() for t in (adjacency.rowptr, adjacency.source))
    return torch.from_numpy(_cover(pointers, source, weight.numpy(), allowed, count))


@compiled
def _cover(
    rowptr: np.ndarray, source: np.ndarray, weight: np.ndarray, allowed: np.ndarray, count: int
) -> np.ndarray:
    """Take the allowed node that is worth most, `count` times; an endpoint covers 2/d_u of a neighbour u."""
    nodes, left = rowptr.shape[0] - 1, weight.copy()
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
            gone = min(left[u], weight[u] * (2.0 / degree[u]))
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
    "weakest": weakest_endpoints,
}
SHARED_RULES = ("random", "cover", "defects")
"""Rules whose endpoints are the same for every method."""
