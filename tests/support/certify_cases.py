"""Slow references and attacks for the certificates: linear programs, vertices, projected gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from scipy.optimize import linprog, nnls
from torch import Tensor, nn

from fgai.attention import call_model, evaluating, record
from fgai.certificates import CertificateRecord
from fgai.divergence import tvd
from fgai.graph import Graph
from fgai.topk import overlap, topk_mask
from support.balls import project, random_point, steepest
from support.forward import adding

NORMS = ("l1", "l2", "linf")
Objective = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(clean logits, logits, attention [E], rowptr) → what is maximised."""


def least_norm(rows: np.ndarray, at_least: np.ndarray, norm: str, heads: int = 1) -> float:
    """min ‖x‖ subject to rows · x >= at_least; with several heads the largest of their norms (l1, linf)."""
    count, size = rows.shape
    if norm == "l2":
        # The nearest point of a polyhedron, by its dual: rowsᵀλ is the answer for the best λ >= 0.
        stacked = np.vstack([rows.T, at_least])
        target = np.append(np.zeros(size), 1.0)
        answer, residual = nnls(stacked, target)
        return 0.0 if residual < 1e-12 else float(np.sqrt(max(1 / residual**2 - 1, 0.0)))
    # Variables: x, |x| entry by entry, and the bound t on every head's norm.
    eye, width = np.eye(size), size // heads
    sizes = [np.hstack([s * eye, -eye, np.zeros((size, 1))]) for s in (1, -1)]
    blocks = np.kron(np.eye(heads), np.ones(width)) if norm == "l1" else eye
    limits = np.hstack([np.zeros((len(blocks), size)), blocks, -np.ones((len(blocks), 1))])
    wanted = np.hstack([-rows, np.zeros((count, size + 1))])
    goal = np.append(np.zeros(2 * size), 1.0)
    bounds = np.concatenate([-at_least, np.zeros(2 * size + len(blocks))])
    answer = linprog(goal, np.vstack([wanted, *sizes, limits]), bounds, bounds=(None, None), method="highs")
    return float(answer.fun) if answer.status == 0 else float("inf")


def cheapest_swap(a: np.ndarray, k: int, m: int, norm: str) -> float:
    """The smallest perturbation after which a set of k neighbours, m of them new, can be the top-k."""
    order = np.argsort(-a, kind="stable")
    members, outsiders = order[:k], order[k:]
    best = float("inf")
    for leaving in itertools.combinations(members, m):
        for entering in itertools.combinations(outsiders, m):
            inside = sorted((set(members.tolist()) - set(leaving)) | set(entering))
            outside = sorted(set(range(len(a))) - set(inside))
            pairs = list(itertools.product(inside, outside))
            rows = np.zeros((len(pairs), len(a)))
            for row, (high, low) in zip(rows, pairs, strict=True):
                row[high], row[low] = 1.0, -1.0
            best = min(best, least_norm(rows, -rows @ a, norm))
    return best


def breaks(
    model: nn.Module, graph: Graph, found: CertificateRecord, layer: int, delta: Tensor, slack: float = 1e-9
) -> list[str]:
    """Perturb one layer; name every certificate that a node breaks, by more than rounding.

    The heads are perturbed in the model, and their mean perturbation is added to the explanation vector.
    """
    with torch.no_grad(), evaluating(model):
        with record(model) as tape:
            before = call_model(model, graph)
        clean = tape.attention[layer]
        with record(model, perturb=adding({layer: delta})) as tape:
            after = call_model(model, graph)
    certificate, radius, broken = found.layer(layer), found.radius, []
    shown, change = clean.explanation(), delta if delta.dim() == 1 else delta.mean(1)
    masks = [topk_mask(w, clean.rowptr, certificate.k) for w in (shown, shown + change)]
    kept = overlap(masks[0], masks[1], clean.rowptr)
    # A cost that equals the radius up to rounding may fall on either side.
    if bool((kept < certificate.beta2(radius + slack) - 1e-9).any()):
        broken.append("topk")
    prediction = certificate.prediction
    if prediction.class_radius is not None:
        changed = before.argmax(1) != after.argmax(1)
        if bool((changed & (prediction.class_radius > radius * (1 + slack) + slack)).any()):
            broken.append("class")
    limits = {"logits": prediction.alpha2_logits, "probabilities": prediction.alpha2_probabilities}
    for space, limit in limits.items():
        room = slack * float(before.abs().max())
        if limit is not None and bool((tvd(before, after, space) > limit * (1 + slack) + room).any()):
            broken.append(space)
    return broken


def climb(
    model: nn.Module,
    graph: Graph,
    layer: int,
    objective: Objective,
    *,
    radius: float,
    norm: str,
    steps: int,
    seed: int,
) -> Tensor:
    """Projected gradient ascent on one layer's attention, each head in its ball; returns delta [E, H]."""
    with torch.no_grad(), evaluating(model), record(model) as tape:
        clean = call_model(model, graph)
    attention, rowptr = tape.attention[layer], tape.attention[layer].rowptr
    generator = torch.Generator().manual_seed(seed)
    delta = torch.stack(
        [
            random_point(
                rowptr, attention.num_edges, radius, norm, generator=generator, dtype=attention.values.dtype
            )
            for _ in range(attention.num_heads)
        ],
        dim=1,
    )
    for step in range(steps):
        moving = delta.clone().requires_grad_()
        with evaluating(model, freeze=True), record(model, perturb=adding({layer: moving})) as tape:
            logits = call_model(model, graph)
        value = objective(clean, logits, tape.attention[layer].values.mean(1), rowptr)
        (gradient,) = torch.autograd.grad(value, moving)
        stride = radius if step == 0 else radius / 2
        push = torch.stack([steepest(column, rowptr, stride, norm) for column in gradient.unbind(1)], dim=1)
        delta = torch.stack(
            [project(column, rowptr, radius, norm) for column in (delta + push).unbind(1)], dim=1
        )
    return delta


def gain_on_top(clean: Tensor, logits: Tensor, attention: Tensor, rowptr: Tensor) -> Tensor:
    """How far the best other class has come towards the predicted one, summed over nodes."""
    top = clean.argmax(1, keepdim=True)
    others = logits.scatter(1, top, float("-inf"))
    return (others.amax(1) - logits.gather(1, top)[:, 0]).sum()


def change_of_logits(clean: Tensor, logits: Tensor, attention: Tensor, rowptr: Tensor) -> Tensor:
    """Total variation on logits."""
    return tvd(clean, logits).sum()


def change_of_chances(clean: Tensor, logits: Tensor, attention: Tensor, rowptr: Tensor) -> Tensor:
    """Total variation on probabilities."""
    return tvd(clean, logits, "probabilities").sum()


OBJECTIVES: tuple[Objective, ...] = (gain_on_top, change_of_logits, change_of_chances)


def swap(values: Tensor, rowptr: Tensor, k: int, radius: float, norm: str) -> Tensor:
    """The perturbation that lets as many members leave the top-k as the radius allows; [E].

    The m weakest members and the m strongest outsiders meet at one level, a little beyond.
    """
    delta = torch.zeros_like(values)
    for start, stop in itertools.pairwise(rowptr.tolist()):
        row = values[start:stop]
        order = torch.argsort(row, descending=True, stable=True)
        for m in range(1, min(k, len(row) - k) + 1):
            low, high = order[k - m : k], order[k : k + m]
            level = _level(row[low], row[high], norm)
            change = torch.zeros_like(row)
            change[low] = -(row[low] - level).clamp(min=0)
            change[high] = (level - row[high]).clamp(min=0)
            size = torch.linalg.vector_norm(change, {"l1": 1, "l2": 2, "linf": float("inf")}[norm])
            if size >= radius:
                break
            # Outsiders win ties this way, as far as the radius goes.
            change[high] += (radius - size) / (2 * m)
            delta[start:stop] = change
    return delta


def _level(members: Tensor, outsiders: Tensor, norm: str) -> Tensor:
    both = torch.cat([members, outsiders])
    if norm == "linf":
        return (members.max() + outsiders.min()) / 2
    if norm == "l1":
        return both.median()
    levels = torch.linspace(float(both.min()), float(both.max()), 2001, dtype=both.dtype)[:, None]
    cost = (members - levels).clamp(min=0).square().sum(1) + (levels - outsiders).clamp(min=0).square().sum(1)
    return levels[cost.argmin(), 0]
