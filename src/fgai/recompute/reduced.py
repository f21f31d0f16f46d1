"""Objectives as a constant, from the rows a change cannot reach, plus what the touched rows add."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fgai.attention import AttentionMap
from fgai.objectives import Clean, Explanation, Objective
from fgai.ops.capture import chosen_rows
from fgai.recompute.edit import incoming
from fgai.recompute.local import Plan, Recompute, Repeated, Touched
from fgai.recompute.patch import Ranks
from fgai.topk import topk_mask


class Reduced(Protocol):
    """An objective that reads only what a plan computes again."""

    def __call__(self, touched: Touched) -> Tensor:
        """Return the objective on the whole perturbed graph."""


def can_reduce(objective: Objective) -> bool:
    """Whether the objective can be computed from the touched rows."""
    return objective.node_mean or objective.explanation is not None


def reduced_objective(objective: Objective, recompute: Recompute, clean: Clean, plan: Plan) -> Reduced:
    """Return `objective` for the perturbations that `plan` serves."""
    if objective.explanation is not None:
        return ReducedExplanation(objective.explanation, recompute, clean, plan)
    return ReducedMean(objective, clean, plan)


class ReducedMean:
    """A mean over the attacked nodes; those out of reach keep their value.

    Args:
        objective: a mean over the attacked rows (`node_mean`).
        clean: what the model said before.
        plan: computes the attacked nodes in reach.
    """

    def __init__(self, objective: Objective, clean: Clean, plan: Plan) -> None:
        self._objective, self._clean = objective, clean
        rest = torch.zeros(
            int(clean.logits.shape[0]) + plan.edit.new, dtype=torch.bool, device=clean.logits.device
        )
        rest[clean.nodes] = True
        rest[plan.nodes] = False
        rows = rest.nonzero().flatten()
        self._constant = self._sum(clean.logits[rows], rows).detach()

    def __call__(self, touched: Touched) -> Tensor:
        """See `Reduced`."""
        total = self._constant + self._sum(touched.logits, touched.nodes)
        return total / self._clean.nodes.numel()

    def _sum(self, logits: Tensor, nodes: Tensor) -> Tensor:
        """Return the sum of the objective over some attacked nodes [T] with these logits [T, C]."""
        if not nodes.numel():
            return logits.sum()
        every = torch.arange(len(nodes), device=nodes.device)
        few = Clean(self._clean.logits[nodes], AttentionMap(()), every)
        return len(nodes) * self._objective(logits, few.attention, few)


class _Layer(NamedTuple):
    """What the explanation objective reads in one layer.

    Attributes:
        spots: [K] edges of the patch: original edges of the touched rows, row after row; all that can count.
        there: [K] which of them are still there.
        members: [K] the clean top-k.
        rowptr: [R + 1] of those rows.
        rows: [R], all of them.
        lost: sum over the rows out of reach.
        terms: how many terms that has.
    """

    spots: Tensor
    there: Tensor
    members: Tensor
    rowptr: Tensor
    rows: Tensor
    lost: Tensor
    terms: Tensor

    def repeated(self, places: Tensor) -> _Layer:
        """The same for copies of the patch whose edges stand at `places` [copies, E']."""
        times, edges, rows = places.shape[0], len(self.spots), len(self.rows)
        starts = torch.arange(times, device=places.device)[:, None] * edges + self.rowptr[None, :-1]
        last = starts.new_tensor([times * edges])
        return _Layer(
            places[:, self.spots].flatten(),
            self.there.repeat(times),
            self.members.repeat(times),
            torch.cat([starts.flatten(), last]),
            torch.arange(times * rows, device=places.device),
            self.lost,
            self.terms,
        )


def _pointers(owner: Tensor, rows: int) -> Tensor:
    return torch.nn.functional.pad(torch.bincount(owner, minlength=rows).cumsum(0), (1, 0))


def _contenders(ranks: Ranks, spot: Tensor, there: Tensor, members: Tensor, rowptr: Tensor, k: int) -> Tensor:
    """Return which edges [K] can matter: members, those that move, and the k best outsiders that do not.

    An outsider that cannot move and has k better ones that cannot move either is never among the best.
    """
    moved = torch.zeros(len(ranks.still), dtype=torch.bool, device=spot.device)
    moved[ranks.moved] = True
    waiting = there & ~members & ~moved[spot]
    best = topk_mask(ranks.still[spot].masked_fill(~waiting, float("-inf")), rowptr, k)
    return members | (there & moved[spot]) | (waiting & best)


class ReducedExplanation:
    """The explanation objective; rows out of reach keep their attention.

    Args:
        objective: with its k.
        recompute: the model on the clean graph.
        clean: what the model said before.
        plan: made with `whole=True`.
    """

    def __init__(self, objective: Explanation, recompute: Recompute, clean: Clean, plan: Plan) -> None:
        self._objective, self._copies, self._layers = objective, 1, []
        adjacency, touched = recompute.graph.adjacency, plan.start
        layers, members_of = clean.attention.layers, clean.members(objective.k)
        found = zip(plan.patches, plan.ranks, layers, members_of, strict=True)
        for patch, ranks, before, (members, rows) in found:
            touched = torch.cat([touched, patch.constant[: patch.touched - patch.changed]])
            inside = torch.zeros(adjacency.num_nodes, dtype=torch.bool, device=adjacency.device)
            inside[touched[touched < adjacency.num_nodes]] = True
            ours, rest = rows[inside[rows]], rows[~inside[rows]]
            everything = torch.ones_like(members)
            now = before.ranking()
            lost, terms = objective.lost(now, everything, members, before.rowptr, rest)
            edges, owner = incoming(adjacency, ours)
            order = torch.argsort(patch.positions)
            sorted_positions = patch.positions[order]
            spot = torch.searchsorted(sorted_positions, edges).clamp(max=max(0, len(order) - 1))
            there, spot = sorted_positions[spot] == edges, order[spot]
            kept = _contenders(ranks, spot, there, members[edges], _pointers(owner, len(ours)), objective.k)
            rowptr = _pointers(owner[kept], len(ours))
            every = torch.arange(len(ours), device=ours.device)
            parts = (spot[kept], there[kept], members[edges][kept], rowptr, every, lost.detach(), terms)
            self._layers.append(_Layer(*parts))

    def __call__(self, touched: Touched) -> Tensor:
        """See `Reduced`."""
        return self.shares(touched)[0].squeeze(0)

    def shares(self, touched: Touched) -> tuple[Tensor, Tensor]:
        """Return the loss and the share of the top-k the touched rows lost, both [copies].

        As in `Explanation.shares`, the share is the mean over layers that have such rows.
        """
        total, gone = (touched.logits.new_zeros(self._copies) for _ in range(2))
        for layer, ranks in zip(self._layers, touched.ranks, strict=True):
            lost, terms = layer.lost.expand(self._copies), layer.terms.expand(self._copies)
            if len(layer.rows):
                now = chosen_rows(ranks, layer.spots)
                margins, real = (
                    part.view(self._copies, -1)
                    for part in self._objective.margins(
                        now, layer.there, layer.members, layer.rowptr, layer.rows
                    )
                )
                lost, terms = lost + (torch.sigmoid(margins) * real).sum(1), terms + real.sum(1)
                each = len(layer.rows) // self._copies
                gone = gone + ((margins.detach() > 0) & real).sum(1) / (self._objective.k * each)
            total = total + lost / terms.clamp(min=1)
        measured = sum(len(layer.rows) > 0 for layer in self._layers)
        return total / max(1, len(self._layers)), gone / max(1, measured)

    def repeated(self, repeated: Repeated) -> ReducedExplanation:
        """Return the same for several copies of the plan side by side."""
        copy = object.__new__(ReducedExplanation)
        copy._objective, copy._copies = self._objective, repeated.times
        copy._layers = [
            layer.repeated(places) for layer, places in zip(self._layers, repeated.places, strict=True)
        ]
        return copy
