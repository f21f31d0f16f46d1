"""Algorithm 1 of the paper as printed: δ and ρ climb in attention space inside every training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from fgai.attacks import balls
from fgai.attacks.attention import random_delta
from fgai.attention import evaluating, observe, straight_through
from fgai.ops.capture import Hashed
from fgai.topk import topk_mask
from fgai.training.capture import Drawn, replayable
from fgai.training.faithful import Faithful
from fgai.training.lesson import set_mode
from fgai.training.ranges import set_ranges
from fgai.training.terms import attention_distance, prediction_distance

NORM = "l1"
"""Of the balls around the attention of every node, as in the paper."""
OVERSHOOT = 2.5
"""All steps together, in radii: enough to cross a ball from a random point and to turn on its surface."""

Objective = Callable[[Sequence[Tensor]], Tensor]


@replayable
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
        config: see `FaithfulConfig`; `steps` and `radius` are those of the ascents.
    """

    name = "fgai-ascent"

    def start(self, model: nn.Module, seed: int) -> None:
        """Freeze the vanilla targets and see how many heads each layer has."""
        super().start(model, seed)
        if self.config.limits:
            set_ranges(model, self.graph, self.config.tightness)
        with evaluating(self.vanilla, freeze=True):
            attention = observe(self.vanilla, self.graph, ranked=False).attention
        self.layers = attention.select(self.config.layers).detach()
        self.first = len(attention) - len(self.layers)
        self.same = torch.tensor(self._stream(-2), device=self.graph.device)

    def _drawn(self, epoch: int) -> Drawn:
        """What the clean terms need, and the seed of the random points."""
        drawn = super()._drawn(epoch)
        return Drawn(drawn.kind, {**drawn.tensors, "seed": torch.tensor(self._stream(epoch))})

    def replayed(self, model: nn.Module, drawn: Drawn) -> Iterator[dict[str, Tensor]]:
        """Yield the clean terms, then both stability terms at the ends of the ascents."""
        yield from super().replayed(model, drawn)
        delta, rho = self.climbed(model, Hashed(drawn.tensors["seed"]))
        set_mode(model, self.config.dropout)
        terms = self.stability(model, delta, rho)
        yield {**terms, "total": self.lesson.total(terms) * drawn.tensors["rise"]}

    def measure(self, model: nn.Module) -> Tensor:
        """Return minus the total, its ascents from points that are the same in every epoch."""
        clean = super().measure(model)
        delta, rho = self.climbed(model, Hashed(self.same))
        with evaluating(model), torch.no_grad():
            return clean - self.lesson.total(self.stability(model, delta, rho))

    def starts(self, generator: torch.Generator | Hashed) -> tuple[list[Tensor], list[Tensor]]:
        """Return a random δ [E, H] and ρ [E] of every layer that counts, inside their balls."""
        radius = self.config.radius
        delta = [random_delta(layer, radius, NORM, generator) for layer in self.layers]
        rho = [random_delta(layer, radius, NORM, generator) for layer in self.lesson.targets.layers]
        return delta, [one[:, 0] for one in rho]

    def climbed(
        self, model: nn.Module, generator: torch.Generator | Hashed
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return δ* and ρ* as Algorithm 1 finds them from `starts`; we maximise.

        Args:
            model: as it is now; only read.
            generator: of the starts.
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
        with straight_through(model):
            seen = observe(model, self.graph, heads="mean", grad=True, ranked=False)
        attention = [layer.heads() for layer in seen.attention.select(self.config.layers)]
        return {
            "prediction_stability": self._moved(seen.logits, self._logits(model, delta)),
            "explanation_stability": self._reordered(attention, rho),
        }

    def _ascended(self, objective: Objective, points: Sequence[Tensor]) -> list[Tensor]:
        return ascend(objective, points, self.lesson.targets.rowptrs, self.config.radius, self.config.steps)

    def _logits(self, model: nn.Module, delta: Sequence[Tensor]) -> Tensor:
        """The model's logits with δ added to the attention of the layers that count."""
        perturb = {self.first + index: one for index, one in enumerate(delta)}
        with straight_through(model):
            return observe(model, self.graph, heads="mean", grad=True, ranked=False, perturb=perturb).logits

    def _moved(self, clean: Tensor, perturbed: Tensor) -> Tensor:
        return prediction_distance(clean, perturbed, self.config.divergence, self.lesson.targets.scale)

    def _reordered(
        self, attention: Sequence[Tensor], rho: Sequence[Tensor], known: Sequence[Tensor] | None = None
    ) -> Tensor:
        """L(w, w + ρ); `known` are the top-k of w, where they were found before."""
        config, moved = self.config, [w + one for w, one in zip(attention, rho, strict=True)]
        return attention_distance(
            attention,
            moved,
            self.lesson.targets.rowptrs,
            config.k2,
            config.scope,
            known=known,
            form=config.form,
        )


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
