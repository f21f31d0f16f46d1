"""The attacked model at fixed edges, as a function of the values that an attack changes, and its scores.

Losses and damages come out of one forward pass. Objectives that are sums over rows add a constant for rows
out of reach; every other objective is read off full passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

from fgai.attention import AttentionMap, call_model, entry_limits, observe, replacing_entry, touched_rows
from fgai.graph import Graph, GraphChange
from fgai.metrics import error_weights
from fgai.objectives import Clean, Objective, TopKMargin
from fgai.recompute import PartialOutput, Plan, PlanCopies, Recompute
from fgai.recompute.local import PatchScores, incoming
from fgai.tasks import task_of
from fgai.topk import topk_mask
from fgai.topk.swaps import swap_gaps


class _SiteOutput(NamedTuple):
    """The model's output for B sets of values."""

    logits: Tensor  # [B, R, C] of `_InjectionSite.rows`; [B, 0, C] where a partial pass reads attention
    outputs: list[tuple[Tensor, AttentionMap]] | None  # of full passes, logits and attention of each set
    touched: PartialOutput | None  # of partial passes, the rows in reach of all sets together


@dataclass(eq=False, repr=False)
class _InjectionSite:
    """A change with fixed edges; only the features of new nodes, their values or changed rows move.

    With a `plan` only the rows in reach are computed, for several sets of values in one pass. `rows` [R] are
    the attacked rows of the logits that can change; `passes` counts forward passes, one for each set of
    values.
    """

    model: nn.Module  # the attacked one, or a stand-in for its gradients
    graph: Graph
    change: GraphChange
    clean: Clean
    recompute: Recompute | None
    reads: str
    variable: str = "features"  # field of the change that varies; or `delta` (one set), `entry_values`

    def __post_init__(self) -> None:
        self.passes = 0
        self._copies: dict[int, tuple[PlanCopies, Tensor | None]] = {}  # with the encodings of all copies
        plan = None
        if self.recompute is not None:
            attends = self.reads != "logits"
            plan = self.recompute.plan(self.change, None if attends else self.clean.nodes, all_rows=attends)
        self._set_plan(plan)

    def _set_plan(self, plan: Plan | None) -> None:
        self.plan, self._encodings, self.share = plan, None, 1.0  # `share` of the work of a full pass
        if plan is None:
            self._template, self.rows = self.change.apply(self.graph)[0], self.clean.nodes
        else:
            assert self.recompute is not None
            self._encodings, self.rows = self.recompute.encodings(plan, self.change), plan.nodes
            self.share = plan.share

    def copies(self, count: int) -> tuple[PlanCopies, Tensor | None]:
        """The plan and the encodings for `count` sets of values at once, made once."""
        assert self.plan is not None
        if count not in self._copies:
            encodings = None if self._encodings is None else self._encodings.repeat(count, 1)
            self._copies[count] = self.plan.copies(count), encodings
        return self._copies[count]

    def run(self, values: Tensor) -> _SiteOutput:
        """Run the model with each of these sets of values [B, M, ...]; gradients reach them."""
        if self.plan is not None:
            return self._partial(self._changed(values.flatten(0, 1), len(values)), len(values))
        return self._full([self._changed(one, 1) for one in values])

    def run_change(self, change: GraphChange) -> _SiteOutput:
        """Run the model after one change with the edges and rows of this site."""
        return self._full([change]) if self.plan is None else self._partial(change, 1)

    def _changed(self, values: Tensor, count: int) -> GraphChange:
        change = replace(self.change, **{self.variable: values})
        if self.variable == "entry_values" and change.features is not None:
            change = replace(change, features=change.features.repeat(count, 1))
        return change

    def _partial(self, change: GraphChange, count: int) -> _SiteOutput:
        self.passes += count
        assert self.recompute is not None and self.plan is not None
        features, encodings, plan = change.features_on(self.graph), self._encodings, self.plan
        assert features is not None
        if count > 1:
            (plan, *_), encodings = self.copies(count)
        values = change.entry_values
        with nullcontext() if values is None else replacing_entry(entry_limits(self.model), values):
            touched = self.recompute.forward(plan, features, encodings, logits=self.reads == "logits")
        logits = touched.logits
        rows = logits.shape[0] // count
        return _SiteOutput(logits.view(count, rows, logits.shape[1]), None, touched)

    def _full(self, changes: list[GraphChange]) -> _SiteOutput:
        self.passes += len(changes)
        graphs = (
            self._template.replace(features=one.features_on(self.graph), entry_values=one.entry_values)
            for one in changes
        )
        outputs = [_read_model(self.model, graph, self.reads) for graph in graphs]
        return _SiteOutput(torch.stack([logits[self.rows] for logits, _ in outputs]), outputs, None)


def _read_model(model: nn.Module, graph: Graph, reads: str) -> tuple[Tensor, AttentionMap]:
    """Return the logits and as much of the attention as an objective reads, with gradients."""
    if reads == "logits":
        return call_model(model, graph), AttentionMap(())
    output = observe(model, graph, heads="mean" if reads == "ranking" else "each", grad=True)
    return output.logits, output.attention


Score = Callable[[_SiteOutput], tuple[Tensor, Tensor]]  # output → losses [B], with gradients; damages [B]


def _value_at(site: _InjectionSite, objective: Objective, guide: Objective | None = None) -> Score:
    """Climb an objective, or a smoother `guide`, and judge by the objective's value; see `_sums_rows`."""
    values = _values(site, objective)
    climbed = None if guide is None else _values(site, guide)

    def score(view: _SiteOutput) -> tuple[Tensor, Tensor]:
        value = values(view)
        return (value if climbed is None else climbed(view)), value.detach()

    return score


def _damage_at(site: _InjectionSite, objective: Objective, losses: Sequence[str]) -> Score:
    """Climb the loss of an objective, for wrong classes one of `ROW_LOSSES` each, and judge by its damage."""
    clean = site.clean
    if objective.top_k_margin is not None:
        return _explanation_at(site, objective.top_k_margin, len(losses))
    if objective.row_losses:
        name = task_of(site.graph).scores[clean.score]
        kind = _LinkScore if name == "link_auc" else _ClassScore
        return kind(site, losses, error_weights(name, clean.labels[clean.nodes]))

    def score(view: _SiteOutput) -> tuple[Tensor, Tensor]:
        assert view.outputs is not None
        damage = [objective.value(logits, attention, clean) for logits, attention in view.outputs]
        return _values(site, objective)(view), torch.stack(damage)

    return score


def _sums_rows(objective: Objective) -> bool:
    """Whether the objective's value can be computed from the rows in reach."""
    return objective.node_mean or objective.top_k_margin is not None


def _values(site: _InjectionSite, objective: Objective) -> Callable[[_SiteOutput], Tensor]:
    """The objective of each set of values, [B]."""
    if site.plan is None:
        return lambda view: torch.stack([objective(*output, site.clean) for output in view.outputs or ()])
    if objective.top_k_margin is not None:
        score = _explanation_at(site, objective.top_k_margin, 1)
        return lambda view: score(view)[0]
    clean = site.clean

    def total(rows: Tensor) -> Callable[[Tensor], Tensor]:
        few = Clean(clean.logits[rows], AttentionMap(()), torch.arange(len(rows), device=rows.device))
        return lambda logits: len(rows) * objective(logits, few.attention, few) if len(rows) else logits.sum()

    rest = _out_of_reach(site)  # these rows keep their value
    with torch.no_grad():
        constant = total(rest)(clean.logits[rest])
    moving = total(site.rows)
    return lambda view: torch.stack([(constant + moving(one)) / clean.nodes.numel() for one in view.logits])


def _out_of_reach(site: _InjectionSite) -> Tensor:
    reached = torch.zeros(site.clean.logits.shape[0], dtype=torch.bool, device=site.rows.device)
    reached[site.rows] = True
    return site.clean.nodes[~reached[site.clean.nodes]]


def _own_and_gap(logits: Tensor, mine: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the classes to leave, marked in `mine` [R, C], and how far the best others are above them."""
    own = logits.masked_fill(~mine, 0.0).sum(-1)
    return own, logits.masked_fill(mine, float("-inf")).amax(-1) - own


ROW_LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "entropy": lambda logits, own, gap: logits.logsumexp(-1) - own,
    "margin": lambda logits, own, gap: gap.clamp(max=0.2),
    "reach": lambda logits, own, gap: torch.sigmoid(4 * gap),
}
# Losses per row [B, R], whose mean is maximised: (logits, own, gap in units of the clean margins) → loss.
# Cross-entropy is unbounded and ends up with few rows that are very wrong; the margin is cut off where a row
# is clearly wrong; reach counts wrong rows, so those out of reach cost no effort either.


class _ClassScore:
    """Wrong predictions: the damage is the sum of the `error_weights` [T] of wrong rows, or their share."""

    def __init__(self, site: _InjectionSite, losses: Sequence[str], weights: Tensor | None = None) -> None:
        clean, labels = site.clean, site.clean.labels
        best = clean.logits[clean.nodes].topk(2, dim=1).values
        self.scale = (best[:, 0] - best[:, 1]).median().clamp(min=1e-6)  # of the clean margins
        self.label, self.count = labels[site.rows], clean.nodes.numel()
        self.mine = one_hot(self.label, clean.logits.shape[1]).bool()
        self.losses = [
            (ROW_LOSSES[name], torch.tensor([one == name for one in losses], device=labels.device))
            for name in dict.fromkeys(losses)
        ]
        rest = _out_of_reach(site)
        wrong = clean.logits[rest].argmax(1) != labels[rest]
        self.fixed, self.weights = wrong.sum(), None
        if weights is not None:
            spread = clean.logits.new_zeros(clean.logits.shape[0]).index_put((clean.nodes,), weights)
            self.fixed, self.weights = spread[rest][wrong].sum(), spread[site.rows]

    def __call__(self, view: _SiteOutput) -> tuple[Tensor, Tensor]:
        own, gap = _own_and_gap(view.logits, self.mine)
        gap = gap / self.scale
        (function, _), *others = self.losses
        loss = self._total(function(view.logits, own, gap))
        for function, chosen in others:
            loss = torch.where(chosen, self._total(function(view.logits, own, gap)), loss)
        return loss, self.damage(view.logits.detach())

    def damage(self, logits: Tensor) -> Tensor:
        return self._total(logits.argmax(-1) != self.label, self.fixed)

    def _total(self, values: Tensor, more: Tensor | int = 0) -> Tensor:
        """Mean over all attacked rows of values [B, R], plus a constant of the other rows."""
        if self.weights is None:
            return (values.sum(1) + more) / self.count
        return (values * self.weights).sum(1) + more


class _LinkScore(_ClassScore):
    """Links ranked below other pairs: the damage is one minus the ROC-AUC, ties broken by order; else 0."""

    def damage(self, logits: Tensor) -> Tensor:
        ranks = (logits[..., 1] - logits[..., 0]).argsort(dim=1).argsort(dim=1) + 1
        links = self.label == 1
        positives, negatives = links.sum(), (~links).sum()
        below = (ranks * links).sum(1) - positives * (positives + 1) / 2
        return torch.where(positives * negatives > 0, 1 - below / (positives * negatives).clamp(min=1), 0.0)


def _explanation_at(site: _InjectionSite, explanation: TopKMargin, count: int) -> Score:
    if site.plan is not None:
        assert site.recompute is not None
        copies = None if count == 1 else site.copies(count)[0]
        return _PartialExplanation(explanation, site.recompute, site.clean, site.plan, copies)
    near: list[Tensor] = []

    def full(view: _SiteOutput) -> tuple[Tensor, Tensor]:
        maps = [attention for _, attention in view.outputs or ()]
        if not near:
            near.extend(touched_rows(site.clean.attention, maps[0]))
        loss, lost = zip(*(explanation.shares(one, site.clean, near) for one in maps), strict=True)
        return torch.stack(loss), torch.stack(lost)

    return full


class _Layer(NamedTuple):
    spots: Tensor  # [K] original edges of the touched rows in the patch, row after row; all that can count
    there: Tensor  # [K] which of them are still there
    members: Tensor  # [K] the clean top-k
    rowptr: Tensor  # [R + 1] of those rows
    rows: Tensor  # [R], all of them
    lost: Tensor  # sum over the rows out of reach ...
    terms: Tensor  # ... of so many terms


def _pointers(owner: Tensor, rows: int) -> Tensor:
    return pad(torch.bincount(owner, minlength=rows).cumsum(0), (1, 0))


def _contenders(
    ranks: PatchScores, spot: Tensor, there: Tensor, members: Tensor, rowptr: Tensor, k: int
) -> Tensor:
    """Return which edges [K] can matter: members, those that move, and the k best outsiders that do not."""
    moved = torch.zeros(len(ranks.clean), dtype=torch.bool, device=spot.device)
    moved[ranks.changing] = True
    waiting = there & ~members & ~moved[spot]
    best = topk_mask(ranks.clean[spot].masked_fill(~waiting, float("-inf")), rowptr, k)
    return members | (there & moved[spot]) | (waiting & best)


class _PartialExplanation:
    """The explanation objective from the rows in reach, of a plan of all rows or of copies of it."""

    @torch.no_grad()
    def __init__(
        self, objective: TopKMargin, recompute: Recompute, clean: Clean, plan: Plan, copies: PlanCopies | None
    ) -> None:
        self._k, self._copies = objective.k, 1 if copies is None else copies.times
        self._layers: list[_Layer] = []
        adjacency, touched = recompute.graph.adjacency, plan.start
        layers, members_of = clean.attention.layers, clean.members(objective.k)
        parts = zip(plan.patches, plan.ranks, layers, members_of, strict=True)
        for index, (patch, ranks, before, (members, rows)) in enumerate(parts):
            touched = torch.cat([touched, patch.constant[: patch.recomputed - patch.changed]])
            inside = torch.zeros(adjacency.num_nodes, dtype=torch.bool, device=adjacency.device)
            inside[touched[touched < adjacency.num_nodes]] = True
            ours, rest = rows[inside[rows]], rows[~inside[rows]]
            margins, real = swap_gaps(
                before.ranking(), torch.ones_like(members), members, before.rowptr, rest, objective.k
            )
            lost, terms = (torch.sigmoid(margins) * real).sum(), real.sum()
            edges, owner = incoming(adjacency, ours)
            order = torch.argsort(patch.positions)
            sorted_positions = patch.positions[order]
            spot = torch.searchsorted(sorted_positions, edges).clamp(max=max(0, len(order) - 1))
            there, spot = sorted_positions[spot] == edges, order[spot]
            kept = _contenders(ranks, spot, there, members[edges], _pointers(owner, len(ours)), objective.k)
            rowptr, times, spot = _pointers(owner[kept], len(ours)), self._copies, spot[kept]
            first = len(spot) * torch.arange(times, device=spot.device)[:, None]
            layer = _Layer(
                spots=spot if copies is None else copies.positions[index][:, spot].flatten(),
                there=there[kept].repeat(times),
                members=members[edges][kept].repeat(times),
                rowptr=torch.cat([(first + rowptr[:-1]).flatten(), first.new_tensor([times * len(spot)])]),
                rows=torch.arange(times * len(ours), device=ours.device),
                lost=lost,
                terms=terms,
            )
            self._layers.append(layer)

    def __call__(self, view: _SiteOutput) -> tuple[Tensor, Tensor]:
        """The loss and the share of the top-k the touched rows lost, [copies]; see `TopKMargin`."""
        touched = view.touched
        assert touched is not None
        total, gone = (touched.logits.new_zeros(self._copies) for _ in range(2))
        for layer, ranks in zip(self._layers, touched.ranks, strict=True):
            lost, terms = layer.lost.expand(self._copies), layer.terms.expand(self._copies)
            if len(layer.rows):
                now = ranks.index_select(0, layer.spots)
                each = swap_gaps(now, layer.there, layer.members, layer.rowptr, layer.rows, self._k)
                margins, real = (part.view(self._copies, -1) for part in each)
                lost, terms = lost + (torch.sigmoid(margins) * real).sum(1), terms + real.sum(1)
                shown = self._k * (len(layer.rows) // self._copies)
                gone = gone + ((margins.detach() > 0) & real).sum(1) / shown
            total = total + lost / terms.clamp(min=1)
        measured = sum(len(layer.rows) > 0 for layer in self._layers)
        return total / max(1, len(self._layers)), gone / max(1, measured)
