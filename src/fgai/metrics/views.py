"""`Views`: what an evaluation shows to a metric."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fgai.attention import AttentionMap
from fgai.graph import Graph
from fgai.typed import typed


@typed
@dataclass(frozen=True, eq=False, kw_only=True)
class Views:
    """A model's outputs on the clean and on the attacked graph.

    Views are `clean`, `attacked` (the attack on predictions) and, where that is run, `attacked_explanation`.
    Original nodes come first on attacked graphs; edges are matched by `AttentionMap.align`.

    Attributes:
        graph: the original one.
        logits: by view, a row per node, link or small graph.
        attention: by view, heads averaged, [E, 1] per layer.
        target: true classes of all rows, or None.
        rows: [T] the rows that are scored.
        k: size of a node's explanation.
    """

    graph: Graph
    logits: Mapping[str, Tensor]
    attention: Mapping[str, AttentionMap]
    target: Tensor | None
    rows: Tensor
    k: int
