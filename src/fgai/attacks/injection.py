"""Node injection: a few new nodes with random or adversarial features, joined to the targets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fgai import checks
from fgai.attacks.base import Attack, Judge, Ledger
from fgai.attacks.budget import LARGEST, Box, Budget
from fgai.attacks.replay import replayed_climb
from fgai.compiled import compiled
from fgai.errors import InputError
from fgai.graph import Graph, GraphChange
from fgai.progress import current
from fgai.sparse.valid import check_index
from fgai.typed import typed


@typed
def draw_endpoints(
    nodes: Tensor,
    count: int,
    each: int,
    generator: torch.Generator,
    batch: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return [count, each] endpoints drawn from `nodes`, distinct within a row.

    Args:
        nodes: [P] to draw from.
        count: rows.
        each: endpoints per row.
        generator: on the CPU.
        batch: [N] small graph of every node, or None; with it, `count` rows are drawn for each small graph
            that has some of the `nodes`, each row inside its graph.
        weights: [N] how likely each node of the graph is to be drawn; None for all alike.

    Raises:
        InputError: `nodes` is no vector of nodes, or has fewer than `each`; a count is too large; a weight of
            one of the `nodes` is missing or not positive.
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
        return torch.cat([draw_endpoints(pool, count, each, generator, None, weights) for pool in pools])
    pool = nodes.numel()
    if pool < each or (count and not pool):
        raise InputError(f"`nodes` must hold at least `each` ({each}) nodes to draw, got {pool}")
    shape = (count, 2 * each + 8)
    likely = None if weights is None else _likely(weights, nodes)
    if likely is None or not count:
        tries = torch.randint(pool, shape, generator=generator)
    else:
        tries = torch.multinomial(likely, shape[0] * shape[1], True, generator=generator).view(shape)
    chosen = torch.empty(count, each, dtype=torch.long)
    for row in _first_distinct(tries.numpy(), chosen.numpy()).nonzero()[0]:  # a small pool: shuffle it
        chosen[row] = (
            torch.randperm(pool, generator=generator)[:each]
            if likely is None
            else torch.multinomial(likely, each, generator=generator)
        )
    return nodes[chosen.to(nodes.device)]


def _likely(weights: Tensor, nodes: Tensor) -> Tensor:
    """Weights of the `nodes`, checked, on the CPU in double precision."""
    if weights.dim() != 1 or not weights.is_floating_point():
        raise InputError(f"`weights` must be a vector of numbers, got {weights.dtype} {tuple(weights.shape)}")
    check_index(nodes, weights.numel(), "nodes")
    likely = weights.detach().to("cpu", torch.float64)[nodes.cpu()]
    if not bool(torch.isfinite(likely).all()) or bool((likely <= 0).any()):
        raise InputError("`weights` must be positive and finite for every node that may be drawn")
    return likely


@compiled
def _first_distinct(tries: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Fill each row with the first distinct numbers of its tries; return the rows with too few."""
    short = np.zeros(tries.shape[0], dtype=np.bool_)
    for row in range(tries.shape[0]):
        found = 0
        for number in tries[row]:
            if found == chosen.shape[1]:
                break
            known = False
            for place in range(found):
                known = known or chosen[row, place] == number
            if not known:
                chosen[row, found] = number
                found += 1
        short[row] = found < chosen.shape[1]
    return short


@typed
def draw_features(
    graph: Graph, count: int, box: Box | tuple[float, float], generator: torch.Generator
) -> Tensor:
    """Return [count, F] features drawn uniformly from the box, one interval for all or one for each."""
    checks.whole(count, "count", 0, LARGEST)
    dtype = graph.features.dtype if graph.features is not None else torch.float32
    if not isinstance(box, Box):
        if len(box) != 2:
            raise InputError(f"`box` must be (low, high), got {box!r}")
        low, high = (checks.number(end, "box") for end in box)
        box = Box.of(low, high, torch.zeros(graph.num_features, dtype=dtype, device=graph.device))
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


class PGDInjection(Attack):
    """New nodes whose features climb the objective by signed gradient steps inside the box.

    The climb of the first restart begins at the middle of the box, from which every corner is within reach;
    later restarts begin at random. The best point seen counts, so more steps never make the attack weaker.
    """

    name = "pgd-injection"

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield random noise, then the best point of the climb."""
        budget = self.budget
        if graph.features is None:
            raise InputError(f"{graph.name!r} has no features to attack")
        box = budget.feature_box(graph)
        endpoints = draw_endpoints(nodes, budget.nodes, budget.edges, generator, graph.batch)
        noise = draw_features(graph, endpoints.shape[0], budget.noise_box(graph), generator)
        yield GraphChange(endpoints=endpoints, features=noise)
        plan = self.plan()
        start = torch.zeros_like(noise) if ledger.steps < plan.steps else box.points(noise)

        def objective(points: Tensor) -> Tensor:
            return judge.change(GraphChange(endpoints=endpoints, features=box.features(points)))

        best = climb(objective, start, plan, ledger, judge=judge)
        yield GraphChange(endpoints=endpoints, features=box.features(best))

    def plan(self) -> Budget:
        """Return how the features climb: the budget's steps and step size."""
        return self.budget


class FGSMInjection(PGDInjection):
    """New nodes whose features take one signed gradient step, from the middle of the box to a corner.

    The budget must allow one step; its step size is not read.
    """

    name = "fgsm-injection"

    def plan(self) -> Budget:
        """Return one step of half the box's width."""
        return replace(self.budget, steps=1, step_size=1.0)


def climb(
    objective: Callable[[Tensor], Tensor],
    start: Tensor,
    budget: Budget,
    ledger: Ledger,
    *,
    radius: float = 1.0,
    judge: Judge | None = None,
) -> Tensor:
    """Maximise `objective` by signed gradient steps inside [-radius, radius]; return the best point seen.

    Args:
        objective: differentiable, called once per step and once at the end.
        start: where the climb begins; it counts as seen.
        budget: gives steps and step size.
        ledger: steps and the largest gradient are noted here.
        radius: no entry gets further from 0; points of a `Box` lie in [-1, 1].
        judge: what `objective` asks, if it asks nothing else and does the same for every point: many steps on
            a GPU are then captured once and replayed.
    """
    if judge is not None and (found := replayed_climb(objective, start, budget, radius, ledger, judge)):
        point, best, best_value = found
        with torch.no_grad():
            return torch.where(objective(point) >= best_value, point, best)
    point, best = start, start
    best_value, steepest = start.new_full((), float("-inf")), start.new_zeros(())
    progress = current()
    for _ in range(budget.steps):
        moving = point.detach().requires_grad_()
        value = objective(moving)
        ledger.steps += 1
        progress.advance()
        if value.requires_grad:
            (gradient,) = torch.autograd.grad(value, moving, materialize_grads=True)
        else:  # the objective does not depend on the features at all
            gradient = torch.zeros_like(point)
        # Chosen on the device, so that the loop never waits for a number.
        better = value.detach() > best_value
        best, best_value = torch.where(better, point, best), torch.where(better, value.detach(), best_value)
        if gradient.numel():
            steepest = torch.maximum(steepest, gradient.abs().max())
        point = (point + budget.step_size * gradient.sign()).clamp(-radius, radius)
    ledger.gradient = max(ledger.gradient, float(steepest))
    with torch.no_grad():
        return torch.where(objective(point) >= best_value, point, best)
