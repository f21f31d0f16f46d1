"""The injection adversary: a few new nodes whose features climb while the model trains."""

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

    The features climb by the gradient that the training step's backward pass leaves in them, so the climb
    costs no pass: `joined` takes the pending step and returns a graph, and the caller back-propagates a loss
    that the features should raise. They are updated in place, as a captured CUDA graph needs.

    Behind limits every second node moves a point of the unit box instead of features. The point stands for
    the values of the node in the first layer; every choice of features is such a point.

    Args:
        graph: prepared for the model.
        budget: nodes, edges, box and step size; endpoints come from its targets.
        feature_range: smallest and largest value of each feature of the data, [F] each; the graph's own by
            default.
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

    @property
    def _variables(self) -> list[Tensor]:
        """Features and points: the tensors that climb."""
        return [self.features, *self.points.values()]

    def check_box(self) -> None:
        """Raise if the data gives no box; warn if the user's leaves out values of the data."""
        _ = self.step
        warn_if_narrow(self.budget.box, *self.feature_range)

    def start(self, generator: torch.Generator, entry: Sequence[Limits] = ()) -> None:
        """Draw the first features; behind limits of the first layer also points of every second node."""
        groups = 1 if self.batch is None else torch.unique(self.batch[self.nodes]).numel()
        features = draw_features(self.graph, self.budget.nodes * groups, self.box, generator)
        self.features = features.requires_grad_()
        if entry:
            self.chosen = torch.arange(len(features), device=features.device) % 2 == 1
        for limits in entry:
            shape = (len(features), *limits.low.shape)
            uniform = torch.rand(shape, generator=generator, dtype=torch.float32)
            self.points[limits] = uniform.to(features).requires_grad_()

    def sending_values(self, subset: Tensor | None = None) -> AbstractContextManager[None]:
        """Return a block in which all new nodes or a subset [m] send their points of value space."""
        if not self.points:
            return nullcontext()
        if subset is None:
            return replacing_values(self.points, self.chosen)
        points = {limits: values.index_select(0, subset) for limits, values in self.points.items()}
        return replacing_values(points, self.chosen[subset])

    def draw(self, generator: torch.Generator, nodes: Tensor | None = None) -> Tensor:
        """Return fresh endpoints [M, e], on the CPU; among `nodes` instead of the targets, if given."""
        pool = self.nodes if nodes is None else nodes.cpu()
        each = min(self.budget.edges, int(pool.numel()))
        return draw_endpoints(pool, self.budget.nodes, each, generator, self.batch)

    def attacked(self, generator: torch.Generator) -> tuple[Graph, EdgeMap]:
        """Return the graph with the new nodes at fresh endpoints; their features collect a gradient."""
        return self.joined(self.draw(generator).to(self.graph.device))

    def joined_to(self, graph: Graph, endpoints: Tensor, some: Tensor) -> tuple[Graph, EdgeMap]:
        """Return another graph with some of the new nodes [m] at `endpoints` [m, e], without the others."""
        self.climb()
        return graph._inject(endpoints, self.features.index_select(0, some))

    def joined(self, endpoints: Tensor) -> tuple[Graph, EdgeMap]:
        """Return the graph with the new nodes at `endpoints` [M, e], on its device, as `draw` gave them."""
        self.climb()
        if (count := len(endpoints)) < len(self.features):
            self._assign([values.detach()[:count].clone() for values in self._variables])
            self.chosen = self.chosen[:count]
        return self.graph._inject(endpoints, self.features)

    def _assign(self, values: Sequence[Tensor]) -> None:
        """Replace features and points by other tensors."""
        self.features, *points = (value.requires_grad_() for value in values)
        self.points = dict(zip(self.points, points, strict=True))

    @torch.no_grad()
    def climb(self) -> None:
        """Take one signed step along the gradient that was collected, if any; we maximise."""
        rate = self.features.new_full((), self.budget.step_size)  # filled on the device, for capture
        sizes = [(self.step, *self.box), *((rate, 0.0, 1.0) for _ in self.points)]
        for values, (step, low, high) in zip(self._variables, sizes, strict=True):
            if values.grad is not None:
                values.add_(OPTIMISERS["sign"](values, step).move(values.grad)).clamp_(low, high)
                values.grad.zero_()

    def add_up(self) -> None:
        """Add the gradients of all processes; all of them call this before they climb."""
        ranks = current()
        if not ranks.several:
            return
        gradients = []
        for values in self._variables:
            values.grad = torch.zeros_like(values) if values.grad is None else values.grad
            gradients.append(values.grad)
        ranks.add_up(gradients)

    def probe(self, generator: torch.Generator) -> tuple[InjectionAdversary, Tensor]:
        """Return an adversary that restarts, and its endpoints: fixed validation nodes [M, e]."""
        other = self.restarted()
        nodes = task_of(self.graph).nodes(self.graph, "val")
        return other, other.draw(generator, nodes).to(self.graph.device)

    def restarted(self) -> InjectionAdversary:
        """Return an adversary of the same budget that begins at the middle of the box."""
        other = InjectionAdversary(self.graph, self.budget, self.feature_range)
        other.points, other.chosen = dict(self.points), self.chosen
        other._assign([torch.empty_like(values.detach()) for values in self._variables])
        other.restart()
        return other

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again at the middle of the box."""
        self.features.copy_(self.box.middle)
        for points in self.points.values():
            points.fill_(0.5)
        for values in self._variables:
            if values.grad is not None:
                values.grad.zero_()

    def state(self) -> dict[str, Tensor]:
        """Return the features and points, the pending step taken."""
        self.climb()
        names = ["features", *(f"points.{index}" for index in range(len(self.points)))]
        return {name: v.detach().clone() for name, v in zip(names, self._variables, strict=True)}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        names = ["features", *(f"points.{index}" for index in range(len(self.points)))]
        self._assign([state[name].to(self.graph.device, copy=True) for name in names])
