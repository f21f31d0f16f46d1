"""`attack_attention`: how far attention within a ball around the model's own can move its predictions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fgai.alone import with_gradients
from fgai.attacks import balls
from fgai.attacks.budget import LARGEST
from fgai.attention import LayerAttention, evaluating, observe, prepared
from fgai.checks import at_least, finite, one_of, whole
from fgai.checks import seed as check_seed
from fgai.divergence import tvd
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.topk import NORMS
from fgai.typed import typed

DIVERGENCES = ("probabilities", "logits")


@typed
@dataclass(frozen=True, eq=False)
class AttentionShift:
    """The strongest perturbations found of one layer's attention, everything else held fixed.

    Attributes:
        name: of the layer.
        delta: [E, H], the perturbation with the largest mean shift, as `fgai.attention.record` takes it.
        logits: [N], the largest total variation of the logits of every row at any perturbation tried.
        probabilities: [N], the same on probabilities; at most 1.
    """

    name: str
    delta: LayerAttention
    logits: Tensor
    probabilities: Tensor


@typed
@with_gradients
def attack_attention(
    model: nn.Module,
    data: Any,
    *,
    radius: float = 0.05,
    norm: str = "l1",
    divergence: str = "probabilities",
    steps: int = 20,
    seed: int = 0,
) -> tuple[AttentionShift, ...]:
    """Search each layer's attention ball for the perturbation that moves the predictions most.

        max D(y(w), y(w + δ))   over   ‖δ_i^h‖ ≤ R   for every node i and head h

    by projected gradient ascent: D is the total variation, averaged over nodes; w is one layer's attention
    before dropout, and w + δ takes its place without being normalised again. This is the adversary of the
    paper's Algorithm 1, which takes the output layer; here every layer is attacked, one at a time. It is a
    lower bound on the worst case; `fgai.certify_attention` has the upper one, exact where a layer's
    `class_status` is.

    Args:
        model: fgai's or any PyG attention model; run in evaluation mode and left as it was.
        data: a `Graph` or PyG `Data`.
        radius: R ≥ 0 of every node's ball; 0 moves nothing.
        norm: "l1", "l2" or "linf".
        divergence: climb the change of "probabilities" or of "logits"; both are reported.
        steps: of the ascent, each 2.5 R / steps long, from a random point; 0 tries that point alone.
        seed: of the random point.

    Returns:
        One `AttentionShift` per layer, in the order the layers ran.

    Raises:
        InputError: an argument out of range, or logits that are not finite.
        AttentionError: the model has no attention that can be recorded.

    Example:
        >>> import fgai
        >>> from fgai.attacks import attack_attention
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train(fgai.GAT.for_data(data), data, epochs=3, progress=False)
        >>> shift = attack_attention(model, data, radius=0.01)[-1]
        >>> certificate = fgai.certify_attention(model, data, radius=0.01).layer().prediction
        >>> bool((shift.logits <= certificate.alpha2_logits + 1e-6).all())
        True
    """
    at_least(radius, "radius", 0)
    whole(steps, "steps", 0, LARGEST)
    check_seed(seed)
    one_of(norm, "norm", NORMS)
    one_of(divergence, "divergence", DIVERGENCES)
    graph = prepared(model, as_graph(data))
    with evaluating(model, freeze=True):
        seen = observe(model, graph)
        finite(seen.logits, "the model's logits")
        ascend = partial(_ascend, model, graph, seen.logits, divergence, radius, norm, steps, seed)
        return tuple(ascend(layer, index) for index, layer in enumerate(seen.attention))


def _ascend(
    model: nn.Module,
    graph: Graph,
    clean: Tensor,
    climbed: str,
    radius: float,
    norm: str,
    steps: int,
    seed: int,
    layer: LayerAttention,
    index: int,
) -> AttentionShift:
    """Climb on one layer's attention from a random point; the best point seen is kept, the start included."""
    rowptr, values = layer.rowptr, layer.values
    options: dict[str, Any] = {"generator": torch.Generator().manual_seed(seed), "dtype": values.dtype}
    draws = [balls.random_point(rowptr, len(values), radius, norm, **options) for _ in range(layer.num_heads)]
    delta = torch.stack(draws, dim=1)
    best, best_value = delta, -1.0
    largest = dict.fromkeys(DIVERGENCES, clean.new_zeros(clean.shape[0]))
    for step in range(steps + 1):
        moving = delta.requires_grad_(step < steps)
        logits = observe(model, graph, grad=True, perturb={index: moving}).logits
        changes = {space: tvd(clean, logits, space) for space in DIVERGENCES}
        largest = {space: torch.maximum(largest[space], changes[space].detach()) for space in DIVERGENCES}
        value = changes[climbed].mean()
        if float(value.detach()) > best_value:
            best, best_value = delta, float(value.detach())
        if step < steps:
            (gradient,) = torch.autograd.grad(value, moving)
            moved = delta.detach() + balls.steepest(gradient, rowptr, 2.5 * radius / steps, norm)
            delta = balls.project(moved, rowptr, radius, norm)
    return AttentionShift(layer.name, layer.with_values(best.detach()), **largest)
