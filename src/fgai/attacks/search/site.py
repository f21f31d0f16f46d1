"""`Site`: the attacked model as a function of the new nodes' features alone, where they are joined."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fgai.attention import AttentionMap, call_model, observe
from fgai.graph import Graph, GraphChange
from fgai.objectives import Clean
from fgai.ops.rows import chosen_rows
from fgai.recompute import Edit, Recompute, Repeated, Touched, repeat_plan


class View(NamedTuple):
    """What the model says of several sets of features.

    Attributes:
        logits: [B, R, C] of the attacked rows that can have changed (`Site.rows`); [B, 0, C] where attention
            is read and only the rows in reach were computed.
        attention: of the whole graph for each set, heads averaged; None where not read or not whole.
        touched: what was computed again for all sets together, where only the rows in reach were.
    """

    logits: Tensor
    attention: list[AttentionMap] | None
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
        reads: whether attention is read.

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
        reads: bool,
    ) -> None:
        self.model, self.graph, self.endpoints, self.clean, self.reads = model, graph, endpoints, clean, reads
        self.recompute, self.plan, self.encodings = recompute, None, None
        change = GraphChange(endpoints=endpoints)
        if recompute is not None:
            self.plan = recompute.plan(Edit.of(change, graph), None if reads else clean.nodes, whole=reads)
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
        seen = [self._whole(rows) for rows in features]
        maps = [attention for _, attention in seen if attention is not None]
        return View(torch.stack([logits for logits, _ in seen]), maps or None, None)

    def _partial(self, features: Tensor) -> View:
        """Compute the rows in reach for all sets of features in one pass."""
        assert self.graph.features is not None and self.recompute is not None
        count = features.shape[0]
        appended = self.graph.features.append(features.flatten(0, 1))
        encodings = None if self.encodings is None else self.encodings.repeat(count, 1)
        plan = self.copies(count).plan
        touched = self.recompute.forward(plan, appended, encodings, logits=not self.reads)
        if self.reads:
            return View(touched.logits.expand(count, 0, -1), None, touched)
        logits = touched.logits.view(count, -1, touched.logits.shape[1])
        return View(chosen_rows(logits, self.kept, dim=1), None, touched)

    def _whole(self, features: Tensor) -> tuple[Tensor, AttentionMap | None]:
        assert self.graph.features is not None
        attacked = self.template.replace(features=self.graph.features.append(features))
        if not self.reads:
            return call_model(self.model, attacked).index_select(0, self.rows), None
        seen = observe(self.model, attacked, heads="mean", grad=True)
        return seen.logits.index_select(0, self.rows), seen.attention
