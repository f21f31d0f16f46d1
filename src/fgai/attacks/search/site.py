"""`Site`: the attacked model as a function of the new nodes' features alone, where they are joined."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fgai.attention import AttentionMap, call_model, observe
from fgai.graph import Graph, GraphChange
from fgai.objectives import Clean
from fgai.ops.capture import chosen_rows
from fgai.recompute import Edit, Recompute, Repeated, Touched, repeat_plan


class View(NamedTuple):
    """The model's output for several sets of features.

    Attributes:
        logits: [B, R, C] of the attacked rows that can have changed (`Site.rows`); [B, 0, C] where attention
            is read and only the rows in reach were computed.
        outputs: for each set the logits and the attention of the whole graph, the latter empty where it is
            not read; None where only the rows in reach were computed.
        touched: what was computed again for all sets together, where only the rows in reach were.
    """

    logits: Tensor
    outputs: list[tuple[Tensor, AttentionMap]] | None
    touched: Touched | None


class Site:
    """New nodes joined at fixed endpoints; only their features move.

    What depends on the edges alone is done once. Where few rows are in reach only those are computed, for
    several sets of features in one pass.

    Args:
        model: attacked (or a stand-in for its gradients), in eval mode.
        graph: clean, prepared for the model.
        endpoints: [M, e].
        clean: what the model said before.
        recompute: the model on the clean graph, ready for partial passes, or None.
        reads: what the objective reads, see `Objective.reads`.

    Attributes:
        rows: [R] rows of the logits under attack that can change.
        passes: forward passes so far, one for each set of features.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        endpoints: Tensor,
        clean: Clean,
        recompute: Recompute | None,
        *,
        reads: str,
    ) -> None:
        self.model, self.graph, self.endpoints, self.clean = model, graph, endpoints, clean
        self.reads, attends = reads, reads != "logits"
        self.recompute, self.plan, self.encodings = recompute, None, None
        change = GraphChange(endpoints=endpoints)
        if recompute is not None:
            self.plan = recompute.plan(
                Edit.of(change, graph), None if attends else clean.nodes, whole=attends
            )
        if recompute is not None and self.plan is not None:
            self.encodings = recompute.encodings(self.plan, change)
            attacked = torch.zeros(graph.num_nodes + len(endpoints), dtype=torch.bool, device=graph.device)
            attacked[clean.nodes] = True
            self.kept = attacked[self.plan.nodes].nonzero().flatten()
            self.rows = self.plan.nodes[self.kept]
        else:
            self.template = change.apply(graph)[0]
            self.rows = clean.nodes
        self.passes = 0
        self._copies: dict[int, Repeated] = {}

    @property
    def share(self) -> float:
        """Work of one pass as a share of a full one."""
        return 1.0 if self.plan is None else self.plan.share

    def copies(self, count: int) -> Repeated:
        """The plan for `count` sets of features at once, made once."""
        assert self.plan is not None
        if count not in self._copies:
            self._copies[count] = repeat_plan(self.plan, count)
        return self._copies[count]

    def view(self, features: Tensor) -> View:
        """Run the model with each of these features [B, M, F] of the new nodes; gradients reach them."""
        self.passes += len(features)
        if self.plan is not None:
            return self._partial(features)
        outputs = [self._whole(rows) for rows in features]
        return View(torch.stack([logits[self.rows] for logits, _ in outputs]), outputs, None)

    def _partial(self, features: Tensor) -> View:
        """Compute the rows in reach for all sets of features in one pass."""
        assert self.graph.features is not None and self.recompute is not None
        count = features.shape[0]
        appended = self.graph.features.append(features.flatten(0, 1))
        encodings = None if self.encodings is None else self.encodings.repeat(count, 1)
        plan = self.copies(count).plan
        attends = self.reads != "logits"
        touched = self.recompute.forward(plan, appended, encodings, logits=not attends)
        if attends:
            return View(touched.logits.expand(count, 0, -1), None, touched)
        logits = touched.logits.view(count, -1, touched.logits.shape[1])
        return View(chosen_rows(logits, self.kept, dim=1), None, touched)

    def _whole(self, features: Tensor) -> tuple[Tensor, AttentionMap]:
        assert self.graph.features is not None
        attacked = self.template.replace(features=self.graph.features.append(features))
        return read_model(self.model, attacked, self.reads)


def read_model(model: nn.Module, graph: Graph, reads: str) -> tuple[Tensor, AttentionMap]:
    """Return the logits and as much of the attention as an objective reads, with gradients."""
    if reads == "logits":
        return call_model(model, graph), AttentionMap(())
    output = observe(model, graph, heads="mean" if reads == "ranking" else "each", grad=True)
    return output.logits, output.attention
