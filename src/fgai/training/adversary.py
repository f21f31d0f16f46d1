"""The injection adversary: a few new nodes whose features keep climbing while the model trains."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fgai.attacks import Budget, draw_endpoints, draw_features
from fgai.attacks.budget import smallest_pool
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.sparse import EdgeMap
from fgai.tasks import task_of


class InjectionAdversary:
    """New nodes with new endpoints every epoch and features warm-started from the last.

    The training step's own backward pass also yields the gradient in the injected features, so the climb
    costs no pass of its own: `attacked` hands out a graph, the caller back-propagates a loss that the
    features should raise, and the next call of `attacked` takes the step first. The features stay in one
    place in memory and move there, so that a captured CUDA graph can hold the whole.

    Args:
        graph: prepared for the model.
        budget: nodes, edges, box and step size; endpoints come from its targets.
    """

    def __init__(self, graph: Graph, budget: Budget) -> None:
        if graph.features is None:
            raise InputError(f"{graph.name!r} has no features to inject")
        self.graph, self.budget = graph, budget
        self.box = budget.feature_box(graph)
        self.nodes = budget.target_nodes(graph).cpu()  # drawn and checked without waiting for the device
        self.batch = None if graph.batch is None else graph.batch.cpu()
        each = min(budget.edges, smallest_pool(graph, self.nodes.to(graph.device)))
        self.budget = replace(budget, edges=each)
        self.features = torch.zeros(0)

    def start(self, generator: torch.Generator) -> None:
        """Draw the first features."""
        groups = 1 if self.batch is None else torch.unique(self.batch[self.nodes]).numel()
        drawn = draw_features(self.graph, self.budget.nodes * groups, self.box, generator)
        self.features = drawn.requires_grad_()

    def draw(self, generator: torch.Generator, nodes: Tensor | None = None) -> Tensor:
        """Return fresh endpoints [M, e], on the CPU; from `nodes`, if given, not the targets."""
        pool = self.nodes if nodes is None else nodes.cpu()
        each = min(self.budget.edges, int(pool.numel()))
        return draw_endpoints(pool, self.budget.nodes, each, generator, self.batch)

    def attacked(self, generator: torch.Generator, nodes: Tensor | None = None) -> tuple[Graph, EdgeMap]:
        """Return the graph with the new nodes at fresh endpoints; their features collect a gradient."""
        return self.joined(self.draw(generator, nodes).to(self.graph.device))

    def joined(self, endpoints: Tensor) -> tuple[Graph, EdgeMap]:
        """Return the graph with the new nodes at `endpoints` [M, e], on its device, as `draw` gave them."""
        self.climb()
        if len(endpoints) < len(self.features):
            self.features = self.features.detach()[: len(endpoints)].clone().requires_grad_()
        return self.graph.inject(endpoints, self.features, trusted=True)

    @torch.no_grad()
    def climb(self) -> None:
        """Take one signed step along the gradient that was collected, if any; we maximise."""
        if self.features.grad is not None:
            self.features.add_(self.budget.step_size * self.features.grad.sign()).clamp_(*self.box)
            self.features.grad.zero_()

    def probe(self, generator: torch.Generator) -> tuple[InjectionAdversary, Tensor]:
        """Return the attack that scores an epoch: an adversary that restarts, and endpoints that stay [M, e].

        The endpoints are validation nodes.
        """
        other = self.restarted()
        nodes = task_of(self.graph).nodes(self.graph, "val")
        return other, other.draw(generator, nodes).to(self.graph.device)

    def restarted(self) -> InjectionAdversary:
        """Return an adversary of the same budget that begins at the middle of the box."""
        other = InjectionAdversary(self.graph, self.budget)
        other.features = torch.empty_like(self.features.detach()).requires_grad_()
        other.restart()
        return other

    @torch.no_grad()
    def restart(self) -> None:
        """Begin again at the middle of the box."""
        self.features.fill_((self.box[0] + self.box[1]) / 2)
        if self.features.grad is not None:
            self.features.grad.zero_()

    def state(self) -> dict[str, Tensor]:
        """Return the features, the pending step taken."""
        self.climb()
        return {"features": self.features.detach().clone()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take the features back."""
        self.features = state["features"].to(self.graph.device, copy=True).requires_grad_()


def reach_shares(graph: Graph, attacked: Graph, layers: int) -> tuple[list[float], float]:
    """Share of the original nodes whose attention the new nodes can change, layer by layer.

    Layer 1 reads the new nodes at their neighbours; every further layer carries the change one edge on.
    Averages over all nodes are divided by it to become averages over the nodes in reach, so that the weight
    of a term does not depend on how much larger the graph is than the attack.

    Args:
        graph: before the injection.
        attacked: after it.
        layers: attention layers of the model.

    Returns:
        The shares of nodes by layer, and the share of predictions (of nodes, links or small graphs) in reach.
    """
    source, destination = attacked.adjacency.source, attacked.adjacency.destination
    reached = torch.zeros(attacked.num_nodes, dtype=torch.bool, device=attacked.device)
    reached[graph.num_nodes :] = True
    shares = []
    for _ in range(layers):
        spread = reached.clone()
        spread[destination[reached[source]]] = True
        reached = spread
        shares.append(max(float(reached[: graph.num_nodes].float().mean()), 1.0 / graph.num_nodes))
    rows = task_of(graph).reached(graph, reached[: graph.num_nodes])
    return shares, max(float(rows.float().mean()), 1.0 / rows.numel())
