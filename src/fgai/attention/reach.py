"""Touched nodes: which rows of each layer's attention a perturbation can have moved."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor

from fgai.attention.layer import LayerAttention
from fgai.attention.map import AttentionMap
from fgai.sparse import match_edges
from fgai.typed import typed


@typed
def touched_rows(before: AttentionMap, after: AttentionMap, changed: Tensor | None = None) -> list[Tensor]:
    """The nodes whose attention is within reach of a perturbation, layer by layer.

    With S_0 the injected nodes and those whose features changed, the row of node i is touched at layer l if

        i ∈ S_{l-1},  or j → i for some j ∈ S_{l-1},  or i gained or lost an incoming edge;

    and S_l holds S_{l-1} and the rows touched at layer l. A row outside cannot have moved: its scores read
    unchanged states over unchanged edges. Layers are followed in the order they ran, each over its own edges;
    entries of one layer, for its types of edges, read the same states, and a row touched in one is so in all.

    Args:
        before: attention on the original graph of N nodes.
        after: attention on the perturbed graph, whose first N nodes are the original ones.
        changed: [R] original nodes whose features changed, or None.

    Returns:
        Per layer bool [N].

    Example:
        >>> a = LayerAttention.from_edges(torch.ones(2, 1), [0, 1], [1, 2], num_nodes=3)
        >>> b = LayerAttention.from_edges(torch.ones(3, 1), [3, 0, 1], [0, 1, 2], num_nodes=4)
        >>> [rows.tolist() for rows in touched_rows(AttentionMap((a, a)), AttentionMap((b, b)))]
        [[True, False, False], [True, True, False]]
    """
    first = before.layers[0]
    num_nodes, device = first.num_nodes, first.values.device
    state = torch.zeros(after.layers[0].num_nodes, dtype=torch.bool, device=device)
    state[num_nodes:] = True
    if changed is not None:
        state[changed] = True
    out: list[Tensor] = []
    entries = zip(after.depths, before.layers, after.layers, strict=True)
    for _, side_by_side in groupby(entries, key=itemgetter(0)):
        pairs = [(old, new) for _, old, new in side_by_side]
        rows = state
        for old, new in pairs:
            reached = torch.zeros_like(state, dtype=torch.int32)
            reached = reached.index_add(0, new.destination, state[new.source].to(torch.int32))
            rows = rows | _edited_rows(old, new) | (reached > 0)
        state = rows
        out += [rows[:num_nodes]] * len(pairs)
    return out


def _edited_rows(old: LayerAttention, new: LayerAttention) -> Tensor:
    """Bool [N']: the nodes whose incoming edges are not those of the original graph."""
    edited = torch.zeros(new.num_nodes, dtype=torch.bool, device=new.values.device)
    ours, theirs = match_edges(old.keys, new.keys)
    for layer, kept in ((old, ours), (new, theirs)):
        if kept.numel() == layer.num_edges:
            continue
        fresh = torch.ones(layer.num_edges, dtype=torch.bool, device=edited.device)
        fresh[kept] = False
        edited[layer.destination[fresh]] = True
    return edited
