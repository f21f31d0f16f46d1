"""TDGIA: new nodes at the graph's topological defects, in batches, with smooth feature optimisation."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fgai.attacks.base import Attack, Judge, Ledger
from fgai.attacks.budget import Box
from fgai.attacks.existing import known_labels
from fgai.attacks.injection import draw_endpoints, draw_features
from fgai.attention import AttentionMap
from fgai.errors import InputError
from fgai.graph import Graph, GraphChange
from fgai.objectives import Clean, Objective
from fgai.progress import current

BATCHES = 5
"""Batches the new nodes come in, as in the original (a fifth each)."""
NEAR, FAR = 0.9, 0.1
"""Weights of 1/degree and 1/√(edges · degree) in the score."""
SMOOTH = 4.0
"""Cross-entropy, in nats, beyond which a node counts as beaten and is left alone."""


class TDGIA(Attack):
    """New nodes in batches, each joined to the targets that are easiest to move, with smooth features.

    Before a batch, every target v is scored on the graph as it is by then,

        (2 + p_v) · (0.9 / d_v + 0.1 / √(e d_v)),

    p_v its probability of the clean prediction, d_v its degree plus one, e the edges of a new node. Nodes
    with few neighbours are moved by one more; those already wrong are worth less. The best are dealt to the
    new nodes so that each gets a mixture of classes. Then the features of all new nodes so far,
    x = middle + half-width · sin(u), climb by Adam on u. Under the `prediction` objective they climb

        -mean over targets of relu(4 - cross-entropy)²,

    which does not spend itself on nodes that are beaten already; other objectives are climbed as they are.
    What counts is the objective in every case: the best point of each batch is judged by it.

    Endpoints depend on the model, unlike those of `PGDInjection`: they are part of the attack. `steps` are
    shared by the batches, `step_size` is Adam's rate.

    Reference: Zou et al., TDGIA: Effective Injection Attacks on Graph Neural Networks, KDD 2021. Theirs ranks
    with a surrogate model's predictions and has hundreds of steps a batch; ours goes through the attacked
    model itself, within the budget.
    """

    name = "tdgia"
    chooses = True

    def candidates(
        self, graph: Graph, nodes: Tensor, generator: torch.Generator, judge: Judge, ledger: Ledger
    ) -> Iterator[GraphChange]:
        """Yield random noise, then the best point after each batch."""
        if graph.features is None:
            raise InputError(f"{graph.name!r} has no features to attack")
        budget, box = self.budget, self.budget.feature_box(graph)
        known_labels(graph, judge.clean.logits)  # refuses tasks other than classes of nodes
        endpoints = draw_endpoints(nodes, budget.nodes, budget.edges, generator)
        features = draw_features(graph, budget.nodes, budget.noise_box(graph), generator)
        yield GraphChange(endpoints=endpoints, features=features)
        joined, angles, logits = nodes.new_zeros(0, budget.edges), features[:0], judge.clean.logits
        sizes = batch_sizes(
            budget.nodes, min(-(-budget.nodes // BATCHES), nodes.numel() // budget.edges or 1)
        )
        attacked = graph
        for index, size in enumerate(sizes):
            found = defective_endpoints(
                attacked, nodes, logits, judge.clean.logits, (size, budget.edges), generator
            )
            joined = torch.cat([joined, found])
            fresh = torch.randn(size, graph.num_features, generator=generator, dtype=torch.float32)
            angles = torch.cat([angles, fresh.to(angles)])
            steps = budget.steps * (index + 1) // len(sizes) - budget.steps * index // len(sizes)
            climb = _Climb(graph, joined, box, judge, self._guide())
            angles, best = climb(angles, steps, budget.step_size, ledger)
            change = GraphChange(endpoints=joined, features=climb.features(best))
            yield change
            if index < len(sizes) - 1:
                attacked = change.apply(graph)[0]
                with torch.no_grad():
                    logits = judge.guided(attacked, LOGITS)[1]

    def _guide(self) -> Objective | None:
        return SMOOTH_PREDICTION if self.objective.name == "prediction" else None


def smooth_prediction(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
    """`-mean relu(4 - cross-entropy)²` against the clean prediction; we maximise it."""
    label = clean.logits[clean.nodes].argmax(1)
    loss = cross_entropy(logits[clean.nodes], label, reduction="none")
    return -(SMOOTH - loss).clamp(min=0).square().mean()


SMOOTH_PREDICTION = Objective("smooth prediction", smooth_prediction, "logits", node_mean=True)
LOGITS = Objective("logits", lambda now, *_: now, "logits")
"""No objective at all: the logits themselves, for the next batch's endpoints."""


def batch_sizes(count: int, size: int) -> list[int]:
    """Cut `count` new nodes into batches of `size`, the last perhaps smaller.

    Example:
        >>> batch_sizes(7, 3)
        [3, 3, 1]
    """
    return [min(size, count - start) for start in range(0, count, max(1, size))]


def defect_scores(degree: Tensor, probability: Tensor, edges: int) -> Tensor:
    """How easily each target is moved: `(2 + p) (0.9 / d + 0.1 / √(edges · d))`.

    Args:
        degree: [T] degree plus one.
        probability: [T] of the clean prediction, on the graph as it is now.
        edges: of a new node.
    """
    return (2 + probability) * (NEAR / degree + FAR / (edges * degree).sqrt())


def defective_endpoints(
    graph: Graph,
    nodes: Tensor,
    logits: Tensor,
    clean: Tensor,
    shape: tuple[int, int],
    generator: torch.Generator,
) -> Tensor:
    """Return the endpoints [size, edges] of a batch: the best-scored targets, classes spread evenly.

    Args:
        graph: as it is now, earlier batches included.
        nodes: [T] the targets, at least size · edges.
        logits: on `graph`.
        clean: logits on the clean graph.
        shape: new nodes in the batch, and edges of each.
        generator: breaks the order within a class.
    """
    size, edges = shape
    label = clean[nodes].argmax(1)
    probability = logits[nodes].softmax(1).gather(1, label[:, None]).squeeze(1)
    loops = 0 if graph.has_loops else 1
    score = defect_scores((graph.adjacency.degree[nodes] + loops).to(probability), probability, edges)
    shuffled = torch.randperm(nodes.numel(), generator=generator).to(nodes.device)
    best = shuffled[score[shuffled].argsort(descending=True, stable=True)][: size * edges]
    mixed = torch.randperm(best.numel(), generator=generator).to(nodes.device)
    best = best[mixed]
    dealt = best[label[best].argsort(stable=True)]
    return nodes[dealt].view(edges, size).t().contiguous()


class _Climb:
    """Adam on the angles of the new nodes' features."""

    def __init__(
        self, graph: Graph, endpoints: Tensor, box: Box, judge: Judge, guide: Objective | None
    ) -> None:
        assert graph.features is not None
        self.original, self.judge, self.guide = graph.features, judge, guide
        self.template = GraphChange(endpoints=endpoints).apply(graph)[0]
        self.box = box

    def features(self, angles: Tensor) -> Tensor:
        return self.box.features(torch.sin(angles))

    def value(self, angles: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.original.append(self.features(angles))
        return self.judge.guided(self.template.replace(features=rows), self.guide)

    def __call__(self, start: Tensor, steps: int, rate: float, ledger: Ledger) -> tuple[Tensor, Tensor]:
        """Return the last angles, for the next batch, and the best ones by the objective."""
        moving = start.detach().clone().requires_grad_()
        adam = torch.optim.Adam([moving], lr=rate, maximize=True)
        best, top, steepest = start, start.new_full((), float("-inf")), start.new_zeros(())
        progress = current()
        for _ in range(steps):
            progress.advance()
            value, guide = self.value(moving)
            ledger.steps += 1
            gradient = torch.zeros_like(moving)
            if guide.requires_grad:
                (gradient,) = torch.autograd.grad(guide, moving, materialize_grads=True)
            better = value.detach() > top
            best = torch.where(better, moving.detach(), best)
            top = torch.where(better, value.detach(), top)
            if gradient.numel():
                steepest = torch.maximum(steepest, gradient.abs().max())
            moving.grad = gradient
            adam.step()
        ledger.gradient = max(ledger.gradient, float(steepest))
        with torch.no_grad():
            last = moving.detach()
            return last, torch.where(self.value(last)[0] >= top, last, best)
