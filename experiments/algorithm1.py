"""Algorithm 1 of the paper as printed: δ and ρ climb in attention space inside every training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import pi
from typing import Any

import torch
from torch import Tensor, nn

from fgai import Graph, InputError
from fgai.attacks import balls
from fgai.attention import LayerAttention, evaluating, observe
from fgai.topk import topk_l1, topk_mask
from fgai.training import Drawn, Faithful, FaithfulConfig, prediction_distance

NORM = "l1"
"""Of the balls around the attention of every node, as in the paper."""
OVERSHOOT = 2.5
"""All steps together, in radii: enough to cross a ball from a random point and to turn on its surface."""
OUTPUT_LAYER: dict[str, Any] = {"layers": "last", "scope": "graph", "limits": False}
"""The paper explains by the output layer, and by the top K of the whole graph."""
PRINTED: dict[str, Any] = {
    "form": "paper",
    "divergence": "logits",
    "closeness_by": "logits",
    "similarity": 1e5,
    "prediction_stability": 1.0,
    "explanation_stability": 1e5,
    "ramp": 0.0,
    "radius": 0.1,
    "steps": 10,
    "epochs": 200,
    "lr": 0.01,
    "weight_decay": 5e-4,
    "decay": 0.0,
    "validate_every": 10_000,
}
"""Algorithm 1 as printed: its weights, total variation of outputs, Adam's settings, the last weights kept.
Radius and steps are not printed: these are the level and the steps of its attack on features."""

Objective = Callable[[Sequence[Tensor]], Tensor]


class Ascent(Faithful):
    """The recipe of the paper's Algorithm 1.

        δ_p = Π(δ_{p−1} + γ ∇ D(y(w~), y(w~ + δ_{p−1})))      Π: nearest point with ‖δ_i‖₁ ≤ R at every node i
        ρ_q = Π(ρ_{q−1} + τ ∇ L(w~, w~ + ρ_{q−1}))
        w~ descends on  closeness + similarity + D(y(w~), y(w~ + δ*)) + L(w~, w~ + ρ*)

    Both start at random points of their balls in every epoch and take `steps` steps. γ and τ are such that
    every node moves by 2.5 R / steps along its own part of the gradient; the paper gives neither them nor the
    radius. Where it prints a minus sign (ρ in the algorithm) its text has a plus, and both climb here. δ has
    every head of a layer in a ball of its own; ρ is on the mean over heads, which is what L reads.

    L(w~, w~ + ρ) has no gradient in w~, for ρ is fixed when w~ moves: the term is shown and trains nothing
    (see docs/method.md).

    Args:
        vanilla: trained; only read.
        graph: prepared for it.
        config: see `FaithfulConfig`; `steps` and `radius` are those of the ascents. No nodes are injected
            and the margin is not trained.

    Raises:
        InputError: the config has limits, which Algorithm 1 does not know.
    """

    name = "fgai-ascent"
    capturable = True

    def __init__(self, vanilla: nn.Module, graph: Graph, config: FaithfulConfig) -> None:
        if config.limits:
            raise InputError("Algorithm 1 trains without limits, give `limits=False`")
        super().__init__(vanilla, graph, config.replace(adversary="attention", margin=0.0))

    def start(self, model: nn.Module, seed: int) -> None:
        """Freeze the vanilla targets and see how many heads each layer has."""
        super().start(model, seed)
        with evaluating(self.vanilla, freeze=True):
            attention = observe(self.vanilla, self.graph, ranked=False).attention
        self.layers = attention.select(self.config.layers).detach()
        self.first = len(attention) - len(self.layers)
        self.same = torch.tensor(self.stream(-2), device=self.graph.device)

    def drawn(self, epoch: int) -> Drawn:
        """Return the draws of the clean terms, and the seed of the random points."""
        drawn = super().drawn(epoch)
        return Drawn(drawn.kind, {**drawn.tensors, "seed": torch.tensor(self.stream(epoch))})

    def replayed(self, model: nn.Module, drawn: Drawn) -> Iterator[dict[str, Tensor]]:
        """Yield the clean terms, then both stability terms at the ends of the ascents."""
        yield from super().replayed(model, drawn)
        delta, rho = self.climbed(model, Hashed(drawn.tensors["seed"]))
        terms = self.stability(model, delta, rho)
        yield {**terms, "total": self.lesson.total(terms) * drawn.tensors["rise"]}

    def measure(self, model: nn.Module) -> Tensor:
        """Return minus the total, its ascents from points that are the same in every epoch."""
        clean = super().measure(model)
        delta, rho = self.climbed(model, Hashed(self.same))
        with evaluating(model), torch.no_grad():
            return clean - self.lesson.total(self.stability(model, delta, rho))

    def starts(self, generator: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Return a random δ [E, H] and ρ [E] of every layer that counts, inside their balls."""
        delta = [self._random(layer, generator) for layer in self.layers]
        rho = [self._random(layer, generator) for layer in self.lesson.targets.layers]
        return delta, [one[:, 0] for one in rho]

    def _random(self, layer: LayerAttention, generator: Any) -> Tensor:
        values, radius = layer.values, self.config.radius
        options: dict[str, Any] = {"generator": generator, "dtype": values.dtype}
        heads = range(layer.num_heads)
        points = [balls.random_point(layer.rowptr, len(values), radius, NORM, **options) for _ in heads]
        return torch.stack(points, dim=1)

    def climbed(self, model: nn.Module, generator: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Return δ* and ρ* as Algorithm 1 finds them from `starts`; we maximise.

        Args:
            model: as it is now; only read.
            generator: of the starts, see `fgai.attacks.balls.random_point`.
        """
        delta, rho = self.starts(generator)
        with evaluating(model, freeze=True):
            clean = observe(model, self.graph, heads="mean", ranked=False)
            attention = [layer.heads() for layer in clean.attention.select(self.config.layers)]
            delta = self._ascended(lambda at: self._moved(clean.logits, self._logits(model, at)), delta)
            rows = zip(attention, self.lesson.targets.rowptrs, strict=True)
            known = [topk_mask(w, ptr, self.config.k2, self.config.scope) for w, ptr in rows]
            rho = self._ascended(lambda at: self._reordered(attention, at, known), rho)
        return delta, rho

    def stability(
        self, model: nn.Module, delta: Sequence[Tensor], rho: Sequence[Tensor]
    ) -> dict[str, Tensor]:
        """Return D(y(w~), y(w~ + δ)) and L(w~, w~ + ρ); gradients flow through both sides, as printed."""
        seen = observe(model, self.graph, heads="mean", grad=True, ranked=False)
        attention = [layer.heads() for layer in seen.attention.select(self.config.layers)]
        return {
            "prediction_stability": self._moved(seen.logits, self._logits(model, delta)),
            "explanation_stability": self._reordered(attention, rho, [None] * len(rho)),
        }

    def _ascended(self, objective: Objective, points: Sequence[Tensor]) -> list[Tensor]:
        return ascend(objective, points, self.lesson.targets.rowptrs, self.config.radius, self.config.steps)

    def _logits(self, model: nn.Module, delta: Sequence[Tensor]) -> Tensor:
        """Return the model's logits with δ added to the attention of the layers that count."""
        perturb = {self.first + index: one for index, one in enumerate(delta)}
        return observe(model, self.graph, heads="mean", grad=True, ranked=False, perturb=perturb).logits

    def _moved(self, clean: Tensor, perturbed: Tensor) -> Tensor:
        return prediction_distance(clean, perturbed, self.config.divergence, self.lesson.targets.scale)

    def _reordered(
        self, attention: Sequence[Tensor], rho: Sequence[Tensor], known: Sequence[Tensor | None]
    ) -> Tensor:
        """Return L(w, w + ρ) summed over layers; `known` are the top-k of w, where they were found before."""
        config, total = self.config, attention[0].new_zeros(())
        for w, one, ptr, top in zip(attention, rho, self.lesson.targets.rowptrs, known, strict=True):
            total = total + topk_l1(w, w + one, ptr, config.k2, config.scope, form=config.form, known=top)
        return total


def ascend(
    objective: Objective, points: Sequence[Tensor], rowptrs: Sequence[Tensor], radius: float, steps: int
) -> list[Tensor]:
    """Projected gradient ascent in the l1 balls of every node; we maximise.

    Every step moves each node by 2.5 R / steps along its own part of the gradient, and back into its ball. A
    node without a gradient stays.

    Args:
        objective: of the points; only its gradient is used.
        points: per layer [E] or [E, H], where to begin.
        rowptrs: per layer [N + 1].
        radius: R of the balls.
        steps: how many.

    Returns:
        Where the last step ended, inside the balls.
    """
    stride, found = OVERSHOOT * radius / steps, list(points)
    for _ in range(steps):
        moving = [point.detach().requires_grad_() for point in found]
        gradients = torch.autograd.grad(objective(moving), moving)
        found = [
            balls.project(at.detach() + balls.steepest(along, rows, stride, "l2"), rows, radius, NORM)
            for at, along, rows in zip(moving, gradients, rowptrs, strict=True)
        ]
    return found


STEP = -7046029254386353131
"""Between the states of neighbouring numbers: 2⁶⁴ over the golden ratio, made odd, as a signed word."""
ROUNDS = ((30, -4658895280553007687), (27, -7723592293110705685))
"""SplitMix64: xor with the word shifted right by so much, then multiply."""


class Hashed:
    """A stream of random numbers in place of a `torch.Generator`.

    A generator on the CPU draws the same numbers for every device but has to send them there; one on the
    device draws others, and its place in a captured step is shared with dropout. Here number n of the stream
    is a hash of seed and n, computed where the seed is.

    Args:
        seed: one int64 on the device where numbers are wanted; may change from replay to replay.
    """

    def __init__(self, seed: Tensor) -> None:
        self.seed, self.drawn = seed, 0

    def rand(self, size: int) -> Tensor:
        """Return the next numbers, uniform in [0, 1), float64."""
        first, self.drawn = self.drawn + 1, self.drawn + size
        places = torch.arange(first, first + size, device=self.seed.device)
        word = _mixed(_mixed(self.seed) + places * STEP)
        return _shifted(word, 11).double() * 2.0**-53

    def randn(self, size: int) -> Tensor:
        """Return the next numbers, normal, float64."""
        radius = (-2 * torch.log1p(-self.rand(size))).sqrt()
        return radius * torch.cos(2 * pi * self.rand(size))


def _mixed(word: Tensor) -> Tensor:
    for by, factor in ROUNDS:
        word = (word ^ _shifted(word, by)) * factor
    return word ^ _shifted(word, 31)


def _shifted(word: Tensor, by: int) -> Tensor:
    """Right by so many bits, zeros from the left."""
    return (word >> by) & ((1 << (64 - by)) - 1)
