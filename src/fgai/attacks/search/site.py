"""`_InjectionSite`: the attacked model as a function of the values that an attack changes."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fgai.attention import AttentionMap, call_model, entry_limits, observe, replacing_entry
from fgai.graph import Graph, GraphChange
from fgai.objectives import Clean
from fgai.recompute import PartialOutput, Plan, PlanCopies, Recompute


class _SiteOutput(NamedTuple):
    """The model's output for B sets of values."""

    logits: Tensor  # [B, R, C] of `_InjectionSite.rows`; [B, 0, C] where a partial pass reads attention
    outputs: list[tuple[Tensor, AttentionMap]] | None  # of full passes, logits and attention of each set
    touched: PartialOutput | None  # of partial passes, the rows in reach of all sets together


@dataclass(eq=False, repr=False)
class _InjectionSite:
    """A change with fixed edges; only the features of new nodes, their values or changed rows move.

    Where few rows are in reach (`plan`) only those are computed, for several sets of values in one pass.
    `rows` [R] are the attacked rows of the logits that can change; `passes` counts forward passes, one for
    each set of values.
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
        self._copies: dict[int, PlanCopies] = {}
        plan = None
        if self.recompute is not None:
            attends = self.reads != "logits"
            rows = None if attends else self.clean.nodes
            plan = self.recompute.plan(self.change, rows, all_rows=attends)
        self._set_plan(plan)

    def _set_plan(self, plan: Plan | None) -> None:
        self.plan, self._encodings, self.share = plan, None, 1.0  # `share` of the work of a full pass
        if plan is None:
            self._template, self.rows = self.change.apply(self.graph)[0], self.clean.nodes
        else:
            assert self.recompute is not None
            self._encodings, self.rows = self.recompute.encodings(plan, self.change), plan.nodes
            self.share = plan.share

    def copies(self, count: int) -> PlanCopies:
        """The plan for `count` sets of values at once, made once."""
        assert self.plan is not None
        if count not in self._copies:
            self._copies[count] = self.plan.copies(count)
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
        """The change with `count` sets of values, one after the other."""
        change = replace(self.change, **{self.variable: values})
        if self.variable == "entry_values" and change.features is not None:
            change = replace(change, features=change.features.repeat(count, 1))
        return change

    def _partial(self, change: GraphChange, count: int) -> _SiteOutput:
        """Compute the rows in reach for all sets of values in one pass."""
        self.passes += count
        assert self.recompute is not None and self.plan is not None
        features, encodings, plan = change.features_on(self.graph), self._encodings, self.plan
        assert features is not None
        if count > 1:
            plan = self.copies(count).plan
            encodings = None if encodings is None else encodings.repeat(count, 1)
        read = self.reads == "logits"
        values = change.entry_values
        with nullcontext() if values is None else replacing_entry(entry_limits(self.model), values):
            touched = self.recompute.forward(plan, features, encodings, logits=read)
        if not read:
            return _SiteOutput(touched.logits.expand(count, 0, -1), None, touched)
        return _SiteOutput(touched.logits.view(count, -1, touched.logits.shape[1]), None, touched)

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
