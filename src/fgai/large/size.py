"""How many bytes a graph takes: on disk, while it is converted, and in memory."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fgai import checks
from fgai.attention import evaluating, model_name, stages_of
from fgai.attention.calls import HEADS
from fgai.errors import InputError
from fgai.large.stored import DTYPES
from fgai.sparse import Features
from fgai.sparse.valid import LARGEST
from fgai.typed import typed

CONVERSION_MEMORY = 270 << 20  # bytes that a conversion needs for one block of edges or features


class GraphSize(NamedTuple):
    """Bytes of a graph, without the headers of files, a hundred bytes each."""

    disk: int  # of the folder
    conversion_disk: int  # peak while an edge list is converted, without its sources
    conversion_memory: int  # peak meanwhile
    memory: int  # as a `Graph`; kernels add 12 for each edge and 8 for each node


@typed
def graph_size(
    num_nodes: int, num_edges: int, num_features: int = 0, *, labels: bool = False, weights: bool = False
) -> GraphSize:
    """Return how many bytes a graph with dense features takes; edges include reverses of undirected ones.

    Example:
        >>> graph_size(10, 50, 4).disk, graph_size(10, 50, 4).memory
        (448, 1536)
    """
    nodes = checks.whole(num_nodes, "num_nodes", 1, LARGEST)
    edges = checks.whole(num_edges, "num_edges", 0)
    width = {name: np.dtype(kind).itemsize for name, kind in DTYPES.items()}
    of_nodes = nodes * (checks.whole(num_features, "num_features", 0) * width["x"] + labels * width["y"])
    of_edges = edges * weights * width["edge_weight"]
    pointers, ends = (nodes + 1) * width["rowptr"], edges * width["source"]
    return GraphSize(
        disk=of_nodes + pointers + ends + of_edges,
        # Spooled edges, source and destination, beside the same edges in rows.
        conversion_disk=of_nodes + pointers + 3 * ends + 2 * of_edges,
        conversion_memory=CONVERSION_MEMORY + 2 * pointers,
        # Pointers, source, destination and the order of outgoing edges are int64.
        memory=of_nodes + 2 * pointers + 3 * edges * 8 + of_edges,
    )


class PassSize(NamedTuple):
    """Bytes that `observe_store` writes, without headers of files: of the `result`, and at the `peak`."""

    result: int
    peak: int


@typed
def pass_size(
    model: nn.Module, num_nodes: int, num_edges: int, num_features: int, *, heads: str = "each"
) -> PassSize:
    """Return how many bytes `observe_store` writes for a graph without edge weights.

    The edges include self-loops that the model adds. `InputError` if it cannot be computed row by row.
    """
    checks.one_of(heads, "heads", HEADS)
    nodes, edges = checks.whole(num_nodes, "num_nodes", 1), checks.whole(num_edges, "num_edges", 0)
    checks.memory(checks.whole(num_features, "num_features", 0), 4, "num_features")
    with evaluating(model), torch.no_grad():
        plan = stages_of(model)
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
    result = peak = 8 * (nodes + 1) + 4 * edges
    for number, stage in enumerate(plan.stages):
        result += nodes * states[number] + 4 * edges * (1 if heads == "mean" else stage.layer.heads)
        own_and_next = sum(sides[number : number + 2])
        peak = max(peak, result + nodes * (entry + own_and_next))
    return PassSize(result, peak)


def _row(block: Tensor) -> int:
    return block[0].numel() * block.element_size()
