"""The injection adversary: a few new nodes whose features keep climbing while the model trains."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from fgai.attacks import Budget, draw_endpoints, draw_features
from fgai.attacks.budget import Box, data_range, smallest_pool, warn_if_narrow
from fgai.attacks.search.climb import OPTIMISERS
from fgai.attention import Limits, replacing_values
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.processes import current
from fgai.sparse import EdgeMap
from fgai.tasks import task_of


class InjectionAdversary:
    """New nodes with new endpoints every epoch and features warm-started from the last.

    The training step's own backward pass also yields the gradient in the injected features, so the climb
    costs no pass of its own: `attacked` hands out a graph, the caller back-propagates a loss that the
    features should raise, and the next call of `attacked` takes the step first. The features stay in one
    place in memory and move there, so that a captured CUDA graph can hold the whole.

    Behind limits every second node climbs in value space instead: a point of the unit box stands for the
    values that the first layer reads of a node, whatever its features. No features can do more.

    Args:
        graph: prepared for the model.
        budget: nodes, edges, box and step size; endpoints come from its targets.
        feature_range: smallest and largest value of each feature of the data, [F] each; the graph's own by
            default.
    """

    def __init__(
        self,
        graph: Graph,
        budget: Budget,
        feature_range: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        if graph.features is None:
            raise InputError(f"{graph.name!r} has no features to inject")
        self.graph = graph
        low, high = feature_range or data_range(graph)
        stored = graph.features.stored
        self.feature_range = low.to(stored), high.to(stored)
        # A small graph has fewer nodes to join than the default. Drawn without waiting for the device.
        self.nodes = replace(budget, edges=1).target_nodes(graph).cpu()
        self.batch = None if graph.batch is None else graph.batch.cpu()
        each = min(budget.edges, smallest_pool(graph, self.nodes.to(graph.device)))
        self.budget = replace(budget, edges=each)
        self.features = low.new_zeros(0, graph.num_features)
        self.points: dict[Limits, Tensor] = {}
        self.chosen = torch.zeros(0, dtype=torch.bool)

    @cached_property
    def box(self) -> Box:
        """Of the new nodes' features."""
        return self.budget.box_in(*self.feature_range)

    @cached_property
    def step(self) -> Tensor:
        """[F] size of a step in each feature."""
        return self.budget.step_size * self.box.half

    def check_box(self) -> None:
        """Raise where the data gives no box; warn where the given one leaves out values of the data."""
        _ = self.step
        warn_if_narrow(self.budget.box, *self.feature_range)

    def start(self, generator: torch.Generator, entry: Sequence[Limits] = ()) -> None:
        """Draw the first features; behind limits every second node gets points of value space instead.

        Args:
            generator: of the draws.
            entry: limits on the inputs of the first layer; without them all nodes climb by features.
        """
        groups = 1 if self.batch is None else torch.unique(self.batch[self.nodes]).numel()
        drawn = draw_features(self.graph, self.budget.nodes * groups, self.box, generator)
        self.features = drawn.requires_grad_()
        if not entry:
            return
        count = drawn.shape[0]
        self.chosen = torch.arange(count, device=drawn.device) % 2 == 1
        for limits in entry:
            uniform = torch.rand((count, *limits.low.shape), generator=generator, dtype=torch.float32)
            self.points[limits] = uniform.to(drawn).requires_grad_()

    def sending_values(self, subset: Tensor | None = None) -> AbstractContextManager[None]:
        """A block in which the nodes of value space send their points; open it around the forward pass.

        Args:
            subset: [m] the injected nodes that are present; all by default.
        """
        if not self.points:
            return nullcontext()
        if subset is None:
            return replacing_values(self.points, self.chosen)
        points = {limits: values.index_select(0, subset) for limits, values in self.points.items()}
        return replacing_values(points, self.chosen[subset])

    def draw(self, generator: torch.Generator, nodes: Tensor | None = None) -> Tensor:
        """Return fresh endpoints [M, e], on the CPU; from `nodes`, if given, not the targets."""
        pool = self.nodes if nodes is None else nodes.cpu()
        each = min(self.budget.edges, int(pool.numel()))
        return draw_endpoints(pool, self.budget.nodes, each, generator, self.batch)

    def attacked(self, generator: torch.Generator, nodes: Tensor | None = None) -> tuple[Graph, EdgeMap]:
        """Return the graph with the new nodes at fresh endpoints; their features collect a gradient."""
        return self.joined(self.draw(generator, nodes).to(self.graph.device))

    def joined_to(self, graph: Graph, endpoints: Tensor, some: Tensor) -> tuple[Graph, EdgeMap]:
        """Return another graph with some of the new nodes [m] at `endpoints` [m, e]; the others wait."""
        self.climb()
        return graph._inject(endpoints, self.features.index_select(0, some))

    def joined(self, endpoints: Tensor) -> tuple[Graph, EdgeMap]:
        """Return the graph with the new nodes at `endpoints` [M, e], on its device, as `draw` gave them."""
        self.climb()
        if len(endpoints) < len(self.features):
            self.features = self.features.detach()[: len(endpoints)].clone().requires_grad_()
            for limits, points in self.points.items():
                self.points[limits] = points.detach()[: len(endpoints)].clone().requires_grad_()
            self.chosen = self.chosen[: len(endpoints)]
        return self.graph._inject(endpoints, self.features)

    @torch.no_grad()
    def climb(self) -> None:
        """Take one signed step along the gradient that was collected, if any; we maximise."""
        unit = (
            self.features.new_full((), self.budget.step_size),
            0.0,
            1.0,
        )  # filled on the device, for capture
        moving = [(self.features, (self.step, *self.box)), *((one, unit) for one in self.points.values())]
        for place, (rate, low, high) in moving:
            if place.grad is not None:
                place.add_(OPTIMISERS["sign"](place, rate).move(place.grad)).clamp_(low, high)
                place.grad.zero_()

    def add_up(self) -> None:
        """Collect what the other ranks have collected, too; all of them call this before they climb."""
        ranks = current()
        if not ranks.several:
            return
        collected = []
        for place in (self.features, *self.points.values()):
            place.grad = torch.zeros_like(place) if place.grad is None else place.grad
            collected.append(place.grad)
        ranks.add_up(collected)

    def probe(self, generator: torch.Generator) -> tuple[InjectionAdversary, Tensor]:
        """Return the attack that scores an epoch: an adversary that restarts, and endpoints that stay [M, e].

        The endpoints are validation nodes.
        """
        other = self.restarted()
        nodes = task_of(self.graph).nodes(self.graph, "val")
        return other, other.draw(generator, nodes).to(self.graph.device)

    def restarted(self) -> InjectionAdversary:
        """Return an adversary of the same budget that begins at the middle of the box."""
        other = InjectionAdversary(self.graph, self.budget, self.feature_range)
        other.features = torch.empty_like(self.features.detach()).requires_grad_()
        other.chosen = self.chosen
        other.points = {
            limits: torch.empty_like(points.detach()).requires_grad_()
            for limits, points in self.points.items()
        }
        other.restart()
        return other

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again at the middle of the box."""
        self.features.copy_(self.box.middle)
        for points in self.points.values():
            points.fill_(0.5)
        for place in (self.features, *self.points.values()):
            if place.grad is not None:
                place.grad.zero_()

    def state(self) -> dict[str, Tensor]:
        """Return the features and points, the pending step taken."""
        self.climb()
        points = {f"points.{index}": p.detach().clone() for index, p in enumerate(self.points.values())}
        return {"features": self.features.detach().clone(), **points}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take features and points back."""
        device = self.graph.device
        self.features = state["features"].to(device, copy=True).requires_grad_()
        for index, limits in enumerate(self.points):
            self.points[limits] = state[f"points.{index}"].to(device, copy=True).requires_grad_()


def _reach_shares(
    graph: Graph, attacked: Graph, depths: Sequence[int], count: int | None = None
) -> tuple[list[float], float]:
    """Share of the original nodes whose attention the new nodes can change, layer by layer.

    Layer 1 reads the new nodes at their neighbours; every further layer carries the change one edge on.
    Averages over all nodes are divided by it to become averages over the nodes in reach, so that the weight
    of a term does not depend on how much larger the graph is than the attack.
    """
    source, destination = attacked.adjacency.source, attacked.adjacency.destination
    reached = torch.zeros(attacked.num_nodes, dtype=torch.bool, device=attacked.device)
    reached[graph.num_nodes :] = True
    shares, first = [], count or graph.num_nodes
    for _ in range(max(depths) + 1):
        spread = reached.clone()
        spread[destination[reached[source]]] = True
        reached = spread
        shares.append(max(float(reached[:first].float().mean()), 1.0 / first))
    rows = task_of(graph).reached(graph, reached[: graph.num_nodes])[:count]
    return [shares[depth] for depth in depths], max(float(rows.float().mean()), 1.0 / rows.numel())
