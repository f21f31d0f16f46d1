"""The same training with another seed: whether the explanation is that of the data or of a draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from experiments.explained import K
from fgai import Graph, metrics
from fgai.attention import AttentionMap, observe, prepared

ANOTHER = "another seed"
"""Where the comparison stands among the evaluations of a record."""


def compared(models: Sequence[nn.Module], graph: Graph, vanilla: nn.Module) -> dict[str, Any]:
    """Compare the attention of two models on one graph, layer by layer.

    Returns:
        An evaluation with overlap of the top 5, rank correlation, and what chance gives.
    """
    first, second = (_attention(model, graph) for model in models)
    ours, theirs = first.align(second)
    pairs = list(zip(ours.layers, theirs.layers, strict=True))
    sharp = [metrics.sharpness(w.heads(), w.rowptr) for w in _attention(vanilla, graph).layers]

    def layered(values: Sequence[float | None]) -> dict[str, Any]:
        known = [value for value in values if value is not None]
        mean = sum(known) / len(known) if known else None
        return {"layers": list(values), "all": mean, "sharpest": values[sharp.index(max(sharp))]}

    rows = [(a.ranking(), b.ranking(), a.rowptr) for a, b in pairs]
    held = {
        "similarity": {
            "overlap": layered([metrics.overlap(*row, K) for row in rows]),
            "rank_correlation": layered([metrics.rank_correlation(*row) for row in rows]),
        },
        "overlap": {"chance": layered([metrics.overlap_chance(rowptr, K) for *_, rowptr in rows])},
        "sharpness": {"vanilla": layered(sharp)},
    }
    return {ANOTHER: {"metrics": held}}


def _attention(model: nn.Module, graph: Graph) -> AttentionMap:
    return observe(model, prepared(model, graph), heads="mean").attention
