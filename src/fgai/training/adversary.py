"""`InjectionAdversary`: new nodes whose features are attacked while the model trains."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fgai.attacks import Budget, draw_endpoints, draw_features
from fgai.attacks.budget import Box, data_range, smallest_pool, warn_if_narrow
from fgai.attacks.search.climb import OPTIMISERS
from fgai.attention import Limits, call_model, replacing_values, straight_through
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.processes import current
from fgai.sparse import EdgeMap
from fgai.tasks import task_of


class InjectionAdversary:
    """Injected nodes with new endpoints every epoch, and features that are kept from epoch to epoch.

    `ascend_and_inject` changes the features in place, along the gradient of the last backward pass, and
    returns a graph with the nodes. The caller computes the loss to increase on it, and back-propagates it.

    If the first layer has limits, every second node has, instead of features, values in that layer
    between the smallest and the largest allowed ones, see `Graph.entry_values`. Endpoints are drawn from the
    budget's `targets`. `feature_range` is the smallest and largest value of each feature, by default those on
    the graph.
    """

    def __init__(
        self, graph: Graph, budget: Budget, feature_range: tuple[Tensor, Tensor] | None = None
    ) -> None:
        if graph.features is None:
            raise InputError(f"{graph.name!r} has no features to inject")
        self.graph = graph
        low, high = feature_range or data_range(graph)
        stored = graph.features.stored
        self.feature_range = low.to(stored), high.to(stored)
        # With one edge per node a small graph has enough nodes to join. On the CPU, where draws are made.
        self.endpoint_pool = replace(budget, edges=1).target_nodes(graph).cpu()
        self.batch = None if graph.batch is None else graph.batch.cpu()
        edges = min(budget.edges, smallest_pool(graph, self.endpoint_pool.to(graph.device)))
        self.budget = replace(budget, edges=edges)
        self.features = low.new_zeros(0, graph.num_features)
        self.points: dict[Limits, Tensor] = {}  # points of the unit box, [M, ...]
        self.moves_points = torch.zeros(0, dtype=torch.bool)  # [M] nodes that move points

    @cached_property
    def box(self) -> Box:
        """Box of the new nodes' features."""
        return self.budget.box_in(*self.feature_range)

    @cached_property
    def step_size(self) -> Tensor:
        """[F] size of an ascent step in each feature."""
        return self.budget.step_size * self.box.half

    @property
    def _variables(self) -> dict[str, Tensor]:
        """The tensors that move, by their names in saved states."""
        points = {f"points.{index}": values for index, values in enumerate(self.points.values())}
        return {"features": self.features, **points}

    def check_box(self) -> None:
        """Raise an error if the data has no box; warn if the user's box excludes values of the data."""
        _ = self.box
        warn_if_narrow(self.budget.box, *self.feature_range)

    def start(self, generator: torch.Generator, first_layer_limits: Sequence[Limits] = ()) -> None:
        """Draw the first features, and points for every second node if the first layer has limits."""
        num_graphs = 1 if self.batch is None else torch.unique(self.batch[self.endpoint_pool]).numel()
        features = draw_features(self.graph, self.budget.nodes * num_graphs, self.box, generator)
        self.features = features.requires_grad_()
        if first_layer_limits:
            self.moves_points = torch.arange(len(features), device=features.device) % 2 == 1
        for limits in first_layer_limits:
            uniform = torch.rand(len(features), *limits.low.shape, generator=generator, dtype=torch.float32)
            self.points[limits] = uniform.to(features).requires_grad_()

    def using_points(self, subset: Tensor | None = None) -> AbstractContextManager[None]:
        """Context in which points replace the values of their nodes; for `subset` see `ascend_and_inject`."""
        if not self.points:
            return nullcontext()
        if subset is None:
            return replacing_values(self.points, self.moves_points)
        points = {limits: values.index_select(0, subset) for limits, values in self.points.items()}
        return replacing_values(points, self.moves_points[subset])

    def draw(self, generator: torch.Generator, nodes: Tensor | None = None) -> Tensor:
        """Return new endpoints [M, e], on the CPU; among `nodes`, by default those of the `endpoint_pool`."""
        pool = self.endpoint_pool if nodes is None else nodes.cpu()
        edges = min(self.budget.edges, int(pool.numel()))
        return draw_endpoints(pool, self.budget.nodes, edges, generator, self.batch)

    def ascend_and_inject(
        self, graph: Graph, endpoints: Tensor, subset: Tensor | None = None
    ) -> tuple[Graph, EdgeMap]:
        """Call `ascend`, then return a graph or batch with the adversary's nodes at `endpoints` [m, e].

        `subset` [m] are the nodes that join. By default all do; if m is smaller, the last are then removed.
        """
        self.ascend()
        if subset is not None:
            return graph._inject(endpoints, self.features.index_select(0, subset))
        if (count := len(endpoints)) < len(self.features):
            self._assign([values.detach()[:count].clone() for values in self._variables.values()])
            self.moves_points = self.moves_points[:count]
        return graph._inject(endpoints, self.features)

    def attacked_logits(
        self, model: nn.Module, graph: Graph, endpoints: Tensor, subset: Tensor | None = None
    ) -> Tensor:
        """Return a model's logits on the graph of `ascend_and_inject`."""
        attacked, _ = self.ascend_and_inject(graph, endpoints, subset)
        with self.using_points(subset), straight_through(model):
            return call_model(model, attacked)

    def _assign(self, values: Sequence[Tensor]) -> None:
        self.features, *points = (value.requires_grad_() for value in values)
        self.points = dict(zip(self.points, points, strict=True))

    @torch.no_grad()
    def ascend(self) -> None:
        """Take one step along the sign of the gradient, if there is one, and set the gradient to zero."""
        point_step = self.features.new_full((), self.budget.step_size)  # filled on the device, for capture
        sizes = [(self.step_size, *self.box), *((point_step, 0.0, 1.0) for _ in self.points)]
        for values, (size, low, high) in zip(self._variables.values(), sizes, strict=True):
            if values.grad is not None:
                values.add_(OPTIMISERS["sign"](values, size).move(values.grad)).clamp_(low, high)
                values.grad.zero_()

    def sum_gradients(self) -> None:
        """Add up the gradients of all processes; every process must call it before it ascends."""
        processes = current()
        if not processes.is_distributed:
            return
        gradients = []
        for values in self._variables.values():
            values.grad = torch.zeros_like(values) if values.grad is None else values.grad
            gradients.append(values.grad)
        processes.all_reduce(gradients)

    def validation_attack(self, generator: torch.Generator) -> tuple[InjectionAdversary, Tensor]:
        """Return a copy of the adversary and fixed endpoints [M, e] among the validation nodes."""
        other = self.copy()
        nodes = task_of(self.graph).nodes(self.graph, "val")
        return other, other.draw(generator, nodes).to(self.graph.device)

    def copy(self) -> InjectionAdversary:
        """Return an adversary of the same budget, restarted."""
        other = copy.copy(self)
        other._assign([torch.empty_like(values.detach()) for values in self._variables.values()])
        other.restart()
        return other

    @torch.no_grad()
    def restart(self) -> None:
        """Set features and points to the middle of their boxes, without a gradient."""
        self.features.copy_(self.box.middle)
        for points in self.points.values():
            points.fill_(0.5)
        for values in self._variables.values():
            if values.grad is not None:
                values.grad.zero_()

    def state(self) -> dict[str, Tensor]:
        """Call `ascend`, then return features and points."""
        self.ascend()
        return {name: values.detach().clone() for name, values in self._variables.items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self._assign([state[name].to(self.graph.device, copy=True) for name in self._variables])
