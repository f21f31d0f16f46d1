"""`Budget`: what an attack may spend, and the one place where it is checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fgai import checks
from fgai.errors import BudgetError
from fgai.graph import Graph, GraphChange
from fgai.sparse import edge_keys
from fgai.tasks import task_of
from fgai.typed import typed

SLACK = 1e-6
LARGEST = 1_000_000
"""New nodes, edges, steps and restarts at most: more would not end."""


def _is_interval(box: Any) -> bool:
    """Whether something is two finite numbers, the smaller first."""
    if not isinstance(box, Sequence) or len(box) != 2 or not all(isinstance(end, Real) for end in box):
        return False
    return -math.inf < float(box[0]) < float(box[1]) < math.inf


@typed
@dataclass(frozen=True, kw_only=True)
class Budget:
    """What an attack may change, and how hard it may search.

    On a batch of small graphs, `nodes` and `edges` are those of each attacked graph.

    Attributes:
        nodes: new nodes.
        edges: edges of each new node, or edges between existing nodes in all when `nodes` is 0, those added
            and those removed together.
        box: interval for the features of new nodes; None takes the data's own range.
        radius: largest change of an existing feature (0: existing features stay).
        rows: share of the target nodes whose features may change.
        steps: gradient steps.
        step_size: of each.
        restarts: independent starts; the best result counts.
        targets: part of the split that is attacked and whose nodes may be joined to: `test`, `val` or `fit`
            (training and validation).
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
        for name in ("nodes", "edges", "steps", "restarts"):
            value, least = getattr(self, name), int(name == "restarts")
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
                raise BudgetError(
                    f"`{name}` must be at least {least}, whole and at most {LARGEST}, got {value!r}"
                )
        for name in ("radius", "rows", "step_size"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise BudgetError(f"`{name}` must be finite and not negative, got {value}")
        if self.rows > 1:
            raise BudgetError(f"`rows` is a share of the targets, at most 1, got {self.rows}")
        if self.box is not None and not _is_interval(self.box):
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
        return self.box_in(*(graph.features.range() if graph.features is not None else (0.0, 0.0)))

    def box_in(self, low: float, high: float) -> tuple[float, float]:
        """Return the interval of new features where those of the data lie between two numbers.

        Raises:
            BudgetError: if the box lies wholly outside.
        """
        if self.box is None:
            return low, high
        if self.box[1] < low or self.box[0] > high:
            raise BudgetError(
                f"`box` {self.box} excludes the data, whose features lie in [{low:.4g}, {high:.4g}]"
            )
        return self.box

    def target_nodes(self, graph: Graph) -> Tensor:
        """Return the nodes that may be joined or changed: of the targets, or at the ends of target links.

        Raises:
            BudgetError: if there are none, or fewer than the edges of one new node.
        """
        nodes = task_of(graph).nodes(graph, self.targets)
        if nodes.numel() == 0:
            raise BudgetError(f"there are no {self.targets} nodes to attack in {graph.name!r}")
        checks.memory(self.nodes * max(self.edges, graph.num_features), 8, "nodes")
        room = smallest_pool(graph, nodes)
        if self.nodes and self.edges > room:
            where = "" if graph.batch is None else " in the smallest attacked graph"
            raise BudgetError(
                f"{self.edges} edges per new node were asked for, but there are only {room}"
                f" {self.targets} nodes to join{where}; lower `edges`"
            )
        return nodes


def smallest_pool(graph: Graph, nodes: Tensor) -> int:
    """How many of `nodes` one new node can be joined to: all, or those of the smallest graph of a batch."""
    if graph.batch is None:
        return int(nodes.numel())
    counts = torch.bincount(graph.batch[nodes])
    return int(counts[counts > 0].min())


def _shares(graph: Graph, nodes: Tensor) -> int:
    """How often the budget for nodes and edges is granted: once, or once per attacked graph of a batch."""
    return 1 if graph.batch is None else int(torch.unique(graph.batch[nodes]).numel())


@typed
def check(change: GraphChange, budget: Budget, graph: Graph) -> None:
    """Raise if `change` spends more than `budget` allows on `graph`; called after every attack.

    Comparisons are written so that NaN fails them.

    Raises:
        BudgetError: naming what was overspent.
    """
    targets = budget.target_nodes(graph)
    for name, nodes in (
        ("injected edges", change.endpoints),
        ("new edges", change.edges),
        ("removed edges", change.removed),
        ("changed rows", change.rows),
    ):
        outside = 0 if nodes is None else int((~torch.isin(nodes, targets)).sum())
        if outside:
            raise BudgetError(f"{outside} ends of {name} lie outside the {budget.targets} nodes")
    shares = _shares(graph, targets)
    _check_inside(change.endpoints, budget.nodes, graph, "new nodes")
    _check_inside(None if change.edges is None else change.edges.T, budget.edges, graph, "new edges")
    if change.endpoints is not None:
        made, each = change.endpoints.shape
        if made > budget.nodes * shares or each > budget.edges:
            raise BudgetError(f"injected {made} × {each}, allowed {budget.nodes * shares} × {budget.edges}")
    if change.features is not None and change.features.numel():
        low, high = budget.feature_box(graph)
        if not (float(change.features.min()) >= low - SLACK and float(change.features.max()) <= high + SLACK):
            raise BudgetError(f"injected features leave the box [{low:.4g}, {high:.4g}]")
    _check_edges(change, budget, graph, shares)
    if change.delta is not None and change.delta.numel():
        moved = float(change.delta.abs().max())
        if not moved <= budget.radius + SLACK:
            raise BudgetError(f"features moved by {moved:.4g}, allowed {budget.radius}")
        limit = max(1, round(budget.rows * targets.numel()))
        if change.delta.shape[0] > limit:
            raise BudgetError(f"changed {change.delta.shape[0]} nodes' features, allowed {limit}")


def _check_inside(ends: Tensor | None, limit: int, graph: Graph, name: str) -> None:
    """Raise if a row of `ends` leaves its small graph, or one small graph gets more than its share."""
    if graph.batch is None or ends is None or not ends.numel():
        return
    groups = graph.batch[ends]
    if bool((groups != groups[:, :1]).any()):
        raise BudgetError(f"{name} join nodes of different small graphs")
    most = int(torch.bincount(groups[:, 0]).max())
    if most > limit:
        raise BudgetError(f"one small graph got {most} {name}, allowed {limit} each")


def _check_edges(change: GraphChange, budget: Budget, graph: Graph, shares: int) -> None:
    """Count the edges between existing nodes that come and go, and look for those that go."""
    added, removed = (0 if pairs is None else pairs.shape[1] for pairs in (change.edges, change.removed))
    allowed = 0 if budget.nodes else budget.edges * shares
    if added + removed > allowed:
        raise BudgetError(f"added {added} edges and removed {removed}, allowed {allowed} in all")
    if change.removed is None or not removed:
        return
    one, two = change.removed
    there = torch.isin(edge_keys(one, two), graph.keys) | torch.isin(edge_keys(two, one), graph.keys)
    missing = int((~there | (one == two)).sum())
    if missing:
        raise BudgetError(f"{missing} of the removed edges are not there, or join a node to itself")
