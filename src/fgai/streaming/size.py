"""How many bytes an exact pass over a stored graph writes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fgai import checks
from fgai.attention import adapter_of, evaluating, model_name
from fgai.attention.forward import HEADS
from fgai.errors import InputError
from fgai.sparse import Features
from fgai.typed import typed


class PassSize(NamedTuple):
    """Bytes on disk of what `observe_store` writes, but for the headings of the files.

    Attributes:
        kept: the result.
        running: while it runs, at the most.
    """

    kept: int
    running: int


@typed
def pass_size(
    model: nn.Module, num_nodes: int, num_edges: int, num_features: int, *, heads: str = "each"
) -> PassSize:
    """Say how many bytes `observe_store` writes for a graph without edge weights.

    One node goes through the model; what is written grows with nodes and edges alone.

    Args:
        model: as in `observe_store`.
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
        found = adapter_of(model).layerwise()
        if found is None:
            raise InputError(f"`model` must be one that `observe_store` takes, got {model_name(model)}")
        device = next(model.parameters()).device
        state = found.enter(Features.dense(torch.zeros(1, num_features, device=device)), None)
        entry = _row(state) if found.keeps_state and isinstance(state, Tensor) else 0
        sides, states = [], []
        for stage in found.stages:
            made = stage.layer.sides(state)
            sides.append(sum({id(side): _row(side) for side in made}.values()))
            before = state if found.keeps_state and isinstance(state, Tensor) else None
            state = after = stage.update(before, stage.layer.join(made[2]))
            states.append(_row(after))
        states[-1] += _row(found.leave(after))
    kept = running = 8 * (nodes + 1) + 4 * edges
    for number, stage in enumerate(found.stages):
        kept += nodes * states[number] + 4 * edges * (1 if heads == "mean" else stage.layer.heads)
        own_and_next = sum(sides[number : number + 2])
        running = max(running, kept + nodes * (entry + own_and_next))
    return PassSize(kept, running)


def _row(block: Tensor) -> int:
    """Bytes of one row."""
    return block[0].numel() * block.element_size()
