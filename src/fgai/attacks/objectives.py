"""What an attacker maximises: wrong predictions, or another explanation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fgai.attention import AttentionMap
from fgai.checks import one_of
from fgai.topk import leaders, topk_mask


@dataclass(frozen=True, eq=False)
class Clean:
    """What the model said before the attack.

    Attributes:
        logits: [N, C] on the clean graph.
        attention: on the clean graph.
        nodes: [T] the attacked nodes.
    """

    logits: Tensor
    attention: AttentionMap
    nodes: Tensor
    _members: dict[int, list[tuple[Tensor, Tensor]]] = field(default_factory=dict, repr=False)

    def members(self, k: int) -> list[tuple[Tensor, Tensor]]:
        """Return per layer the top-k mask [E] and the nodes with more than k neighbours; found once."""
        if k not in self._members:
            self._members[k] = [
                (topk_mask(w.values.mean(1), w.rowptr, k), (w.degree > k).nonzero().flatten())
                for w in self.attention.layers
            ]
        return self._members[k]


Objective = Callable[[Tensor, AttentionMap, Clean], Tensor]
"""(logits, attention, clean) → a scalar the attacker maximises."""


def prediction(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
    """Cross-entropy of the attacked logits against the clean prediction; we maximise it."""
    label = clean.logits[clean.nodes].argmax(1)
    return cross_entropy(logits[clean.nodes], label)


def margin(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
    """Best wrong logit minus the clean prediction's logit, cut at a small positive value; we maximise it.

    Nodes that are wrong already by a clear margin give no more gradient, so the budget goes to the others.
    """
    now = logits[clean.nodes]
    label = clean.logits[clean.nodes].argmax(1)
    own = now.gather(1, label[:, None])
    rest = now.masked_fill(torch.nn.functional.one_hot(label, now.shape[1]).bool(), float("-inf"))
    return (rest.amax(1) - own.squeeze(1)).clamp(max=1.0).mean()


def explanation(k: int = 5) -> Objective:
    """Return the top-k margin objective: push outsiders above members of the clean top-k.

    At a node with more than k clean neighbours, on the original edges, let o_1 >= o_2 >= ... be the largest
    log-attentions outside the clean top-k and m_1 <= m_2 <= ... the smallest inside. The s-th margin,
    o_s - m_s, is positive exactly if s members have left, so

        mean over s = 1..min(k, degree - k) of sigmoid(o_s - m_s)

    is a smooth share of the explanation lost; we maximise its mean over nodes and layers. Logarithms make the
    margin a difference of scores, which has a useful size however flat the attention is; the sigmoid spends
    the budget on swaps within reach, neither on those already made nor on hopeless ones.

    Args:
        k: size of the explanation.
    """

    def objective(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
        total = logits.new_zeros(())
        found = clean.members(k)
        for before, after, (members, rows) in zip(
            clean.attention.layers, attention.layers, found, strict=True
        ):
            if not rows.numel():
                continue
            spot = torch.searchsorted(after.keys, before.keys)
            now = after.values.mean(1)[spot].clamp(min=1e-12).log()
            fixed = now.detach()
            outside = leaders(fixed.masked_fill(members, float("-inf")), before.rowptr, k)[rows]
            inside = leaders((-fixed).masked_fill(~members, float("-inf")), before.rowptr, k)[rows]
            pairs = outside.clamp(min=0)
            real = (outside >= 0) & ~members[pairs]
            lost = torch.sigmoid(now[pairs] - now[inside]) * real
            total = total + lost.sum() / real.sum()
        return total / max(1, len(attention.layers))

    return objective


OBJECTIVES = ("prediction", "margin", "explanation")


def objective_named(name: str, k: int = 5) -> Objective:
    """Return an objective by name: `prediction`, `margin` or `explanation`."""
    one_of(name, "objective", OBJECTIVES)
    return {"prediction": prediction, "margin": margin}.get(name) or explanation(k)
