"""Touched nodes, layer by layer: those whose attention a perturbation can change or did change."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter

import torch
from torch import Tensor, nn

from fgai import checks
from fgai.attention.calls import Observation, _differ, call_model
from fgai.attention.hooks import _unrecorded_layers
from fgai.attention.interface import evaluating, model_name, uncompiled, unwrapped
from fgai.attention.layer import LayerAttention
from fgai.attention.map import AttentionMap
from fgai.errors import ReliabilityWarning, warn
from fgai.sparse import match_edges
from fgai.tasks import task_of
from fgai.typed import typed

LISTED = 8  # most modules that a warning names
SMALL = 64  # relative changes up to this many machine epsilons are rounding


@typed
def touched_rows(before: AttentionMap, after: AttentionMap, changed: Tensor | None = None) -> list[Tensor]:
    """Return the nodes whose attention a perturbation can change or did change, bool [N] per layer.

    Let S_0 be the injected nodes and those whose features changed. Node i is in reach at layer l if

        i ∈ S_{l-1},  or j → i for some j ∈ S_{l-1},  or i gained or lost an incoming edge;

    and S_l is S_{l-1} and the nodes in reach at layer l. Several edge types of one layer count as one layer.
    Nodes whose attention changed by more than rounding are touched, too: a normalisation over all nodes, a
    virtual node or attention that is not recorded can carry a change further. `changed` [R] are the nodes
    whose features changed; the first N nodes of `after` are those of `before`.
    """
    return [reach | moved for reach, moved in zip(*_reach_and_moved(before, after, changed), strict=True)]


@typed
def warn_unread(model: nn.Module) -> None:
    """Warn if a model has attention that is not recorded (`unread-attention`), and name the modules."""
    layers = [f"{name} ({kind})" for name, kind in _unrecorded_layers(unwrapped(uncompiled(model))).items()]
    if layers:
        more = f" and {len(layers) - LISTED} more" if len(layers) > LISTED else ""
        text = f"{model_name(model)} also attends in {', '.join(layers[:LISTED])}{more}, which fgai does not"
        text += " record: the attention shown and compared is not all of its attention"
        warn(ReliabilityWarning("unread-attention", text))


@typed
def warn_coupled(
    model: nn.Module, before: Observation, after: Observation, changed: Tensor | None = None
) -> None:
    """Warn if a perturbation changed nodes that are not in reach, see `touched_rows` (`global-coupling`).

    Compares attention and logits on the graph before the perturbation and after it. A model whose outputs
    differ from call to call is not checked.
    """
    reach, moved = _reach_and_moved(before.attention, after.attention, changed)
    rows = task_of(before.graph).rows_predicted_from(before.graph, reach[-1])
    old, new = before.logits.detach(), after.logits.detach()[: len(before.logits)]
    moves = (old - new).abs().amax(1) / old.abs().max().clamp(min=torch.finfo(old.dtype).tiny)
    outputs = _moved(moves, rows)
    pairs = zip(reach, moved, strict=True)
    beyond = torch.stack([(changes & ~inside).sum() for inside, changes in pairs]).max()
    if not bool((outputs & ~rows).any()) and not int(beyond):
        return
    with evaluating(model), torch.no_grad():
        if _differ(old, call_model(model, before.graph)):
            return
    others = int((outputs & ~rows).sum())
    text = f"other layers of {model_name(model)} join nodes, too: {int(rows.sum())} of {len(rows)} outputs"
    text += f" are in reach of the attack along the recorded attention, but {others} others changed, and"
    text += f" so did the attention of {int(beyond)} nodes out of reach; those count as touched"
    warn(ReliabilityWarning("global-coupling", text))


def _reach_and_moved(
    before: AttentionMap, after: AttentionMap, changed: Tensor | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the nodes in reach, and those that changed by more than rounding; bool [N] per layer."""
    first = before.layers[0]
    num_nodes, device = first.num_nodes, first.values.device
    state = torch.zeros(after.layers[0].num_nodes, dtype=torch.bool, device=device)
    state[num_nodes:] = True
    if changed is not None:
        state[:num_nodes][checks.positions(changed, num_nodes, "changed")] = True
    reach: list[Tensor] = []
    moved: list[Tensor] = []
    entries = zip(after.depths, before.layers, after.layers, strict=True)
    for _, of_layer in groupby(entries, key=itemgetter(0)):
        pairs = [(old, new) for _, old, new in of_layer]
        rows, moves = state, first.values.new_zeros(len(state))
        for old, new in pairs:
            reached = torch.zeros_like(state, dtype=torch.int32)
            reached = reached.index_add(0, new.destination, state[new.source].to(torch.int32))
            edited, shift = _compared(old, new)
            rows, moves = rows | edited | (reached > 0), torch.maximum(moves, shift)
        state = rows
        reach += [rows[:num_nodes]] * len(pairs)
        moved += [_moved(moves[:num_nodes], rows[:num_nodes])] * len(pairs)
    return reach, moved


def _moved(moves: Tensor, reach: Tensor) -> Tensor:
    """Return the changed nodes, bool [N]; all False unless a node out of reach clearly changed."""
    eps = torch.finfo(moves.dtype).eps
    coupled = ((moves > eps**0.5) & ~reach).any()
    return torch.where(coupled, moves > SMALL * eps, False)


def _compared(old: LayerAttention, new: LayerAttention) -> tuple[Tensor, Tensor]:
    """Return the nodes [N'] whose incoming edges differ, and the relative change on common edges [N']."""
    edited = torch.zeros(new.num_nodes, dtype=torch.bool, device=new.values.device)
    ours, theirs = match_edges(old.keys, new.keys)
    for layer, common in ((old, ours), (new, theirs)):
        if common.numel() == layer.num_edges:
            continue
        unmatched = torch.ones(layer.num_edges, dtype=torch.bool, device=edited.device)
        unmatched[common] = False
        edited[layer.destination[unmatched]] = True
    values, rows = old.heads().detach(), old.destination
    zeros = values.new_zeros(new.num_nodes)
    largest = zeros.scatter_reduce(0, rows, values.abs(), "amax")
    difference = (values[ours] - new.heads().detach()[theirs]).abs()
    shift = zeros.scatter_reduce(0, rows[ours], difference, "amax")
    return edited, torch.where(largest > 0, shift / largest, 0.0)
