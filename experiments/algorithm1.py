"""Algorithm 1 of the paper as printed: δ and ρ climb in attention space inside every training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experiments.terms import DIVERGENCES, prediction_distance
from fgai import Graph
from fgai.attention import LayerAttention, evaluating, observe
from fgai.checks import above, one_of, whole
from fgai.ops import row_sum
from fgai.tasks import task_of
from fgai.topk import ranks_in_rows, topk_l1, topk_mask
from fgai.training import Draws, Recipe, TrainConfig, VanillaOutputs, epoch_seed

OVERSHOOT = 2.5
"""All steps together, in radii: enough to cross a ball from a random point and to turn on its surface."""


@dataclass(frozen=True, kw_only=True)
class AscentSettings:
    """Algorithm 1 as printed: weights, total variation of outputs, Adam; the last weights are kept."""

    closeness: float = 1.0  # weight, as the next three
    similarity: float = 1e5  # of the attention to the vanilla model's
    prediction_stability: float = 1.0  # under δ
    explanation_stability: float = 1e5  # under ρ
    divergence: str = "logits"  # of predictions, see `prediction_distance`
    # K of the graph-wide top-K; None for half the number of edges, as in all of its experiments
    k: int | None = None
    radius: float = 0.1  # of the balls; not printed, this is the level of its attack on features
    steps: int = 10  # of the ascents; not printed, these are those of its attack on features
    epochs: int = 200  # of the training
    lr: float = 0.01  # Adam's learning rate
    weight_decay: float = 5e-4  # l2 penalty

    def __post_init__(self) -> None:
        one_of(self.divergence, "divergence", DIVERGENCES)
        above(self.radius, "radius", 0.0)
        whole(self.steps, "steps", 1)

    @property
    def train(self) -> TrainConfig:
        """Of the loop, which validates at the last epoch alone."""
        return TrainConfig(
            epochs=self.epochs,
            lr=self.lr,
            weight_decay=self.weight_decay,
            patience=self.epochs,
            validate_every=self.epochs,
        )


Objective = Callable[[Tensor], Tensor]


class Ascent(Recipe):
    """The recipe of the paper's Algorithm 1, at the output layer.

        δ_p = Π(δ_{p−1} + γ ∇ D(y(w~), y(w~ + δ_{p−1})))      Π: nearest point with ‖δ_i‖₁ ≤ R at every node i
        ρ_q = Π(ρ_{q−1} + τ ∇ L(w~, w~ + ρ_{q−1}))
        w~ descends on  closeness + similarity + D(y(w~), y(w~ + δ*)) + L(w~, w~ + ρ*)

    Both start at random points of their balls in every epoch and take `steps` steps. γ and τ are such that
    every node moves by 2.5 R / steps along its own part of the gradient; the paper gives neither them nor the
    radius. Where it prints a minus sign (ρ in the algorithm) its text has a plus, and both climb here. δ has
    every head of a layer in a ball of its own; ρ is on the mean over heads, which is what L reads. No nodes
    are injected and there are no limits.

    L(w~, w~ + ρ) has no gradient in w~, for ρ is fixed when w~ moves: the term is shown and trains nothing
    (see docs/method.md).
    """

    name = "fgai-ascent"
    capturable = True

    def __init__(self, vanilla: nn.Module, graph: Graph, settings: AscentSettings) -> None:
        self.vanilla, self.graph, self.settings = vanilla, graph, settings
        self.k = settings.k or max(1, graph.num_edges // 2)
        self.seed = 0

    def start(self, model: nn.Module, seed: int) -> None:
        """Compute the vanilla outputs and see how many heads the output layer has."""
        self.seed = seed
        with evaluating(self.vanilla, freeze=True):
            self.vanilla_outputs = VanillaOutputs.of(self.vanilla, self.graph)
            attention = observe(self.vanilla, self.graph, ranked=False).attention
        self.layer, self.last = attention.last.detach(), len(attention) - 1
        self.rowptr = self.vanilla_outputs.rowptrs[-1]
        self.same = torch.tensor(self._stream(-2), device=self.graph.device)

    def losses(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield the clean terms, then both stability terms at the ends of the ascents."""
        return self.losses_from(model, self._draw(epoch).to(self.graph.device))

    def draw(self, epoch: int) -> Draws | None:
        """Return the seed of the random points."""
        return self._draw(epoch) if task_of(self.graph).fixed_graph else None

    def _draw(self, epoch: int) -> Draws:
        return Draws("step", {"seed": torch.tensor(self._stream(epoch))})

    def _stream(self, epoch: int) -> int:
        return epoch_seed(self.seed, epoch) ^ 0x5DEECE66D

    def losses_from(self, model: nn.Module, draws: Draws) -> Iterator[dict[str, Tensor]]:
        """Yield the same from draws on the device."""
        model.eval()
        yield self._weighted(self.clean(model))
        delta, rho = self.climbed(model, Hashed(draws.tensors["seed"]))
        yield self._weighted(self.stability(model, delta, rho))

    def score(self, model: nn.Module) -> float:
        """Return minus the total, its ascents from points that are the same in every epoch."""
        return float(self.score_tensor(model))

    def score_tensor(self, model: nn.Module) -> Tensor:
        """Return the score as a tensor."""
        delta, rho = self.climbed(model, Hashed(self.same))
        with evaluating(model), torch.no_grad():
            terms = {**self.clean(model), **self.stability(model, delta, rho)}
            return -self._weighted(terms)["total"]

    def _weighted(self, terms: dict[str, Tensor]) -> dict[str, Tensor]:
        total = sum(getattr(self.settings, name) * value for name, value in terms.items())
        return {**terms, "total": torch.as_tensor(total)}

    def clean(self, model: nn.Module) -> dict[str, Tensor]:
        """Return closeness and similarity."""
        logits, w = self._seen(model, grad=True)
        target = self.vanilla_outputs.attention[-1]
        return {
            "closeness": prediction_distance(self.vanilla_outputs.logits, logits, "logits"),
            "similarity": topk_l1(target, w, self.rowptr, self.k, "graph", form="paper"),
        }

    def _seen(self, model: nn.Module, *, grad: bool = False) -> tuple[Tensor, Tensor]:
        """Return the logits and the output layer's attention [E], averaged over the heads."""
        observation = observe(model, self.graph, heads="mean", grad=grad, ranked=False)
        return observation.logits, observation.attention.last.heads()

    def starts(self, generator: Hashed) -> tuple[Tensor, Tensor]:
        """Return a random δ [E, H] and ρ [E] inside their balls."""
        delta = self._random(self.layer, generator)
        return delta, self._random(self.vanilla_outputs.layers[-1], generator)[:, 0]

    def _random(self, layer: LayerAttention, generator: Hashed) -> Tensor:
        values, radius = layer.values, self.settings.radius
        points = [random_point(layer.rowptr, len(values), radius, generator) for _ in range(layer.num_heads)]
        return project(torch.stack(points, dim=1).to(values.dtype), layer.rowptr, radius)

    def climbed(self, model: nn.Module, generator: Hashed) -> tuple[Tensor, Tensor]:
        """Return δ* and ρ* as Algorithm 1 finds them from `starts`; we maximise."""
        delta, rho = self.starts(generator)
        with evaluating(model, freeze=True):
            logits, w = self._seen(model)
            delta = self._ascended(lambda point: self._moved(logits, self._logits(model, point)), delta)
            top = topk_mask(w, self.rowptr, self.k, "graph")
            rho = self._ascended(lambda point: self._reordered(w, point, top), rho)
        return delta, rho

    def stability(self, model: nn.Module, delta: Tensor, rho: Tensor) -> dict[str, Tensor]:
        """Return D(y(w~), y(w~ + δ)) and L(w~, w~ + ρ); gradients flow through both sides, as printed."""
        logits, w = self._seen(model, grad=True)
        return {
            "prediction_stability": self._moved(logits, self._logits(model, delta)),
            "explanation_stability": self._reordered(w, rho),
        }

    def _ascended(self, objective: Objective, point: Tensor) -> Tensor:
        return ascend(objective, point, self.rowptr, self.settings.radius, self.settings.steps)

    def _logits(self, model: nn.Module, delta: Tensor) -> Tensor:
        """Return the model's logits with δ added to the attention of the output layer."""
        options: Any = {"perturb": lambda layer, w, *_: w + delta if layer == self.last else w}
        return observe(model, self.graph, heads="mean", grad=True, ranked=False, **options).logits

    def _moved(self, clean: Tensor, perturbed: Tensor) -> Tensor:
        spread = self.vanilla_outputs.logit_spread
        return prediction_distance(clean, perturbed, self.settings.divergence, spread)

    def _reordered(self, w: Tensor, rho: Tensor, top: Tensor | None = None) -> Tensor:
        """Return L(w, w + ρ); `top` is the top-k of w, if it is known."""
        return topk_l1(w, w + rho, self.rowptr, self.k, "graph", form="paper", known=top)


def ascend(objective: Objective, point: Tensor, rowptr: Tensor, radius: float, steps: int) -> Tensor:
    """Return a point [E] or [E, H] after projected gradient ascent in the l1 ball of every node.

    Every step moves each node by 2.5 R / steps along its own part of the gradient, and back into its ball. A
    node without a gradient stays.
    """
    stride = OVERSHOOT * radius / steps
    for _ in range(steps):
        moving = point.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(objective(moving), moving)
        point = project(point.detach() + stride * _directions(gradient, rowptr), rowptr, radius)
    return point


def random_point(rowptr: Tensor, size: int, radius: float, generator: Hashed) -> Tensor:
    """Draw a point [size] uniformly from the l1 ball of every node, float64.

    Signed exponentials divided by their sum and one exponential more.
    """
    sign = torch.where(1 - generator.rand(size) > 0.5, 1.0, -1.0).double()
    part, rest = -torch.log1p(-generator.rand(size)), -torch.log1p(-generator.rand(len(rowptr) - 1))
    return sign * part * (radius / (row_sum(part, rowptr) + rest))[_row(rowptr, size)]


def project(points: Tensor, rowptr: Tensor, radius: float) -> Tensor:
    """Return the nearest points [E] or [E, H] in the l1 ball of every node (and head).

    sign(x) max(|x| - θ, 0) with θ = max(0, max_c (sum of the c largest |x| - R) / c).
    """
    if points.dim() > 1:
        return torch.stack([project(column, rowptr, radius) for column in points.unbind(1)], dim=1)
    row, size = _row(rowptr, len(points)), points.abs().double()
    first = rowptr[row]
    ordered = torch.zeros_like(size).scatter(0, first + ranks_in_rows(size, rowptr), size)
    sums = ordered.cumsum(0)
    count = torch.arange(1, len(size) + 1, device=size.device) - first
    excess = (sums - (sums - ordered)[first] - radius) / count
    threshold = _largest(excess, rowptr)[row].to(points.dtype)
    nearest = points - torch.minimum(torch.maximum(points, -threshold), threshold)
    length = row_sum(nearest.abs(), rowptr)
    return nearest * torch.where(length > radius, radius / length, 1.0)[row]  # the last rounding above R


def _directions(gradient: Tensor, rowptr: Tensor) -> Tensor:
    """Return the gradient [E] or [E, H], of length 1 at every node and head; zeros stay."""
    row, largest = _row(rowptr, len(gradient)), _largest(gradient.abs(), rowptr)
    scaled = gradient / torch.where(largest > 0, largest, 1.0)[row]  # squares neither overflow nor vanish
    return scaled / row_sum(scaled.square(), rowptr).sqrt().clamp(min=1)[row]


def _largest(values: Tensor, rowptr: Tensor) -> Tensor:
    """Return the largest value of every node, at least 0."""
    options: Any = {"offsets": rowptr, "axis": 0, "unsafe": True, "initial": 0.0}
    return torch.segment_reduce(values.contiguous(), "max", **options)


def _row(rowptr: Tensor, size: int) -> Tensor:
    nodes = torch.arange(len(rowptr) - 1, device=rowptr.device)
    return nodes.repeat_interleave(rowptr.diff(), output_size=size)


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


def _mixed(word: Tensor) -> Tensor:
    for by, factor in ROUNDS:
        word = (word ^ _shifted(word, by)) * factor
    return word ^ _shifted(word, 31)


def _shifted(word: Tensor, by: int) -> Tensor:
    """Right by so many bits, zeros from the left."""
    return (word >> by) & ((1 << (64 - by)) - 1)
