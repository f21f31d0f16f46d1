"""`Site`: the attacked model as a function of the new nodes' features alone, where they are joined."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fgai.attention import AttentionMap, call_model, observe
from fgai.graph import Graph, GraphChange
from fgai.objectives import Clean
from fgai.recompute import Edit, Recompute, Touched


class View(NamedTuple):
    """What the model says with some features.

    Attributes:
        rows: [R] rows of the logits under attack that can have changed.
        logits: [R, C] there.
        attention: of all layers, heads averaged, where the whole graph was computed and attention is read.
        touched: what was computed again, where only the rows in reach were.
    """

    rows: Tensor
    logits: Tensor
    attention: AttentionMap | None
    touched: Touched | None


class Site:
    """New nodes joined at fixed endpoints; only their features move.

    What depends on the edges alone is done once. Where few rows are in reach only those are computed.

    Args:
        model: attacked (or a stand-in for its gradients), in eval mode.
        graph: clean, prepared for the model.
        endpoints: [M, e].
        clean: what the model said before.
        again: the model on the clean graph, ready for partial passes, or None.
        reads: whether attention is read.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        endpoints: Tensor,
        clean: Clean,
        again: Recompute | None,
        *,
        reads: bool,
    ) -> None:
        self.model, self.graph, self.endpoints, self.clean, self.reads = model, graph, endpoints, clean, reads
        self.again, self.plan, self.encodings = again, None, None
        change = GraphChange(endpoints=endpoints)
        if again is not None:
            self.plan = again.plan(Edit.of(change, graph), None if reads else clean.nodes, whole=reads)
        if again is not None and self.plan is not None:
            self.encodings = again.encodings(self.plan, change)
            attacked = torch.zeros(graph.num_nodes + len(endpoints), dtype=torch.bool, device=graph.device)
            attacked[clean.nodes] = True
            self.kept = attacked[self.plan.nodes].nonzero().flatten()
            self.rows = self.plan.nodes[self.kept]
        else:
            self.template = change.apply(graph)[0]
            self.rows = clean.nodes
        self.passes = 0

    @property
    def share(self) -> float:
        """Work of one pass as a share of a full one."""
        return 1.0 if self.plan is None else self.plan.share

    def view(self, features: Tensor) -> View:
        """Run the model with these features [M, F] of the new nodes; gradients reach them."""
        assert self.graph.features is not None
        self.passes += 1
        appended = self.graph.features.append(features)
        if self.again is not None and self.plan is not None:
            touched = self.again.forward(self.plan, appended, self.encodings)
            return View(self.rows, touched.logits.index_select(0, self.kept), None, touched)
        attacked = self.template.replace(features=appended)
        if not self.reads:
            return View(self.rows, call_model(self.model, attacked).index_select(0, self.rows), None, None)
        logits, attention = observe(self.model, attacked)
        return View(self.rows, logits.index_select(0, self.rows), attention, None)
