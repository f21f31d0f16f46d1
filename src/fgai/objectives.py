"""Objectives of attacks: searches climb their `loss`; their `damage` chooses the change and is reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from fgai.attention import AttentionMap, LayerAttention, touched_rows
from fgai.attention.layer import mean_heads
from fgai.cache import cached_on
from fgai.checks import one_of
from fgai.errors import InputError
from fgai.metrics import mean_of_defined, task_scores
from fgai.metrics.ranking import kept_by_layer
from fgai.ops.segments import row_sum
from fgai.topk import topk_mask
from fgai.topk.swaps import swap_gaps, take_values
from fgai.typed import typed


@typed
@dataclass(frozen=True, eq=False)
class Clean:
    """The model's output before the attack, and the true classes."""

    logits: Tensor  # on the clean graph, a row per node, link or small graph
    attention: AttentionMap
    nodes: Tensor  # [T] the rows under attack
    truth: Tensor | None = None  # the true class of every row, negative if unknown; None if all are
    task: str = "node"
    score: str = "f1"  # name of the task's score that is reported

    @property
    def labels(self) -> Tensor:
        """The class each row should have: the true one, or else the clean prediction."""
        predicted = self.logits.argmax(1)
        return predicted if self.truth is None else self.truth.where(self.truth >= 0, predicted)

    def members(self, k: int) -> list[tuple[Tensor, Tensor]]:
        """Return per layer the top-k mask [E] and the nodes with more than k neighbours; cached."""

        def members() -> list[tuple[Tensor, Tensor]]:
            layers = self.attention.layers
            return [(topk_mask(w.ranking(), w.rowptr, k), (w.degree > k).nonzero().flatten()) for w in layers]

        return cached_on(self, ("fgai.objectives", k), members)


Loss = Callable[[Tensor, AttentionMap, Clean], Tensor]
"""(logits, attention, clean) → a scalar the attacker maximises."""

READS = ("logits", "ranking", "heads")


@typed
@dataclass(frozen=True, eq=False)
class Objective:
    """What an attacker maximises, the number that is reported, and the outputs of the model both need.

    Raises `InputError` for unknown `reads`, or others than `logits` with `node_mean`.

    Example:
        >>> spread = Objective("spread", lambda logits, attention, clean: logits.std(), reads="logits")
        >>> spread.name, spread.top_k_margin is None
        ('spread', True)
    """

    name: str
    loss: Loss  # that searches climb
    # Outputs that `loss` and `damage` need: `logits`; `ranking`, also the ranking of neighbours and the mean
    # attention over heads; or `heads`, also the attention of all heads.
    reads: str = "heads"
    node_mean: bool = False  # the loss is the mean over the attacked rows of a function of that row's logits
    constrained: bool = False  # a value below zero means that a constraint is violated
    damage: Loss | None = None  # what is reported, larger for a stronger attack; None takes the loss
    row_losses: bool = False  # searches may climb any of `ROW_LOSSES`: the damage is one minus the score
    top_k_margin: TopKMargin | None = None  # the loss as a sum over rows of attention, where it is one

    def __post_init__(self) -> None:
        one_of(self.reads, "reads", READS)
        if self.node_mean and self.reads != "logits":
            raise InputError(f"{self.name!r} with `node_mean` must read `logits`, got {self.reads!r}")

    @typed
    def __call__(self, logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
        """Return the loss."""
        return _scalar(self.loss(logits, attention, clean), self.name)

    @torch.no_grad()
    def value(self, logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
        """Return the damage, or the loss where there is none, without gradients."""
        judge = self.loss if self.damage is None else self.damage
        return _scalar(judge(logits, attention, clean), self.name).detach()

    @classmethod
    def of(cls, objective: str | Objective | Loss, k: int = 5) -> Objective:
        """Return the objective of this name, for explanations of size k, or of this loss; or `InputError`."""
        if isinstance(objective, Objective):
            return objective
        if isinstance(objective, str):
            return OBJECTIVES[one_of(objective, "objective", tuple(OBJECTIVES))](k)
        if not callable(objective):
            raise InputError(f"`objective` must be a name or a function, got {type(objective).__name__}")
        return cls(getattr(objective, "__name__", "custom"), objective)


def _scalar(value: Tensor, name: str) -> Tensor:
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"the objective {name!r} must return a floating-point scalar tensor, got {got}")
    return value.reshape(())


def _wrong_share(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
    """One minus the task's headline score of the attacked rows, against `clean.labels`."""
    scores = task_scores(clean.task, logits[clean.nodes], clean.labels[clean.nodes])
    return logits.new_tensor(1 - scores[clean.score], dtype=torch.float64)


@typed
def prediction(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
    """Cross-entropy of the attacked logits against the clean prediction, to be maximised."""
    return cross_entropy(logits[clean.nodes], clean.logits[clean.nodes].argmax(1))


@typed
def margin_loss(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
    """Best wrong logit minus the clean prediction's, at most 1: clear errors have no gradient."""
    return _gap(logits[clean.nodes], clean.logits[clean.nodes].argmax(1)).clamp(max=1.0).mean()


def _gap(scores: Tensor, own: Tensor) -> Tensor:
    """Best score [T] among the classes other than `own`, minus the score of `own` [T]."""
    mine = torch.arange(scores.shape[1], device=own.device) == own[:, None]
    other = scores.masked_fill(mine, float("-inf"))
    return other.amax(1) - scores.gather(1, own[:, None]).squeeze(1)


@typed
class TopKMargin:
    """The top-k margin: raise neighbours outside the clean top-k above those inside.

        mean over s = 1..min(k, degree - k) of sigmoid(o_s - m_s)

    with o_1 >= o_2 >= ... the largest log-attentions outside the clean top-k and m_1 <= m_2 <= ... the
    smallest inside (`LayerAttention.ranking`), at nodes with more than k clean neighbours, on the remaining
    original edges. `o_s - m_s` is positive exactly if s members have left: a smooth share of the explanation
    lost, of which the mean over nodes and layers is maximised.
    """

    def __init__(self, k: int) -> None:
        self.k = k

    @typed
    def __call__(self, logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
        """Return the smooth share of the explanation lost."""
        return self.shares(attention, clean)[0]

    def shares(
        self, attention: AttentionMap, clean: Clean, touched: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, and the top-k share that `touched` nodes (bool [N] per layer) lost; 0 of none."""
        total = share = measured = clean.logits.new_zeros(())
        layers = zip(clean.attention.layers, attention.layers, clean.members(self.k), strict=True)
        for index, (before, after, (members, rows)) in enumerate(layers):
            if not rows.numel():
                continue
            values, present = _on_original_edges(before, after)
            margins, real = swap_gaps(values, present, members, before.rowptr, rows, self.k)  # o_s - m_s
            total = total + (torch.sigmoid(margins) * real).sum() / real.sum().clamp(min=1)
            if touched is not None:
                scored = touched[index][rows]
                lost = ((margins.detach() > 0) & real).sum(1) * scored
                share = share + lost.sum() / (self.k * scored.sum().clamp(min=1))
                measured = measured + scored.any()
        return total / max(1, len(attention.layers)), share / measured.clamp(min=1)

    def damage(self, logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
        """Return one minus the top-k overlap of the touched nodes, as tables report it."""
        touched = touched_rows(clean.attention, attention)
        kept = mean_of_defined(kept_by_layer(clean.attention, attention, self.k, touched))
        return logits.new_tensor(1 - kept if kept == kept else 0.0, dtype=torch.float64)


def _on_original_edges(before: LayerAttention, after: LayerAttention) -> tuple[Tensor, Tensor]:
    """Return the log-attention after the attack on the original edges [E], and which of them remain [E]."""
    position = torch.searchsorted(after.keys, before.keys).clamp(max=max(0, after.num_edges - 1))
    values = after.scores
    if values is None:
        values = mean_heads(after.values.clamp(min=torch.finfo(after.values.dtype).tiny).log())
    return take_values(values, position), after.keys[position] == before.keys


def _intruders(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
    """Mean over layers, and old nodes i with new neighbours, of Σ_{j new} w_ij, heads averaged; else 0."""
    total = logits.new_zeros(())
    for before, after in zip(clean.attention.layers, attention.layers, strict=True):
        old = before.num_nodes
        new = (after.source >= old) & (after.destination < old)
        joined = (row_sum(new, after.rowptr) > 0).sum()
        mass = torch.where(new, after.values.mean(1), 0.0).sum()
        total = total + mass / joined.clamp(min=1)
    return total / max(1, len(attention.layers))


PREDICTION = Objective(
    "prediction", prediction, "logits", node_mean=True, damage=_wrong_share, row_losses=True
)
MARGIN = Objective("margin", margin_loss, "logits", node_mean=True, damage=_wrong_share)


@typed
def explanation(k: int = 5) -> Objective:
    """Return the objective of `TopKMargin`: another top-k."""
    smooth = TopKMargin(k)
    return Objective("explanation", smooth, "ranking", damage=smooth.damage, top_k_margin=smooth)


INTRUDERS = Objective("intruders", _intruders, "ranking")


@typed
def preserving(k: int = 5, keep: float = 0.995, slack: float = 0.5) -> Objective:
    """Return the objective of another top-k while predicted classes stay.

    With K the share of attacked nodes that keep their predicted class, the loss is `TopKMargin(k)` if K >=
    keep, else `K - keep` < 0. Its gradient is that of `TopKMargin(k) - hinge`, or of `-hinge` where K < keep:

        hinge = mean over attacked nodes of relu(slack - (log p_own - log p_best_other)),

    own being the clean prediction and `slack` a distance in nats. The damage has `TopKMargin.damage` in the
    place of `TopKMargin(k)`.
    """
    if not 0 < keep <= 1:
        raise InputError(f"`keep` is a share of the attacked nodes, above 0 and at most 1, got {keep}")
    smooth = TopKMargin(k)

    def share_kept(logits: Tensor, clean: Clean) -> Tensor:
        return (logits[clean.nodes].argmax(1) == clean.logits[clean.nodes].argmax(1)).double().mean()

    def loss(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
        margin = smooth(logits, attention, clean)
        own = clean.logits[clean.nodes].argmax(1)
        hinge = (slack + _gap(log_softmax(logits[clean.nodes], dim=1), own)).clamp(min=0).mean()
        kept = share_kept(logits, clean).to(margin.dtype)
        value = torch.where(kept >= keep, margin, kept - keep).detach()
        guide = torch.where(kept >= keep, margin, 0.0) - hinge
        return guide + (value - guide.detach())

    def damage(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
        kept = share_kept(logits, clean)
        return smooth.damage(logits, attention, clean) if bool(kept >= keep) else kept - keep

    return Objective("preserving", loss, "ranking", constrained=True, damage=damage)


OBJECTIVES: dict[str, Callable[[int], Objective]] = {
    "prediction": lambda k: PREDICTION,
    "margin": lambda k: MARGIN,
    "explanation": explanation,
    "preserving": preserving,
    "intruders": lambda k: INTRUDERS,
}
"""By name: the size of the explanation → the objective."""
