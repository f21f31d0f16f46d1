"""What a model says of every node before and after the attack, as plain arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fgai.attacks import AttackResult
from fgai.attention import Observation, observe, prepared
from fgai.evaluation.curves import combined
from fgai.graph import Graph
from fgai.tasks import task_of

UNIT = 1e-6
"""Attention is carried as whole multiples of this."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class View:
    """One model on one graph.

    Attributes:
        rowptr: [N' + 1].
        source: [E'].
        weight: [E'] `LayerAttention.explanation`, mean over layers.
        predicted: [N'] class: of the node, of a pair it is an end of, or of its graph.
        confidence: [N'] its probability.
    """

    rowptr: Ints
    source: Ints
    weight: Floats
    predicted: Ints
    confidence: Floats

    @classmethod
    def of(cls, seen: Observation) -> Self:
        """Make the view from what a model showed."""
        layer = combined(seen.attention.explanations()).to("cpu")
        confidence, predicted = seen.logits.double().softmax(1).max(1)
        row = task_of(seen.graph).row_of(seen.graph)
        predicted = torch.where(row >= 0, predicted[row], 0)
        confidence = torch.where(row >= 0, confidence[row], 0.0)
        return cls(
            rowptr=layer.rowptr.numpy(),
            source=layer.source.numpy(),
            weight=layer.values[:, 0].numpy(),
            predicted=predicted.cpu().numpy(),
            confidence=confidence.cpu().numpy(),
        )

    def row(self, node: int) -> tuple[Ints, Floats]:
        """The neighbours of a node and the attention paid to each."""
        part = slice(int(self.rowptr[node]), int(self.rowptr[node + 1]))
        return self.source[part], self.weight[part]


@dataclass(frozen=True, eq=False)
class Seen:
    """One model before and after the attack.

    Attributes:
        name: of the row.
        clean: on the graph as given.
        attacked: on the attacked graph; its first N nodes are the original ones.
        new: [M, e] the nodes each injected node is joined to, or None.
        changed: nodes whose features the attack changed.
        ends: nodes the attack gave a new edge.
    """

    name: str
    clean: View
    attacked: View
    new: Ints | None
    changed: Ints
    ends: Ints

    @classmethod
    def of(cls, name: str, model: nn.Module, graph: Graph, attack: AttackResult) -> Self:
        """Run a model on the clean and on the attacked graph."""
        ends, rows, edges = attack.change.endpoints, attack.change.rows, attack.change.edges
        joined = [part.cpu().numpy().ravel() for part in (ends, edges) if part is not None]
        return cls(
            name=name,
            clean=View.of(observe(model, prepared(model, graph))),
            attacked=View.of(observe(model, attack.graph)),
            new=None if ends is None else ends.cpu().numpy().astype(np.int64),
            changed=np.zeros(0, np.int64) if rows is None else rows.cpu().numpy().astype(np.int64),
            ends=np.unique(np.concatenate([np.zeros(0, np.int64), *joined]).astype(np.int64)),
        )


def coded(weight: float | None) -> int | None:
    """Attention in units; None where the edge is not there."""
    return None if weight is None else round(weight / UNIT)
