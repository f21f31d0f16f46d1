"""New nodes joined to a sorted graph, on the fastest kernel at hand."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai.errors import InputError
from fgai.ops.backend import has_numba, has_triton
from fgai.sparse import Adjacency
from fgai.sparse.valid import check_index
from fgai.typed import typed


@typed
def attach(adjacency: Adjacency, targets: Tensor, loops: bool) -> tuple[Adjacency, Tensor]:
    """Add new nodes, each joined to some old ones by edges in both directions.

    On a GPU nothing waits for the device and every shape follows from those of the arguments, so that
    a CUDA graph can hold it.

    Args:
        adjacency: the old edges.
        targets: [M, e] on the same device, old nodes that differ within a row.
        loops: also give every new node an edge to itself.

    Returns:
        The new adjacency, and [E] the new positions of the old edges.

    Raises:
        InputError: `targets` is no matrix of nodes of `adjacency` on its device, or names one twice in a row.
    """
    check_targets(targets, adjacency)
    return attach_known(adjacency, targets, loops)


def check_targets(targets: Tensor, adjacency: Adjacency) -> None:
    """Raise unless `targets` names old nodes that differ within a row; read once for a tensor."""
    if targets.dim() != 2 or targets.dtype != torch.int64:
        got = f"{targets.dtype} {tuple(targets.shape)}"
        raise InputError(
            f"`targets` must be integers (torch.long) of shape [new nodes, edges each], got {got}"
        )
    if targets.device != adjacency.device:
        raise InputError(f"`targets` must be on {adjacency.device}, as the edges are, got {targets.device}")
    check_index(targets, adjacency.num_nodes, "targets")
    ordered = targets.sort(dim=1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise InputError("`targets` must name distinct nodes in each row")


def attach_known(adjacency: Adjacency, targets: Tensor, loops: bool) -> tuple[Adjacency, Tensor]:
    """`attach` for targets that are known to fit, as those fgai draws: nothing is read or waited for."""
    adjacency.check_outgoing()
    if targets.is_cuda and has_triton():
        from fgai.ops.gpu.attach import attach as attach_on_gpu

        return attach_on_gpu(adjacency, targets, loops)
    if adjacency.device.type == "cpu" and has_numba():
        from fgai.ops.cpu.attach import attach as attach_on_cpu

        return attach_on_cpu(adjacency, targets, loops)
    m, e = targets.shape
    new = torch.arange(adjacency.num_nodes, adjacency.num_nodes + m, device=adjacency.device)
    spread, ends = new[:, None].expand(m, e).flatten(), targets.flatten()
    edges = torch.stack([torch.cat([spread, ends]), torch.cat([ends, spread])])
    if loops:
        edges = torch.cat([edges, new.expand(2, m)], dim=1)
    return adjacency.merge(edges, adjacency.num_nodes + m)
