"""What an attacker maximises: wrong predictions, another explanation, or attention for its own nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax

from fgai.attention import AttentionMap, LayerAttention
from fgai.attention.heads import mean_heads
from fgai.checks import one_of
from fgai.errors import InputError
from fgai.ops.segments import row_sum
from fgai.topk import topk_mask
from fgai.topk.rivals import at, rivals
from fgai.typed import typed


@typed
@dataclass(frozen=True, eq=False)
class Clean:
    """What the model said before the attack.

    Attributes:
        logits: on the clean graph, a row per node, link or small graph.
        attention: on the clean graph.
        nodes: [T] the rows under attack.
    """

    logits: Tensor
    attention: AttentionMap
    nodes: Tensor
    _members: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict, repr=False)

    def members(self, k: int) -> list[tuple[Tensor, Tensor]]:
        """Return per layer the top-k mask [E] and the nodes with more than k neighbours; found once."""
        if k not in self._members:
            self._members[k] = [
                (topk_mask(w.ranking(), w.rowptr, k), (w.degree > k).nonzero().flatten())
                for w in self.attention.layers
            ]
        return self._members[k]


Value = Callable[[Tensor, AttentionMap, Clean], Tensor]
"""(logits, attention, clean) → a scalar the attacker maximises."""

READS = ("logits", "ranking", "heads")


@typed
@dataclass(frozen=True, eq=False)
class Objective:
    """What an attacker maximises, and what has to be known of the model to compute it.

    Attributes:
        name: for messages and records.
        value: (logits, attention, clean) → a scalar.
        reads: `logits` alone, the `ranking` of neighbours and the mean of the attention over heads, or the
            attention of all `heads`.
        node_mean: whether the value is the mean over the attacked rows of a function of that row's logits.
        constrained: whether a value below zero means that a demand was not met.

    Raises:
        InputError: for another word in `reads`, or a mean over rows that reads attention.

    Example:
        >>> spread = Objective("spread", lambda logits, attention, clean: logits.std(), reads="logits")
        >>> spread.name, spread.explanation is None
        ('spread', True)
    """

    name: str
    value: Value
    reads: str = "heads"
    node_mean: bool = False
    constrained: bool = False

    def __post_init__(self) -> None:
        one_of(self.reads, "reads", READS)
        if self.node_mean and self.reads != "logits":
            raise InputError(f"{self.name!r} is a mean over rows of their logits, so it must read `logits`")

    @typed
    def __call__(self, logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
        """Return the value."""
        return self.value(logits, attention, clean)

    @property
    def explanation(self) -> Explanation | None:
        """The value as a sum over rows of attention, where it is one; so it can be computed row by row."""
        return self.value if isinstance(self.value, Explanation) else None

    @classmethod
    def of(cls, given: str | Objective | Value, k: int = 5) -> Objective:
        """Return an objective by name, as it is, or from a function that may read everything.

        Args:
            given: a name from `OBJECTIVES`, an `Objective`, or a function like `value`.
            k: size of the explanation, for named objectives that need one.

        Raises:
            InputError: an unknown name.
        """
        if isinstance(given, Objective):
            return given
        if isinstance(given, str):
            return OBJECTIVES[one_of(given, "objective", tuple(OBJECTIVES))](k)
        return cls(getattr(given, "__name__", "custom"), given)


@typed
def prediction(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
    """Cross-entropy of the attacked logits against the clean prediction; we maximise it."""
    label = clean.logits[clean.nodes].argmax(1)
    return cross_entropy(logits[clean.nodes], label)


@typed
def margin(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
    """Best wrong logit minus the clean prediction's logit, cut at a small positive value; we maximise it.

    Nodes that are wrong already by a clear margin give no more gradient, so the budget goes to the others.
    """
    label = clean.logits[clean.nodes].argmax(1)
    return _gap(logits[clean.nodes], label).clamp(max=1.0).mean()


def _gap(scores: Tensor, own: Tensor) -> Tensor:
    """Best score [T] among the classes other than `own`, minus the score of `own` [T]."""
    mine = torch.arange(scores.shape[1], device=own.device) == own[:, None]
    other = scores.masked_fill(mine, float("-inf"))
    return other.amax(1) - scores.gather(1, own[:, None]).squeeze(1)


@typed
class Explanation:
    """The top-k margin: push outsiders above members of the clean top-k.

    At a node with more than k clean neighbours, on the original edges that are still there, let
    o_1 >= o_2 >= ... be the largest log-attentions outside the clean top-k and m_1 <= m_2 <= ... the smallest
    inside, means over the heads (see `LayerAttention.ranking`). The s-th margin, o_s - m_s, is positive
    exactly if s members have left, so

        mean over s = 1..min(k, degree - k) of sigmoid(o_s - m_s)

    is a smooth share of the explanation lost; we maximise its mean over nodes and layers. Logarithms make the
    margin a difference of scores, which has a useful size however flat the attention is; the sigmoid spends
    the budget on swaps within reach, neither on those already made nor on hopeless ones.

    Args:
        k: size of the explanation.
    """

    def __init__(self, k: int) -> None:
        self.k = k

    @typed
    def __call__(self, logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
        """Return the smooth share of the explanation lost."""
        total = logits.new_zeros(())
        for before, after, (members, rows) in zip(
            clean.attention.layers, attention.layers, clean.members(self.k), strict=True
        ):
            if rows.numel():
                lost, terms = self.lost(*_carried(before, after), members, before.rowptr, rows)
                total = total + lost / terms.clamp(min=1)
        return total / max(1, len(attention.layers))

    def shares(
        self, attention: AttentionMap, clean: Clean, touched: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the objective, and the share of the top-k that touched nodes lost, mean over layers.

        Args:
            attention: on the perturbed graph.
            clean: what the model said before.
            touched: per layer bool [N], the nodes within reach of the perturbation.
        """
        total = clean.logits.new_zeros(())
        gone = clean.logits.new_zeros(())
        for before, after, (members, rows), near in zip(
            clean.attention.layers, attention.layers, clean.members(self.k), touched, strict=True
        ):
            if rows.numel():
                margins, real = self.margins(*_carried(before, after), members, before.rowptr, rows)
                total = total + (torch.sigmoid(margins) * real).sum() / real.sum().clamp(min=1)
                lost = ((margins.detach() > 0) & real).sum(1) * near[rows]
                gone = gone + lost.sum() / (self.k * near[rows].sum().clamp(min=1))
        count = max(1, len(attention.layers))
        return total / count, gone / count

    def lost(
        self, now: Tensor, there: Tensor, members: Tensor, rowptr: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the sum of sigmoid(o_s - m_s) over `rows` [R] and all s, and the number of its terms."""
        margins, real = self.margins(now, there, members, rowptr, rows)
        return (torch.sigmoid(margins) * real).sum(), real.sum()

    def margins(
        self, now: Tensor, there: Tensor, members: Tensor, rowptr: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return o_s - m_s [R, k] of `rows` [R], and which there are; s members left where it is positive.

        Args:
            now: [E] log-attention on the original edges.
            there: [E] which of them are still there.
            members: [E] the clean top-k.
            rowptr: [N + 1].
            rows: [R] the nodes that count.
        """
        return rivals(now, there, members, rowptr, rows, self.k)


def _carried(before: LayerAttention, after: LayerAttention) -> tuple[Tensor, Tensor]:
    """Log-attention after the attack on the original edges [E], and which of them are still there [E]."""
    spot = torch.searchsorted(after.keys, before.keys).clamp(max=max(0, after.num_edges - 1))
    there = after.keys[spot] == before.keys
    now = log_attention(after.values) if after.scores is None else after.scores
    return at(now, spot), there


@typed
def log_attention(values: Tensor) -> Tensor:
    """Logarithm of the attention [E, H], mean over the heads; [E]."""
    if values.dim() != 2 or not values.is_floating_point():
        got = f"{values.dtype} {tuple(values.shape)}"
        raise InputError(f"`values` must be floating-point of shape [edges, heads], got {got}")
    return mean_heads(values.clamp(min=torch.finfo(values.dtype).tiny).log())


class Intruders:
    """Attention for the new nodes: the mass they take at the original nodes they are joined to.

        mean over layers, and over original nodes i with a new neighbour, of Σ_{j new} w_ij

    Heads are averaged. We maximise it; 0 on the clean graph, and for changes without new nodes.
    """

    @typed
    def __call__(self, logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
        """Return the mean mass, in [0, 1]."""
        total = logits.new_zeros(())
        for before, after in zip(clean.attention.layers, attention.layers, strict=True):
            old = before.num_nodes
            new = (after.source >= old) & (after.destination < old)
            joined = (row_sum(new, after.rowptr) > 0).sum()
            mass = torch.where(new, after.values.mean(1), 0.0).sum()
            total = total + mass / joined.clamp(min=1)
        return total / max(1, len(attention.layers))


@typed
class Preserving:
    """Another explanation for the same prediction: the explanation objective, as long as classes stay.

    With K the share of attacked nodes that keep their predicted class, the value is

        Explanation(k)   if K >= keep,        K - keep < 0   otherwise,

    so that every change that keeps the classes beats every change that does not, and the best of those wins.
    A jump has no gradient; climbed in its place is `explanation - hinge` while classes hold and `-hinge`
    once too many have gone, with

        hinge = mean over attacked nodes of relu(slack - (log p_own - log p_best_other)),

    own being the clean prediction. We maximise both.

    Args:
        k: size of the explanation.
        keep: share of the attacked nodes that must keep their class, above 0 and at most 1.
        slack: distance to the class boundary, in nats, from which the hinge pushes back.

    Raises:
        InputError: if `keep` is not a share.
    """

    def __init__(self, k: int = 5, keep: float = 0.995, slack: float = 0.5) -> None:
        if not 0 < keep <= 1:
            raise InputError(f"`keep` is a share of the attacked nodes, above 0 and at most 1, got {keep}")
        self.k, self.keep, self.slack = k, keep, slack
        self._explanation = Explanation(k)

    @typed
    def __call__(self, logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
        """Return the value, with the gradient of the function climbed in its place."""
        gained = self._explanation(logits, attention, clean)
        own = clean.logits[clean.nodes].argmax(1)
        gap = -_gap(log_softmax(logits[clean.nodes], dim=1), own)
        hinge = (self.slack - gap).clamp(min=0).mean()
        kept = (logits[clean.nodes].argmax(1) == own).to(gained.dtype).mean()
        holds = kept >= self.keep
        value = torch.where(holds, gained, kept - self.keep).detach()
        guide = torch.where(holds, gained, 0.0) - hinge
        return guide + (value - guide.detach())


PREDICTION = Objective("prediction", prediction, "logits", node_mean=True)
MARGIN = Objective("margin", margin, "logits", node_mean=True)


@typed
def explanation(k: int = 5) -> Objective:
    """Return the objective of `Explanation`: another top-k."""
    return Objective("explanation", Explanation(k), "ranking")


INTRUDERS = Objective("intruders", Intruders(), "ranking")


@typed
def preserving(k: int = 5, keep: float = 0.995, slack: float = 0.5) -> Objective:
    """Return the objective of `Preserving`: another top-k, the same class."""
    return Objective("preserving", Preserving(k, keep, slack), "ranking", constrained=True)


OBJECTIVES: dict[str, Callable[[int], Objective]] = {
    "prediction": lambda k: PREDICTION,
    "margin": lambda k: MARGIN,
    "explanation": explanation,
    "preserving": preserving,
    "intruders": lambda k: INTRUDERS,
}
"""By name: the size of the explanation → the objective."""
