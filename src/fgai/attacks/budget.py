"""`Budget`: what an attack may spend, and the one place where it is checked."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fgai.errors import BudgetError
from fgai.graph import EdgeMap, Graph

SLACK = 1e-6


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What an attack may change, and how hard it may search.

    Attributes:
        nodes: new nodes.
        edges: edges of each new node, or edges between existing nodes in all when `nodes` is 0.
        box: interval for the features of new nodes; None takes the data's own range.
        radius: largest change of an existing feature (0: existing features stay).
        rows: share of the target nodes whose features may change.
        steps: gradient steps.
        step_size: of each.
        restarts: independent starts; the best result counts.
        targets: mask whose nodes are attacked and may be joined to: `test`, `val` or `fit`
            (training and validation nodes).
    """

    nodes: int = 0
    edges: int = 0
    box: tuple[float, float] | None = (-1.0, 1.0)
    radius: float = 0.0
    rows: float = 0.0
    steps: int = 0
    step_size: float = 0.0
    restarts: int = 1
    targets: str = "test"

    def __post_init__(self) -> None:
        for name in ("nodes", "edges", "radius", "rows", "steps", "step_size"):
            if not getattr(self, name) >= 0:
                raise BudgetError(f"`{name}` must not be negative, got {getattr(self, name)}")
        if self.restarts < 1:
            raise BudgetError(f"`restarts` must be at least 1, got {self.restarts}")
        if self.rows > 1:
            raise BudgetError(f"`rows` is a share of the targets, at most 1, got {self.rows}")
        if self.box is not None and not self.box[0] < self.box[1]:
            raise BudgetError(f"`box` must be (low, high) with low < high, got {self.box}")
        if self.targets not in ("test", "val", "fit"):
            raise BudgetError(f"`targets` must be test, val or fit, got {self.targets!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for records."""
        return asdict(self)

    def feature_box(self, graph: Graph) -> tuple[float, float]:
        """Return the interval of new features on `graph`.

        Raises:
            BudgetError: if the box lies wholly outside what the data holds.
        """
        low, high = graph.features.range() if graph.features is not None else (0.0, 0.0)
        if self.box is None:
            return low, high
        if self.box[1] < low or self.box[0] > high:
            raise BudgetError(
                f"`box` {self.box} excludes the data, whose features lie in [{low:.4g}, {high:.4g}]"
            )
        return self.box

    def target_nodes(self, graph: Graph) -> Tensor:
        """Return the nodes that may be attacked.

        Raises:
            BudgetError: if there are none, or fewer than the edges of one new node.
        """
        if self.targets == "fit":
            masks = [m for m in (graph.train_mask, graph.val_mask) if m is not None]
            mask = None if not masks else torch.stack(masks).any(0)
        else:
            mask = graph.test_mask if self.targets == "test" else graph.val_mask
        nodes = (
            torch.arange(graph.num_nodes, device=graph.device) if mask is None else mask.nonzero().flatten()
        )
        if nodes.numel() == 0:
            raise BudgetError(f"there are no {self.targets} nodes to attack in {graph.name!r}")
        if self.nodes and self.edges > nodes.numel():
            raise BudgetError(
                f"{self.edges} edges per new node were asked for, but there are only {nodes.numel()}"
                f" {self.targets} nodes to join; lower `edges`"
            )
        return nodes


@dataclass(frozen=True, eq=False)
class Perturbation:
    """A change of a graph, apart from the graph: new nodes, new edges, or changed features.

    Attributes:
        endpoints: [M, e] neighbours of the new nodes, or None.
        features: [M, F] of the new nodes, or None.
        edges: [2, K] undirected edges between existing nodes, or None.
        rows: [R] existing nodes whose features change, or None.
        delta: [R, F] by how much.
    """

    endpoints: Tensor | None = None
    features: Tensor | None = None
    edges: Tensor | None = None
    rows: Tensor | None = None
    delta: Tensor | None = None

    def apply(self, graph: Graph) -> tuple[Graph, EdgeMap]:
        """Return the perturbed graph and the map of the edges that stayed."""
        steps = torch.arange(graph.num_edges, device=graph.device)
        edge_map = EdgeMap(steps, steps, graph.num_edges, graph.num_edges)
        if self.rows is not None and self.delta is not None and graph.features is not None:
            graph = graph.replace(features=graph.features.perturb(self.rows, self.delta))
        if self.endpoints is not None and self.endpoints.numel():
            return graph.inject(self.endpoints, self.features)
        if self.edges is not None and self.edges.numel():
            return graph.inject_edges(torch.cat([self.edges, self.edges.flip(0)], dim=1))
        return graph, edge_map

    def detach(self) -> Perturbation:
        """Return a copy that carries no gradient history."""
        parts = (self.endpoints, self.features, self.edges, self.rows, self.delta)
        return Perturbation(*(None if p is None else p.detach().clone() for p in parts))


def check(change: Perturbation, budget: Budget, graph: Graph) -> None:
    """Raise if `change` spends more than `budget` allows on `graph`; called after every attack.

    Comparisons are written so that NaN fails them.

    Raises:
        BudgetError: naming what was overspent.
    """
    targets = budget.target_nodes(graph)
    for name, nodes in (
        ("injected edges", change.endpoints),
        ("new edges", change.edges),
        ("changed rows", change.rows),
    ):
        outside = 0 if nodes is None else int((~torch.isin(nodes, targets)).sum())
        if outside:
            raise BudgetError(f"{outside} ends of {name} lie outside the {budget.targets} nodes")
    if change.endpoints is not None:
        made, each = change.endpoints.shape
        if made > budget.nodes or each > budget.edges:
            raise BudgetError(f"injected {made} × {each}, allowed {budget.nodes} × {budget.edges}")
    if change.features is not None and change.features.numel():
        low, high = budget.feature_box(graph)
        if not (float(change.features.min()) >= low - SLACK and float(change.features.max()) <= high + SLACK):
            raise BudgetError(f"injected features leave the box [{low:.4g}, {high:.4g}]")
    if change.edges is not None and (budget.nodes or change.edges.shape[1] > budget.edges):
        allowed = 0 if budget.nodes else budget.edges
        raise BudgetError(f"added {change.edges.shape[1]} edges, allowed {allowed}")
    if change.delta is not None and change.delta.numel():
        moved = float(change.delta.abs().max())
        if not moved <= budget.radius + SLACK:
            raise BudgetError(f"features moved by {moved:.4g}, allowed {budget.radius}")
        limit = max(1, round(budget.rows * targets.numel()))
        if change.delta.shape[0] > limit:
            raise BudgetError(f"changed {change.delta.shape[0]} nodes' features, allowed {limit}")
