"""Attacks without new nodes: edges between existing nodes (random, DICE, PRBCD), and changed features."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fgai.attacks.base import Attack, Judge, Ledger
from fgai.attacks.search.climb import SearchSpec, _Space
from fgai.attention import AttentionMap, observe
from fgai.attention.interface import graph_model
from fgai.errors import BudgetError, InputError
from fgai.graph import Graph, GraphChange
from fgai.progress import current_stage
from fgai.sparse import edge_keys, key_ends
from fgai.tasks.link import _first_of_each
from fgai.threads import exclusive, seeded

BLOCK = 20_000  # pairs in a block, or 20 for each edge of the budget
FINAL_SAMPLES = 10  # sets of flips drawn at the end from the weights, besides the heaviest ones
RESAMPLING_SHARE = 0.8  # share of the steps in which the block is still drawn anew
TINY = 1e-12  # smallest weight and row sum that is divided by


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
    """Signed gradient steps on features of some targets; radius and step are in units of half the box."""

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
            features=lambda point, box: box.half * point,
            project=lambda point, box: point.clamp_(-budget.radius, budget.radius),
        )
        spec = SearchSpec(space=ball, optimiser="sign", rate=budget.step_size, steps=budget.steps)
        result = judge.climb(change, start, spec, box, variable="delta")
        ledger.add(result)
        yield GraphChange(rows=rows, delta=result.features)


class DICE(Attack):
    """Removes random edges between target nodes of one class and adds edges between classes, half of each.

    Labels are those an attacker at test time can have: the true ones of training nodes, elsewhere the clean
    model's predictions. Where fewer edges join equals than half the budget, the rest is spent on new edges;
    where all nodes look alike, no edge is added. There is no search, and self-loops stay.

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


class PRBCD(Attack):
    """Edges between target nodes added or removed, by projected randomised block coordinate descent.

    Every pair of targets may be flipped. A random block of pairs has weights p in [0, 1]: a new edge has
    weight p, an edge of the graph 1 - p. They enter attention as log-weights on the score, climb the
    objective and are projected onto Σ p <= edges; pairs of small weight are drawn anew. At the end they are
    rounded.

    The memory on top of a forward pass grows with the block, not with the number of pairs. `edges` counts
    flips, `step_size` is the rate in PyG's scale (it multiplies that by edges / targets), and positional
    encodings stay as they were.

    Reference: Geisler et al., Robustness of Graph Neural Networks at Scale, NeurIPS 2021, as implemented in
    `torch_geometric.contrib`. Its options live in one dictionary shared by all instances; ours has its own.
    """

    name = "prbcd"
    endpoints_depend_on_model = True
    removes_edges = True

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield random flips, then the best ones."""
        budget, flips = self.budget, _Flips(graph, nodes)
        pairs = nodes.numel() * (nodes.numel() - 1) // 2
        if budget.edges >= pairs and budget.edges:
            raise BudgetError(
                f"`edges` must be below {pairs}, the pairs of {nodes.numel()} targets, got {budget.edges}"
            )
        yield flips.perturbation(_random_pairs(nodes.numel(), budget.edges, generator).to(graph.device))
        if not budget.edges or not budget.steps:
            return
        seed = int(torch.randint(2**31, (1,), generator=generator))
        attack = _pyg_attack(
            _FlipObjective(flips, judge, ledger),
            max(BLOCK, 20 * budget.edges),
            epochs=budget.steps,
            epochs_resampling=max(1, round(RESAMPLING_SHARE * budget.steps)),
            lr=budget.step_size,
            max_final_samples=FINAL_SAMPLES,
        )
        try:
            with seeded(seed, graph.device), _float32_by_default():
                like = torch.zeros(nodes.numel(), 1, device=graph.device)
                _, pairs = attack.attack(like, flips.inside, torch.zeros(0), budget.edges)
        except RuntimeError as error:
            if "Sampling random block" not in str(error):
                raise
            raise BudgetError(f"`edges` must be lower for blocks, got {budget.edges}") from error
        yield flips.perturbation(pairs.to(graph.device))


class _Flips:
    """Pairs of target nodes [T] of one undirected graph, numbered by their index among the targets."""

    def __init__(self, graph: Graph, nodes: Tensor) -> None:
        if graph.batch is not None:
            raise InputError("edge flips need one graph, got a batch of small ones; use another threat")
        self.graph, self.nodes = graph, nodes.sort().values
        position = torch.full((graph.num_nodes,), -1, device=graph.device)
        position[self.nodes] = torch.arange(nodes.numel(), device=graph.device)
        ends = position[graph.edge_index]
        self.inside = ends[:, (ends >= 0).all(0) & (ends[0] != ends[1])]
        if not torch.equal(edge_keys(*self.inside), edge_keys(*self.inside.flip(0)).sort().values):
            raise InputError("edge flips need an undirected graph, got edges without a reverse")

    def perturbation(self, pairs: Tensor) -> GraphChange:
        """Flip `pairs` [2, K]: edges that are there go, the others come."""
        ends = self.nodes[pairs]
        there = torch.isin(edge_keys(*ends), self.graph.keys)
        return GraphChange(edges=ends[:, ~there], removed=ends[:, there])

    def weighted(self, pairs: Tensor, weight: Tensor) -> tuple[Graph, Tensor]:
        """Return the graph with the directed `pairs` [2, K], and weights [E]: theirs [K], other edges 1."""
        ends = self.nodes[pairs]
        union, _ = self.graph.inject_edges(ends)
        spot = torch.searchsorted(union.keys, edge_keys(*ends))
        ones = torch.ones(union.num_edges, dtype=weight.dtype, device=weight.device)
        return union, ones.index_copy(0, spot, weight)

    def rounded(self, pairs: Tensor, weight: Tensor) -> Graph:
        """Return the graph whose edges among the targets are the `pairs` of weight above one half."""
        kept = edge_keys(*pairs[:, weight > 0.5])
        before = edge_keys(*self.inside)
        changed = torch.cat([kept[~torch.isin(kept, before)], before[~torch.isin(before, kept)]])
        changed = torch.stack(key_ends(changed))
        return self.perturbation(changed[:, changed[0] < changed[1]]).apply(self.graph)[0]


class _FlipObjective(nn.Module):
    """The objective as a function of weighted pairs, in place of a model in PyG's attack."""

    def __init__(self, flips: _Flips, judge: Judge, ledger: Ledger) -> None:
        super().__init__()
        self.flips, self.judge, self.ledger = flips, judge, ledger

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        # Only in a gradient step have the weights a gradient.
        if not edge_weight.requires_grad:
            return self.judge(self.flips.rounded(edge_index, edge_weight))
        self.ledger.steps += 1
        current_stage().advance()
        edge_weight.register_hook(self._note)  # type: ignore[no-untyped-call]
        graph, weight = self.flips.weighted(edge_index, edge_weight)
        value = self.judge.scored(*_weighted_forward(self.judge.model, graph, weight))
        return value if value.requires_grad else value + 0 * edge_weight.sum()

    def _note(self, gradient: Tensor) -> None:
        self.ledger.gradient = max(self.ledger.gradient, float(gradient.abs().max()))


@contextmanager
def _float32_by_default() -> Iterator[None]:
    """Let PyG's draws, which name no dtype, be float32 whatever torch's default is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _pyg_attack(model: nn.Module, block_size: int, **options: Any) -> Any:
    """Return PyG's PRBCD on a module `(x, edge_index, edge_weight) → value to maximise`."""
    with exclusive(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyG calls the package experimental
        from torch_geometric.contrib.nn import PRBCDAttack
    attack: Any = PRBCDAttack.__new__(PRBCDAttack)
    attack.__dict__["coeffs"] = dict(PRBCDAttack.coeffs)  # all instances share it
    attack.__init__(model, block_size, loss=lambda value, *_: value, log=False, **options)
    return attack


def _random_pairs(count: int, number: int, generator: torch.Generator) -> Tensor:
    """Return [2, number] distinct pairs (low, high) of the numbers below `count`; there must be more."""
    drawn = torch.zeros(0, dtype=torch.long)
    while drawn.numel() < number:
        ends = torch.randint(count, (2, 2 * number + 16), generator=generator)
        low, high = ends.amin(0), ends.amax(0)
        keys = torch.unique(torch.cat([drawn, edge_keys(low, high)[low != high]]))
        drawn = keys[torch.randperm(keys.numel(), generator=generator)]
    return torch.stack(key_ends(drawn[:number]))


def _weighted_forward(model: nn.Module, graph: Graph, weight: Tensor) -> tuple[Tensor, AttentionMap]:
    """Return the logits where edges have weights [E], and the attention with the weights divided out.

    Weights enter as log-weights on the score: w_e exp(s_e) / Σ w exp(s) over a node's edges. Models that do
    not read them get the same after the softmax, w_e a_e · (Σ a) / (Σ w a).
    """
    if graph_model(model) is not None:
        edge_weight = weight if graph.edge_weight is None else weight * graph.edge_weight
        observation = observe(model, graph.replace(edge_weight=edge_weight), grad=True)
    else:
        observation = observe(
            model, graph, grad=True, perturb=lambda _, *edges: _reweighted(graph.keys, weight, *edges)
        )
    layers = []
    for layer in observation.attention:
        own = _look_up(layer.keys, graph.keys, weight).to(layer.values.dtype).clamp(min=TINY)
        layers.append(layer.with_values(layer.values / own[:, None]))
    return observation.logits, AttentionMap(tuple(layers))


def _reweighted(
    keys: Tensor, weight: Tensor, attention: Tensor, source: Tensor, destination: Tensor
) -> Tensor:
    """Put weights [K] of edges with sorted `keys` on attention [E, H]: w_e a_e · (Σ a) / (Σ w a), or 0."""
    weighted = attention * _look_up(edge_keys(source, destination), keys, weight).to(attention.dtype)[:, None]
    count = int(destination.max()) + 1 if destination.numel() else 0
    empty = attention.new_zeros(count, attention.shape[1])
    before = empty.index_add(0, destination, attention)
    after = empty.index_add(0, destination, weighted).clamp(min=TINY)
    return weighted * (before / after)[destination]


def _look_up(queries: Tensor, keys: Tensor, weight: Tensor) -> Tensor:
    """The weight of each queried edge, 1 where it has none."""
    if keys.numel() == 0:
        return torch.ones_like(queries, dtype=weight.dtype)
    spot = torch.searchsorted(keys, queries).clamp(max=keys.numel() - 1)
    return torch.where(keys[spot] == queries, weight[spot], 1.0)
