"""Loss terms of faithful training, the decorator `term` for your own, and the argument of a term.

To add a built-in term: a function under `@term`, its name in `BUILT_IN`, its weight in `FaithfulSettings`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from fgai.attention import LayerAttention, observe
from fgai.bounds.scores import worst_margins
from fgai.cache import cached_on
from fgai.checks import at_least, one_of
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.metrics import UNIFORM_SHARPNESS
from fgai.tasks import task_of
from fgai.topk import swap_margin, topk_l1, topk_mask
from fgai.training.settings import FaithfulSettings
from fgai.typed import typed

GRAPHS = ("clean", "attacked")  # graphs that a term can be computed on
RESERVED = ("total", "score")  # names that the history of a training uses for something else
MIN_SHARPNESS = 0.95  # share of the vanilla sharpness below which attention counts as too flat
NEW_NEIGHBOURS = 1  # injected neighbours of each node in the bound of `certified`
MIN_MARGIN, MARGIN_WIDTH = 0.1, 0.3
"""Of `certified`: worst-case margin to reach and width of the sigmoid, in units of `logit_spread`."""
MIN_CONTRAST = 0.01  # least relative contrast; flatter layers are uniform up to rounding errors


class Reach(NamedTuple):
    """Shares of a graph that injected nodes can change."""

    layers: list[float]  # share of the nodes, per layer
    predictions: float  # share of the nodes, links or small graphs


@dataclass(frozen=True, eq=False)
class VanillaOutputs:
    """Outputs of the vanilla model on the clean graph: N nodes, or seeds of a mini-batch, and E edges."""

    logits: Tensor  # [N, C]
    classes: Tensor  # predicted classes; in a mini-batch those of all its nodes, not of seeds alone
    layers: tuple[LayerAttention, ...]  # on all edges, also in a mini-batch
    attention: list[Tensor]  # per layer [E], averaged over heads
    ranking: list[Tensor]  # per layer [E], larger for neighbours that explain more
    rowptrs: list[Tensor]  # per layer [N + 1]
    contrasts: list[float]  # per layer, the unit of `similarity`, see `relative_contrasts`
    sharpness: list[float]  # per layer
    logit_spread: float  # unit of changes of logits, see `spread`
    depths: list[int]  # per layer, see `AttentionMap.depths`

    @classmethod
    def of(cls, vanilla: nn.Module, graph: Graph) -> VanillaOutputs:
        """Run a trained model in eval mode on a graph that was prepared for it."""
        observation = observe(vanilla, graph, heads="mean")
        logits, layers = observation.logits, observation.attention.layers
        values = [layer.heads() for layer in layers]
        pairs = list(zip(values, layers, strict=True))
        sharpness = [float(layer_sharpness(w, layer.rowptr, layer.destination)) for w, layer in pairs]
        contrasts = [contrast(w, layer.rowptr) for w, layer in pairs]
        return cls(
            logits=logits,
            classes=logits.argmax(1),
            layers=tuple(layers),
            attention=values,
            ranking=[layer.ranking() for layer in layers],
            rowptrs=[layer.rowptr for layer in layers],
            contrasts=relative_contrasts(contrasts),
            sharpness=sharpness,
            logit_spread=float(spread(logits)),
            depths=observation.attention.depths,
        )

    def top_k(self, k: int) -> list[Tensor]:
        """The top-k neighbours of every node, per layer bool [E]; computed once."""
        layers = zip(self.ranking, self.rowptrs, strict=True)
        return cached_on(self, ("fgai.training.terms", k), lambda: [topk_mask(*layer, k) for layer in layers])

    def reach(self, graph: Graph, attacked: Graph) -> Reach:
        """Return the shares that injected nodes can change: each layer carries them one edge further."""
        count = self.rowptrs[0].numel() - 1
        source, destination = attacked.adjacency.source, attacked.adjacency.destination
        reached = torch.arange(attacked.num_nodes, device=attacked.device) >= graph.num_nodes
        shares = []
        for _ in range(max(self.depths) + 1):
            reached[destination[reached[source]]] = True
            shares.append(max(float(reached[:count].float().mean()), 1.0 / count))
        rows = task_of(graph).rows_predicted_from(graph, reached[: graph.num_nodes])
        rows = rows[:count] if count < graph.num_nodes else rows
        predictions = max(float(rows.float().mean()), 1.0 / rows.numel())
        return Reach([shares[depth] for depth in self.depths], predictions)


def spread(logits: Tensor) -> Tensor:
    """Mean over nodes of `½ Σ_c |y_c − mean_c y|`: the unit of changes of logits."""
    return (logits - logits.mean(1, keepdim=True)).abs().sum(1).mean().clamp(min=1e-12) / 2


def contrast(w: Tensor, rowptr: Tensor) -> float:
    """Mean over nodes of the total variation of an attention [E] to a uniform one."""
    degree = rowptr.diff()
    uniform = (1.0 / degree.clamp(min=1).to(w.dtype)).repeat_interleave(degree)
    return max(float((w - uniform).abs().sum() / 2 / max(1, degree.numel())), 1e-7)


def relative_contrasts(contrasts: list[float]) -> list[float]:
    """Contrasts per layer, divided by the largest."""
    return [max(value / max(contrasts), MIN_CONTRAST) for value in contrasts]


def layer_sharpness(w: Tensor, rowptr: Tensor, destination: Tensor) -> Tensor:
    """`fgai.metrics.sharpness` of an attention [E] that sums to 1 at every node; differentiable."""
    degree = rowptr.diff().to(w.dtype)
    counted = degree >= 2
    size = degree.clamp(min=2)
    divergence = w * (w.clamp(min=torch.finfo(w.dtype).tiny) * size[destination]).log()
    per_node = torch.zeros_like(degree).index_add(0, destination, divergence) / size.log()
    return torch.where(counted, per_node, 0.0).sum() / counted.sum().clamp(min=1)


@dataclass(frozen=True, eq=False)
class StepContext:
    """The argument of a loss term: the model, its outputs and the vanilla model's in one training step.

    N counts the rows: nodes, links or small graphs, or the seeds of a mini-batch. E counts the edges, in a
    mini-batch those into seeds. Attention is per layer, averaged over heads.

    Attributes:
        model: the model that is trained.
        graph: the clean graph or mini-batch, prepared for the model.
        vanilla_outputs: of the vanilla model, see `VanillaOutputs`.
        settings: see `FaithfulSettings`.
        logits: [N, C] on the clean graph; detached in attacked terms, vanilla's in attacked-only epochs.
        layers: attention on the clean graph, per layer; likewise detached or vanilla's.
        ramp: factor of the attacked terms; rises from 0 to 1 during the training.
        attacked_logits: [N, C] under attack; attacked terms only.
        attacked_attention: per layer [E], on the clean edges, if some attacked term `needs_attention`.
        reach: shares of the rows that the injected nodes can change; attacked terms only.
        has_explanations: whether `explanations` can be computed from `layers`.
    """

    model: nn.Module
    graph: Graph
    vanilla_outputs: VanillaOutputs
    settings: FaithfulSettings
    logits: Tensor
    layers: Sequence[LayerAttention]
    ramp: Tensor | float = 1.0
    attacked_logits: Tensor | None = None
    attacked_attention: Sequence[Tensor] | None = None
    reach: Reach | None = None
    has_explanations: bool = True

    @cached_property
    def attention(self) -> list[Tensor]:
        """Per layer [E], on the clean graph."""
        return self._of_seeds([layer.heads() for layer in self.layers])

    @cached_property
    def explanations(self) -> list[Tensor]:
        """Per layer [E], the explanation vector; `InputError` if no term declared `needs_explanation`."""
        if not self.has_explanations:
            raise InputError(
                "`context.explanations` was not recorded; declare the loss term with `needs_explanation=True`"
            )
        return self._of_seeds([layer.heads("log") for layer in self.layers])

    @property
    def outputs(self) -> Tensor:
        """Return `attacked_logits` in attacked terms, else `logits`."""
        return self.logits if self.attacked_logits is None else self.attacked_logits

    @property
    def has_gradient(self) -> bool:
        """Whether logits and attention have a gradient; the attention of a GCN without gates has none."""
        clean = [layer.values for layer in self.layers]
        attention = clean if self.attacked_logits is None else self.attacked_attention or ()
        return all(value.requires_grad for value in (self.outputs, *attention))

    def _of_seeds(self, values: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(values, self.vanilla_outputs.attention, strict=True)
        return [first_rows(w, vanilla) for w, vanilla in pairs]


class Term(NamedTuple):
    """A loss term, see `term`; `name` is that of the function, and of a built-in term's setting."""

    name: str
    loss: Callable[[StepContext], Tensor]
    on: str
    weight: float
    needs_attention: bool = False
    needs_explanation: bool = False
    own_pass: bool = False

    @typed
    def __call__(self, context: StepContext) -> Tensor:
        """Return the value; `InputError` if it is no scalar tensor, or lacks a gradient that a step needs."""
        value = self.loss(context)
        if not isinstance(value, Tensor) or value.dim() > 0:
            shape = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise InputError(f"the loss term `{self.name}` must return a scalar tensor, got {shape}")
        if torch.is_grad_enabled() and context.has_gradient and not value.requires_grad:
            raise InputError(
                f"the loss term `{self.name}` must depend on the model's outputs, got a value without a"
                " gradient; compute it from the logits or the attention of the context"
            )
        return value


@typed
def term(
    *,
    on: str,
    weight: float = 1.0,
    needs_attention: bool = False,
    needs_explanation: bool = False,
    own_pass: bool = False,
) -> Callable[[Callable[[StepContext], Tensor]], Term]:
    """Declare a loss term of `make_faithful(..., terms=[...])`; a decorator.

    It is computed `on` the `clean` graph, or the `attacked` one with injected nodes. One with the name of a
    built-in term replaces it, with the weight in `FaithfulSettings`. Those that read
    `context.attacked_attention` need `needs_attention=True`, those that read `context.explanations`
    `needs_explanation=True`. A clean term with `own_pass` runs the model itself; it is back-propagated
    separately to save memory.

    Raises:
        InputError: another graph, a negative weight, or a flag that does not go with the graph.

    Example:
        >>> @term(on="clean", weight=0.1)
        ... def small_logits(context):
        ...     return context.logits.square().mean()
        >>> small_logits.name, small_logits.weight
        ('small_logits', 0.1)
    """
    one_of(on, "on", GRAPHS)
    at_least(weight, "weight", 0.0)
    if own_pass and on != "clean":
        raise InputError('`own_pass` is for terms on the clean graph, got on="attacked"; leave it out')
    if needs_attention and on != "attacked":
        raise InputError(
            '`needs_attention` is for terms on the attacked graph, got on="clean"; leave it out, as'
            " `context.attention` needs no declaration"
        )

    def declare(loss: Callable[[StepContext], Tensor]) -> Term:
        return Term(loss.__name__, loss, on, weight, needs_attention, needs_explanation, own_pass)

    return declare


@dataclass(frozen=True)
class WeightedTerms:
    """The terms of a training with a weight above zero, in the order of computation."""

    weights: dict[Term, float]

    def select(self, on: str, *, own_pass: bool = False) -> list[Term]:
        """Return the terms of one graph, those with or without a pass of their own."""
        return [term for term in self.weights if term.on == on and term.own_pass == own_pass]

    @property
    def need_attention(self) -> bool:
        """Whether some term declared `needs_attention`."""
        return any(term.needs_attention for term in self.weights)

    @property
    def need_explanation(self) -> bool:
        """Whether some term declared `needs_explanation`."""
        return any(term.needs_explanation for term in self.weights)

    def loss(self, terms: Iterable[Term], context: StepContext) -> dict[str, Tensor]:
        """Return the values of some terms by name, and their weighted sum as `total`."""
        values = {term: term(context) for term in terms}
        if not values:
            return {"total": context.outputs.sum() * 0}
        total = sum_scalars(list(values.values()), [self.weights[term] for term in values])
        return {**{term.name: value for term, value in values.items()}, "total": total}


def sum_scalars(values: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
    """Return `Σ weight · value`, with one GPU kernel per value and without stacking them."""
    weights = [1.0] * len(values) if weights is None else weights
    total = values[0] if weights[0] == 1 else weights[0] * values[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = torch.add(total, value, alpha=weight)
    return total


def first_rows(values: Tensor, like: Tensor) -> Tensor:
    """Return the first `len(like)` rows; `values` itself if these are all, as slices copy in backward."""
    return values if len(values) == len(like) else values[: len(like)]


def _kl_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """Mean over rows of KL(softmax reference ‖ softmax logits)."""
    return kl_div(logits.log_softmax(1), reference.log_softmax(1), reduction="batchmean", log_target=True)


@term(on="clean")
def closeness(context: StepContext) -> Tensor:
    """KL(vanilla ‖ faithful) of the class probabilities, averaged over rows."""
    return _kl_divergence(context.vanilla_outputs.logits, context.logits)


@term(on="clean", needs_explanation=True)
def similarity(context: StepContext) -> Tensor:
    """Distance to the vanilla model's attention, and how far vanilla's top-k fall below the model's own.

    Σ over layers of mean over nodes of `½ Σ_j |w_j − w̃_j| / contrast`, plus mean over nodes with more than k
    neighbours of `(1/k) Σ_{j in T} relu(θ − ā_j) / θ`. T is the vanilla top-k, ā the explanation, θ its k-th
    largest entry, a constant. Dividing by the contrast makes almost uniform layers count.
    """
    vanilla, k = context.vanilla_outputs, context.settings.k
    layers = zip(vanilla.attention, context.attention, vanilla.rowptrs, vanilla.contrasts, strict=True)
    distances = [topk_l1(a, b, rowptr, None, factor=1 / contrast) for a, b, rowptr, contrast in layers]
    ranked = zip(context.explanations, vanilla.top_k(k), vanilla.rowptrs, context.layers, strict=True)
    shortfalls = [
        _below_threshold(w, top, rowptr, first_rows(layer.destination, w), k)
        for w, top, rowptr, layer in ranked
    ]
    return sum_scalars([*distances, *shortfalls])


def _below_threshold(w: Tensor, top: Tensor, rowptr: Tensor, destination: Tensor, k: int) -> Tensor:
    """Mean of `(1/k) Σ_{j in T} relu(θ − w_j) / θ` over nodes with more than k neighbours; `top` [E] is T."""
    values, degree = w.detach(), rowptr.diff()
    members = torch.where(topk_mask(values, rowptr, k), values, torch.inf)
    least = torch.full_like(degree, torch.inf, dtype=w.dtype).scatter_reduce(0, destination, members, "amin")
    counted = degree > k
    threshold = least.clamp(min=torch.finfo(w.dtype).tiny, max=1.0)[destination]
    below = (threshold - w).clamp(min=0) / threshold * (top & counted[destination])
    return below.sum() / (k * counted.sum().clamp(min=1))


@term(on="clean", needs_explanation=True)
def margin(context: StepContext) -> Tensor:
    """How far the top-k of the explanation is from a certificate at radius R; 0 if every node has one.

        Σ over layers of mean over nodes with more than k neighbours and over m of relu(R − c(m) / m) / R

    with `c(m)` the l1 cost of swapping m members. Unlike the literal worst case in attention space, which has
    no gradient in the attention (docs/method.md), it pulls members and outsiders of the top-k apart.
    """
    k, radius, rowptrs = context.settings.k, context.settings.radius, context.vanilla_outputs.rowptrs
    layers = zip(context.explanations, rowptrs, strict=True)
    return sum_scalars([swap_margin(w, rowptr, k, radius) for w, rowptr in layers])


def _flatness_loss(context: StepContext) -> Tensor:
    """Σ over layers of `relu(0.95 − sharpness / vanilla sharpness)`; 0 where no layer is flatter."""
    vanilla = context.vanilla_outputs
    layers = zip(context.attention, vanilla.rowptrs, context.layers, strict=True)
    now = [layer_sharpness(w, rowptr, first_rows(layer.destination, w)) for w, rowptr, layer in layers]
    return _sharpness_loss(now, vanilla.sharpness)


def _sharpness_loss(now: Sequence[Tensor], before: Sequence[float]) -> Tensor:
    """Layers that the vanilla model leaves flat (sharpness up to 1e-6) do not count."""
    return sum_scalars(
        [
            (MIN_SHARPNESS - new / old).clamp(min=0) if old > UNIFORM_SHARPNESS else new * 0
            for new, old in zip(now, before, strict=True)
        ]
    )


# A `Term` by hand: `fgai.metrics` has the public function `sharpness`.
sharpness = Term("sharpness", _flatness_loss, on="clean", weight=1.0)


@term(on="attacked")
def prediction_stability(context: StepContext) -> Tensor:
    """KL(clean ‖ attacked) of the class probabilities, mean over rows in reach; clean logits are detached."""
    assert context.attacked_logits is not None and context.reach is not None
    return _kl_divergence(context.logits, context.attacked_logits) / context.reach.predictions


@term(on="clean", weight=4.0, own_pass=True)
def certified(context: StepContext) -> Tensor:
    """Mean over nodes of `sigmoid((0.1 − worst-case margin / spread) / 0.3)`; needs limits.

    A smooth count of nodes without a certificate against injection. The attention mass of new neighbours
    rises with the ramp: at full size from the start no class would have a certificate, nor a gradient.
    """
    settings, vanilla = context.settings, context.vanilla_outputs
    margins = worst_margins(
        context.model,
        context.graph,
        vanilla.classes,
        neighbours=NEW_NEIGHBOURS,
        clip_share=settings.clip_share,
        shrink=settings.shrink,
        mass_share=context.ramp,
    )
    return _uncertified_share(first_rows(margins, vanilla.logits), vanilla.logit_spread)


def _uncertified_share(margins: Tensor, logit_spread: float) -> Tensor:
    return torch.sigmoid((MIN_MARGIN - margins.amin(1) / logit_spread) / MARGIN_WIDTH).mean()


BUILT_IN = (closeness, similarity, margin, sharpness, prediction_stability)  # their weights are settings


def weighted_terms(settings: FaithfulSettings, extra: Sequence[Term] = ()) -> WeightedTerms:
    """Return the built-in terms and a user's, which replace built-in ones of the same name.

    `InputError` for a name that is reserved or used twice, or if all weights are 0.
    """
    own = {each.name: each for each in extra}
    for name in own:
        if name in RESERVED:
            raise InputError(f"a loss term cannot be named {name!r}; rename the function")
    if len(own) < len(extra):
        raise InputError(f"`terms` must have different names, got {', '.join(each.name for each in extra)}")
    built_in = {each.name: each for each in BUILT_IN}
    active = {}
    for name, each in {**built_in, **own}.items():
        weight = getattr(settings, name) if name in built_in else each.weight
        if weight > 0:
            active[each] = weight
    if not active:
        raise InputError("all weights are zero: there is nothing to train; give one a positive value")
    return WeightedTerms(active)
