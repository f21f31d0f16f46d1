"""Attacks without new nodes: edges between existing nodes (random, DICE), and small changes of features."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fgai.attacks.base import Attack, Judge, Ledger
from fgai.attacks.search.climb import SearchSpec, _Space
from fgai.errors import BudgetError, InputError
from fgai.graph import Graph, GraphChange
from fgai.sparse import edge_keys, key_ends
from fgai.tasks.link import _first_of_each


class RandomEdges(Attack):
    """Random new edges between target nodes: the paper's "additional edges"."""

    name = "random-edges"

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield one random set of edges that were not there."""
        groups = torch.zeros_like(nodes) if graph.batch is None else graph.batch[nodes]
        pools = [nodes[groups == group] for group in torch.unique(groups).tolist()]
        edges = [_draw_edges(graph, pool, self.budget.edges, generator) for pool in pools]
        yield GraphChange(edges=torch.cat(edges, dim=1))


def _draw_edges(
    graph: Graph, nodes: Tensor, count: int, generator: torch.Generator, labels: Tensor | None = None
) -> Tensor:
    """Return [2, count] distinct pairs of `nodes` without an edge; with `labels` [N], of unlike nodes."""
    pool = nodes.numel()
    pair_keys = torch.zeros(0, dtype=torch.long)
    taken = graph.keys.cpu()
    for _ in range(64):
        if pair_keys.numel() >= count:
            break
        pairs = nodes.cpu()[torch.randint(pool, (2, 2 * count + 16), generator=generator)]
        low, high = pairs.amin(0), pairs.amax(0)
        free = low != high if labels is None else labels.cpu()[low] != labels.cpu()[high]
        keys = edge_keys(low, high)[free]
        keys = keys[~torch.isin(keys, taken)]
        pair_keys = _first_of_each(torch.cat([pair_keys, keys]))
    if (free_pairs := pair_keys.numel()) < count:
        raise BudgetError(f"`edges` must be at most {free_pairs}, the free pairs of the targets, got {count}")
    return torch.stack(key_ends(pair_keys[:count])).to(graph.device)


class FeaturePGD(Attack):
    """Small changes of the features of a sample of the target nodes, by signed gradient steps.

    Radius and step size are in units of half the box of each feature. A changed feature may leave the box by
    the radius.
    """

    name = "feature-pgd"

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield random noise, then the best point of the climb."""
        budget = self.budget
        count = max(1, round(budget.rows * nodes.numel()))
        rows = nodes[torch.randperm(nodes.numel(), generator=generator)[:count].to(nodes.device)]
        box = budget.feature_box(graph)
        noise = 2 * torch.rand(count, graph.num_features, generator=generator, dtype=torch.float32) - 1
        noise = (budget.radius * noise).to(box.half)
        change = GraphChange(rows=rows, delta=box.half * noise)
        yield change
        start = torch.zeros_like(noise) if ledger.steps < budget.steps else noise
        ball = _Space(
            start=lambda point, box: point,
            features=lambda point, box: box.half * point,
            project=lambda point, box: point.clamp_(-budget.radius, budget.radius),
        )
        spec = SearchSpec(space=ball, optimiser="sign", rate=budget.step_size, steps=budget.steps)
        result = judge.climb(change, start, spec, box, variable="delta")
        ledger.add(result)
        yield GraphChange(rows=rows, delta=result.features)


class DICE(Attack):
    """Removes random edges between target nodes of one class and adds edges between classes, half of each.

    The labels are those an attacker at test time can have: the true ones of training nodes, the clean model's
    predictions everywhere else. Where fewer edges join equals than half the budget, the rest is spent on new
    edges; where all nodes look alike, no edge is added. There is no search, so the objective only measures.
    Self-loops stay.

    Reference: Waniek, Michalak, Wooldridge, Rahwan, Hiding individuals and communities in a social network,
    2018. Theirs flips a coin for every edge; we split the budget evenly.
    """

    name = "dice"
    endpoints_depend_on_model = True
    removes_edges = True

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield one random set of edges."""
        labels = _attacker_labels(graph, judge.clean.logits)
        inside = _same_label_pairs(graph, nodes, labels)
        count = min(self.budget.edges // 2, inside.shape[1])
        order = torch.randperm(inside.shape[1], generator=generator)[:count]
        rest = self.budget.edges - count if torch.unique(labels[nodes]).numel() > 1 else 0
        added = _draw_edges(graph, nodes, rest, generator, labels=labels)
        yield GraphChange(edges=added, removed=inside[:, order.to(inside.device)])


def _attacker_labels(graph: Graph, logits: Tensor) -> Tensor:
    """Labels [N] an evasion attacker has: true ones of training nodes, clean predictions elsewhere."""
    if logits.dim() != 2 or logits.shape[0] != graph.num_nodes or graph.batch is not None:
        raise InputError(f"the attack needs a class for every node; {graph.name!r} has another task")
    labels = logits.argmax(1)
    if graph.y is None or graph.train_mask is None:
        return labels
    return torch.where(graph.train_mask & (graph.y >= 0), graph.y, labels)


def _same_label_pairs(graph: Graph, nodes: Tensor, labels: Tensor) -> Tensor:
    """Undirected edges [2, K] (low, high), both ends in `nodes` and of one label; no self-loops."""
    source, destination = graph.adjacency.source, graph.adjacency.destination
    member = torch.zeros(graph.num_nodes, dtype=torch.bool, device=graph.device)
    member[nodes] = True
    same = member[source] & member[destination] & (labels[source] == labels[destination])
    pairs = torch.stack([torch.minimum(source, destination), torch.maximum(source, destination)])
    distinct: Tensor = torch.unique(pairs[:, same & (source != destination)], dim=1)
    return distinct
