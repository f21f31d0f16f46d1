"""The injection adversary: a few new nodes whose features keep climbing while the model trains."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fgai.attacks import Budget, draw_endpoints, draw_features
from fgai.errors import InputError
from fgai.graph import EdgeMap, Graph


class InjectionAdversary:
    """New nodes with new endpoints every epoch and features warm-started from the last.

    The training step's own backward pass also yields the gradient in the injected features, so the climb
    costs no pass of its own: `attacked` hands out a graph, the caller back-propagates a loss that the
    features should raise, and the next call of `attacked` takes the step first.

    Args:
        graph: prepared for the model.
        budget: nodes, edges, box and step size; endpoints come from its targets.
    """

    def __init__(self, graph: Graph, budget: Budget, horizon: int = 0, groups: int = 1) -> None:
        if graph.features is None:
            raise InputError(f"{graph.name!r} has no features to inject")
        self.graph, self.budget = graph, budget
        self.box = budget.feature_box(graph)
        self.nodes = budget.target_nodes(graph)
        each = min(budget.edges, int(self.nodes.numel()))
        self.budget = replace(budget, edges=each)
        self.features = torch.zeros(0)
        self.horizon, self.groups = horizon, groups

    def start(self, generator: torch.Generator) -> None:
        """Draw the first features."""
        self.features = draw_features(self.graph, self.budget.nodes, self.box, generator)

    def attacked(
        self, generator: torch.Generator, nodes: Tensor | None = None, epoch: int | None = None
    ) -> tuple[Graph, EdgeMap]:
        """Return the graph with the new nodes at fresh endpoints; their features collect a gradient."""
        self.climb()
        self._restart(epoch)
        pool = self.nodes if nodes is None else nodes
        each = min(self.budget.edges, int(pool.numel()))
        endpoints = draw_endpoints(pool, self.budget.nodes, each, generator)
        self.features = self.features.detach().requires_grad_()
        return self.graph.inject(endpoints, self.features)

    def _restart(self, epoch: int | None) -> None:
        """Send the group whose turn it is back to the middle of the box."""
        if epoch is None or not self.horizon:
            return
        count = self.budget.nodes
        group = torch.arange(count, device=self.features.device) * self.groups // max(1, count)
        due = (epoch + group * self.horizon // self.groups) % self.horizon == 0
        middle = (self.box[0] + self.box[1]) / 2
        self.features = torch.where(due[:, None], middle, self.features.detach())

    def climb(self) -> None:
        """Take one signed step along the gradient that was collected, if any; we maximise."""
        gradient = self.features.grad
        if gradient is not None:
            moved = self.features.detach() + self.budget.step_size * gradient.sign()
            self.features = moved.clamp(*self.box)

    def state(self) -> dict[str, Tensor]:
        """Return the features, the pending step taken."""
        self.climb()
        return {"features": self.features.detach()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take the features back."""
        self.features = state["features"].to(self.graph.device)
