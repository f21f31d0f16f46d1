"""How many bytes a graph takes: on disk, while it is converted, and in memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fgai import checks
from fgai.attention import adapter_of, evaluating, model_name
from fgai.attention.calls import HEADS
from fgai.errors import InputError
from fgai.large.stored import DTYPES
from fgai.sparse import Features
from fgai.sparse.valid import LARGEST
from fgai.typed import typed

CONVERTING = 270 << 20
"""Bytes of memory that a conversion needs for one block of edges or features, whatever the graph."""


class GraphSize(NamedTuple):
    """Bytes of a graph.

    Attributes:
        stored: on disk, but for the headings of the files, a hundred bytes each.
        converting: on disk while an edge list is converted, at the most; the sources are not counted.
        converting_memory: in memory meanwhile.
        loaded: in memory as a `Graph`; kernels add 12 for each edge and 8 for each node.
    """

    stored: int
    converting: int
    converting_memory: int
    loaded: int


@typed
def graph_size(
    num_nodes: int, num_edges: int, num_features: int = 0, *, labels: bool = False, weights: bool = False
) -> GraphSize:
    """Return how many bytes a graph with dense features takes.

    Args:
        num_nodes: N.
        num_edges: E as stored: with the reverses of undirected ones.
        num_features: F.
        labels: whether nodes have classes.
        weights: whether edges have weights.

    Raises:
        InputError: a number is negative, or too large for a stored graph.

    Example:
        >>> graph_size(10, 50, 4).stored, graph_size(10, 50, 4).loaded
        (448, 1536)
    """
    nodes = checks.whole(num_nodes, "num_nodes", 1, LARGEST)
    edges = checks.whole(num_edges, "num_edges", 0)
    width = {name: np.dtype(kind).itemsize for name, kind in DTYPES.items()}
    of_nodes = nodes * (checks.whole(num_features, "num_features", 0) * width["x"] + labels * width["y"])
    of_edges = edges * weights * width["edge_weight"]
    pointers, ends = (nodes + 1) * width["rowptr"], edges * width["source"]
    return GraphSize(
        stored=of_nodes + pointers + ends + of_edges,
        # Edges as they came, source and destination, beside the same in their rows.
        converting=of_nodes + pointers + 3 * ends + 2 * of_edges,
        converting_memory=CONVERTING + 2 * pointers,
        # Pointers, source, destination and order of the outgoing view are int64 there.
        loaded=of_nodes + 2 * pointers + 3 * edges * 8 + of_edges,
    )


class PassSize(NamedTuple):
    """Bytes that `observe_store` writes, but for headings: `kept`, and at most while `running`."""

    kept: int
    running: int


@typed
def pass_size(
    model: nn.Module, num_nodes: int, num_edges: int, num_features: int, *, heads: str = "each"
) -> PassSize:
    """Return how many bytes `observe_store` writes for a graph without edge weights.

    Args:
        model: as in `observe_store`; one node goes through it.
        num_nodes: N.
        num_edges: E that the model reads: with the self-loops it adds.
        num_features: F.
        heads: as in `observe_store`.

    Raises:
        InputError: the model cannot be computed row by row.
    """
    checks.one_of(heads, "heads", HEADS)
    nodes, edges = checks.whole(num_nodes, "num_nodes", 1), checks.whole(num_edges, "num_edges", 0)
    checks.memory(checks.whole(num_features, "num_features", 0), 4, "num_features")
    with evaluating(model), torch.no_grad():
        plan = adapter_of(model).layerwise()
        if plan is None:
            raise InputError(f"`model` must be one that `observe_store` takes, got {model_name(model)}")
        device = next(model.parameters()).device
        state = plan.enter(Features.dense(torch.zeros(1, num_features, device=device)), None)
        entry = _row(state) if plan.keeps_state and isinstance(state, Tensor) else 0
        sides, states = [], []
        for stage in plan.stages:
            projections = stage.layer.sides(state)
            sides.append(sum({id(side): _row(side) for side in projections}.values()))
            before = state if plan.keeps_state and isinstance(state, Tensor) else None
            state = after = stage.update(before, stage.layer.join(projections[2]))
            states.append(_row(after))
        states[-1] += _row(plan.leave(after))
    kept = running = 8 * (nodes + 1) + 4 * edges
    for number, stage in enumerate(plan.stages):
        kept += nodes * states[number] + 4 * edges * (1 if heads == "mean" else stage.layer.heads)
        own_and_next = sum(sides[number : number + 2])
        running = max(running, kept + nodes * (entry + own_and_next))
    return PassSize(kept, running)


def _row(block: Tensor) -> int:
    return block[0].numel() * block.element_size()
