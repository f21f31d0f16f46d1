"""Loss terms: the decorator `term`, its argument `StepContext`, and weighted sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from fgai.attention import LayerAttention
from fgai.checks import at_least, one_of
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.training.settings import FaithfulSettings
from fgai.training.vanilla_outputs import Reach, VanillaOutputs
from fgai.typed import typed

GRAPHS = ("clean", "attacked")
"""Values of `on`: the graph that a term is computed on."""
RESERVED = ("total", "score")
"""Names that the history of a training uses for something else."""


@dataclass(frozen=True, eq=False)
class StepContext:
    """The argument of a loss term: the model, its outputs and the vanilla model's in one training step.

    N counts the rows: nodes, links or small graphs, or the seeds of a mini-batch. E counts the edges, in a
    mini-batch those into seeds. Attention is per layer, averaged over heads.

    Attributes:
        model: in training.
        graph: the clean graph or mini-batch, prepared for the model.
        vanilla_outputs: logits, attention and so on of the vanilla model, see `VanillaOutputs`.
        settings: see `FaithfulSettings`.
        logits: [N, C] of the model on the clean graph. Attacked terms get it detached; in attacked-only
            epochs it is the vanilla model's output.
        layers: attention of the model on the clean graph, per layer; detached or vanilla as `logits` is.
        ramp: factor of the attacked terms, which rises from 0 to 1 during the training.
        attacked_logits: [N, C] under attack; attacked terms only.
        attacked_attention: per layer [E], on the edges of the clean graph; attacked terms only, if some term
            declared `needs_attention`.
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
        return self._into_seeds([layer.heads() for layer in self.layers])

    @cached_property
    def explanations(self) -> list[Tensor]:
        """Per layer [E], the explanation vector; for terms that declared `needs_explanation`.

        Raises:
            InputError: no term declared it, so only the mean over heads was recorded.
        """
        if not self.has_explanations:
            raise InputError(
                "`context.explanations` was not recorded; declare the loss term with `needs_explanation=True`"
            )
        return self._into_seeds([layer.heads("log") for layer in self.layers])

    @property
    def outputs(self) -> Tensor:
        """The logits that a gradient flows through."""
        return self.logits if self.attacked_logits is None else self.attacked_logits

    @property
    def has_gradient(self) -> bool:
        """Whether logits and attention have a gradient; the attention of a GCN without gates has none."""
        clean = [layer.values for layer in self.layers]
        attention = clean if self.attacked_logits is None else self.attacked_attention or ()
        return all(value.requires_grad for value in (self.outputs, *attention))

    def _into_seeds(self, values: Sequence[Tensor]) -> list[Tensor]:
        pairs = zip(values, self.vanilla_outputs.attention, strict=True)
        return [first_rows(w, vanilla) for w, vanilla in pairs]


class Term(NamedTuple):
    """A loss term.

    Attributes:
        name: of the function, and of the setting that holds a built-in term's weight.
        loss: the function.
        on: `clean` or `attacked`, the graph that it is computed on.
        weight: ignored if the term is, or replaces, a built-in one, whose weight is a setting.
        needs_attention: an attacked term reads the attention under attack.
        needs_explanation: the term reads the explanation vectors.
        own_pass: a clean term that runs the model itself; it is back-propagated separately to save memory.
    """

    name: str
    loss: Callable[[StepContext], Tensor]
    on: str
    weight: float
    needs_attention: bool = False
    needs_explanation: bool = False
    own_pass: bool = False

    @typed
    def __call__(self, context: StepContext) -> Tensor:
        """Return the value of the term.

        Raises:
            InputError: it is not a scalar tensor, or has no gradient in a step that needs one.
        """
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

    Args:
        on: `clean`, or `attacked` for the graph with injected nodes.
        weight: of the term; one that replaces a built-in term has the weight of the setting.
        needs_attention: an attacked term reads `context.attacked_attention`.
        needs_explanation: the term reads `context.explanations`.
        own_pass: a clean term that runs the model itself.

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
    """The terms of a training with a weight above zero, and their weighted sum.

    Attributes:
        weights: by term, in the order of computation.
    """

    weights: dict[Term, float]

    def select(self, on: str, *, own_pass: bool = False) -> list[Term]:
        """Return the terms of one graph, those with or those without a pass of their own."""
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
    """`Σ weight · value`, one GPU kernel a value: no vector of them is made first."""
    weights = [1.0] * len(values) if weights is None else weights
    total = values[0] if weights[0] == 1 else weights[0] * values[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = torch.add(total, value, alpha=weight)
    return total


def first_rows(values: Tensor, like: Tensor) -> Tensor:
    """The first `len(like)` rows; without a slice where these are all, as it copies in the backward pass."""
    return values if len(values) == len(like) else values[: len(like)]


def kl_divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """Mean over rows of KL(softmax reference ‖ softmax logits)."""
    return kl_div(logits.log_softmax(1), reference.log_softmax(1), reduction="batchmean", log_target=True)
