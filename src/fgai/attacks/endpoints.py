"""Where new nodes are joined: at random, in one neighbourhood, or by rules that read the graph and a model.

`SHARED_RULES` read the vanilla model at most: methods with the same `vanilla` may be compared node by node.
`weakest` reads the attacked model. All give the same number of nodes and edges, distinct within a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fgai import checks
from fgai.attacks.budget import LARGEST
from fgai.compiled import compiled
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.ops import aggregate
from fgai.sparse.valid import check_index
from fgai.typed import typed

DEGREE_WEIGHT, ROOT_WEIGHT = 0.9, 0.1  # weights of 1/degree and 1/√(edges · degree) in TDGIA's score


@typed
def draw_endpoints(
    nodes: Tensor, count: int, each: int, generator: torch.Generator, batch: Tensor | None = None
) -> Tensor:
    """Return [count, each] endpoints drawn from `nodes`, distinct within a row; the generator is on the CPU.

    With `batch` [N], the small graph of every node, `count` rows are drawn inside each graph that has some of
    the `nodes`. `InputError` if `nodes` is no vector of at least `each` nodes, or a count is too large.
    """
    checks.whole(count, "count", 0, LARGEST)
    checks.whole(each, "each", 0, LARGEST)
    if nodes.dim() != 1 or nodes.dtype != torch.int64:
        got = f"{nodes.dtype} {tuple(nodes.shape)}"
        raise InputError(f"`nodes` must be a vector of node numbers (torch.long), got {got}")
    if batch is not None:
        check_index(nodes, batch.numel(), "nodes")
        if batch.dim() != 1 or batch.dtype != torch.int64:
            raise InputError(f"`batch` must be a vector of graph numbers (torch.long), got {batch.dtype}")
        groups = batch.to(nodes.device)[nodes]
        counts = torch.bincount(groups)
        pools = torch.split(nodes[groups.argsort(stable=True)], counts[counts > 0].tolist())
        return torch.cat([draw_endpoints(pool, count, each, generator) for pool in pools])
    pool = nodes.numel()
    if pool < each or (count and not pool):
        raise InputError(f"`nodes` must hold at least `each` ({each}) nodes to draw, got {pool}")
    tries = torch.randint(pool, (count, 2 * each + 8), generator=generator)
    chosen = np.empty((count, each), dtype=np.int64)
    for row, numbers in enumerate(tries.numpy()):
        distinct = list(dict.fromkeys(numbers.tolist()))[:each]
        if len(distinct) < each:  # a small pool: shuffle it
            distinct = torch.randperm(pool, generator=generator)[:each].tolist()
        chosen[row] = distinct
    return nodes[torch.from_numpy(chosen).to(nodes.device)]


def _near_endpoints(graph: Graph, nodes: Tensor, count: int, each: int, generator: torch.Generator) -> Tensor:
    """Return [count, each] endpoints: each row the targets that most short paths from one node lead to."""
    centre = nodes[torch.randint(nodes.numel(), (count,), generator=generator).to(nodes.device)]
    ones = torch.ones(graph.num_edges, 1, device=graph.device, dtype=torch.float32)
    reach = torch.zeros(graph.num_nodes, 1, count, device=graph.device, dtype=torch.float32)
    reach[centre, 0, torch.arange(count, device=graph.device)] = 1.0
    first = aggregate(ones, reach, graph.adjacency)
    paths = (first + aggregate(ones, first, graph.adjacency)).squeeze(1)[nodes]
    lots = torch.rand(paths.shape, generator=generator, dtype=torch.float32).to(paths.device)
    return nodes[(paths + lots / 2).topk(each, dim=0).indices.t()]


def _defect_scores(graph: Graph, nodes: Tensor, probability: Tensor, edges: int) -> Tensor:
    """TDGIA's score of nodes [T], of degree d (plus one): (2 + p) (0.9 / d + 0.1 / √(edges · d))."""
    degree = (graph.adjacency.degree[nodes] + (not graph.has_loops)).to(probability)
    return (2 + probability) * (DEGREE_WEIGHT / degree + ROOT_WEIGHT / (edges * degree).sqrt())


def _batch_endpoints(
    graph: Graph,
    nodes: Tensor,
    logits: Tensor,
    clean: Tensor,
    shape: tuple[int, int],
    generator: torch.Generator,
) -> Tensor:
    """Return endpoints [size, edges]: best-scored targets, classes spread; `clean` is before the attack."""
    size, edges = shape
    label = clean[nodes].argmax(1)
    probability = logits[nodes].softmax(1).gather(1, label[:, None]).squeeze(1)
    score = _defect_scores(graph, nodes, probability, edges)
    shuffled = torch.randperm(nodes.numel(), generator=generator).to(nodes.device)
    best = shuffled[score[shuffled].argsort(descending=True, stable=True)][: size * edges]
    best = best[torch.randperm(best.numel(), generator=generator).to(nodes.device)]
    best = best[label[best].argsort(stable=True)]
    return nodes[best].view(edges, size).t().contiguous()


@dataclass(frozen=True, eq=False)
class _EndpointContext:
    """The input of a rule; logits and `labels` are None where a row is a link or a graph."""

    graph: Graph  # prepared, clean
    nodes: Tensor  # [P] that may be joined
    rows: Tensor  # [T] nodes whose predictions are attacked
    vanilla_logits: Tensor | None  # [N, C] of the vanilla model on the clean graph
    shape: tuple[int, int]  # new nodes, and edges of each
    attacked_logits: Tensor | None = None  # [N, C] of the attacked model on the clean graph
    labels: Tensor | None = None  # [N] the class every node should have


def _random_endpoints(context: _EndpointContext, generator: torch.Generator) -> Tensor:
    return draw_endpoints(context.nodes, *context.shape, generator, context.graph.batch)


def _cover_endpoints(context: _EndpointContext, generator: torch.Generator) -> Tensor:
    """Greedy cover: the targets next to the most low-degree targets.

    An attacked node u moves by about 1/d_u for each neighbour that moves. With `covered_u` the sum of 2/d_u
    over the endpoints next to u, joining v is worth

        Σ_{u ∈ N(v) ∪ {v}, u a target} relu(1 − covered_u) / d_u.

    Endpoints are taken best first, and each new node gets targets of one predicted class.
    """
    return _cover_rows(torch.ones(len(context.rows), dtype=torch.float64), context, generator)


def _weakest_endpoints(context: _EndpointContext, generator: torch.Generator) -> Tensor:
    """Greedy cover of the targets closest to a wrong prediction: weights exp(−3 · margin), 0 where wrong."""
    if context.attacked_logits is None or context.labels is None:
        return _random_endpoints(context, generator)
    share = context.attacked_logits[context.rows].double().softmax(1)
    own = share.gather(1, context.labels[context.rows, None]).squeeze(1)
    best = share.scatter(1, context.labels[context.rows, None], -1.0).amax(1)
    return _cover_rows(torch.where(own > best, (-3 * (own - best)).exp(), 0.0), context, generator)


def _cover_rows(weights: Tensor, context: _EndpointContext, generator: torch.Generator) -> Tensor:
    adjacency, nodes = context.graph.adjacency, context.graph.num_nodes
    weight, allowed = np.zeros(nodes), np.zeros(nodes, dtype=np.bool_)
    weight[context.rows.cpu().numpy()] = weights.cpu().numpy()
    allowed[context.nodes.cpu().numpy()] = True
    pointers, source = (t.cpu().numpy() for t in (adjacency.rowptr, adjacency.source))
    count = min(context.shape[0] * context.shape[1], context.nodes.numel())
    chosen = torch.from_numpy(_greedy_cover(pointers, source, weight, allowed, count))
    return _deal(chosen, context, generator)


@compiled
def _greedy_cover(
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
        for position in range(rowptr[best] - 1, rowptr[best + 1]):
            u = best if position < rowptr[best] else source[position]
            if left[u] <= 0 or (position >= rowptr[best] and u == best):
                continue
            gone = min(left[u], weight[u] * (2.0 / degree[u]))
            left[u] -= gone
            worth[u] -= gone / degree[u]
            for e in range(rowptr[u], rowptr[u + 1]):
                if source[e] != u:
                    worth[source[e]] -= gone / degree[u]
    return chosen


def _defect_endpoints(context: _EndpointContext, generator: torch.Generator) -> Tensor:
    """TDGIA's rule: few neighbours and a confident vanilla model, see `_defect_scores`."""
    if context.vanilla_logits is None:
        return _random_endpoints(context, generator)
    confidence = context.vanilla_logits[context.nodes].softmax(1).amax(1)
    score = _defect_scores(context.graph, context.nodes, confidence, context.shape[1])
    order = score.argsort(descending=True, stable=True)
    return _deal(context.nodes[order[: context.shape[0] * context.shape[1]]].cpu(), context, generator)


def _deal(chosen: Tensor, context: _EndpointContext, generator: torch.Generator) -> Tensor:
    """Deal endpoints to rows, those of one predicted class together; too few are filled up at random."""
    count, each = context.shape
    if context.vanilla_logits is not None:
        chosen = chosen[context.vanilla_logits.argmax(1).cpu()[chosen].argsort(stable=True)]
    missing = count * each - chosen.numel()
    device = context.nodes.device
    if missing <= 0:
        return chosen.view(count, each).to(device)
    full = chosen.numel() // each
    rows = draw_endpoints(context.nodes, count - full, each, generator)
    return torch.cat([chosen[: full * each].view(full, each).to(device), rows])


RULES: dict[str, Callable[[_EndpointContext, torch.Generator], Tensor]] = {
    "random": _random_endpoints,
    "cover": _cover_endpoints,
    "defects": _defect_endpoints,
    "weakest": _weakest_endpoints,
}
SHARED_RULES = ("random", "cover", "defects")  # the same endpoints for every method with one `vanilla`
