"""Read-outs: from one vector per node to a row of logits per link or graph."""

from __future__ import annotations

import torch
from torch import Tensor

from fgai.checks import edge_index, one_of, whole
from fgai.errors import InputError
from fgai.sparse.valid import LARGEST, check_index
from fgai.typed import typed

POOLINGS = ("mean", "max")
DECODERS = ("dot", "cosine")
SHARPNESS = 10.0
"""What the cosine of two embeddings is multiplied by, so that scores reach both sides of certainty."""


def link_scores(embedding: Tensor, pairs: Tensor, decoder: str = "dot") -> Tensor:
    """Score pairs of nodes by their embeddings: `⟨z_u, z_v⟩`, or ten times the cosine.

    Args:
        embedding: [N, D].
        pairs: [2, L].
        decoder: `dot` or `cosine`.

    Returns:
        [L], positive where a link is more likely than not.
    """
    one_of(decoder, "decoder", DECODERS)
    if decoder == "cosine":
        embedding = torch.nn.functional.normalize(embedding, dim=1) * SHARPNESS**0.5
    return (embedding[pairs[0]] * embedding[pairs[1]]).sum(-1)


@typed
def link_logits(embedding: Tensor, pairs: Tensor, decoder: str = "dot") -> Tensor:
    """Return [L, 2] logits `(−s/2, s/2)` of no link and link, whose cross-entropy is the binary one of s.

    Example:
        >>> link_logits(torch.tensor([[1.0, 1.0], [3.0, 1.0]]), torch.tensor([[0], [1]]))
        tensor([[-2.,  2.]])
    """
    if embedding.dim() != 2 or not embedding.is_floating_point():
        got = f"{embedding.dtype} {tuple(embedding.shape)}"
        raise InputError(f"`embedding` must be floating-point of shape [nodes, width], got {got}")
    edge_index(pairs, len(embedding), "pairs")
    half = link_scores(embedding, pairs, decoder) / 2
    return torch.stack([-half, half], dim=1)


@typed
def pool(nodes: Tensor, batch: Tensor | None, num_graphs: int, how: str) -> Tensor:
    """Mean or maximum of `nodes` [N, D] over each small graph → [G, D]; a graph without nodes gives zeros."""
    whole(num_graphs, "num_graphs", 0, LARGEST)
    if nodes.dim() != 2 or not nodes.is_floating_point():
        got = f"{nodes.dtype} {tuple(nodes.shape)}"
        raise InputError(f"`nodes` must be floating-point of shape [nodes, width], got {got}")
    if batch is not None and (batch.shape != nodes.shape[:1] or batch.dtype != torch.int64):
        got = f"{batch.dtype} {tuple(batch.shape)}"
        raise InputError(f"`batch` must be one graph number per node (torch.long), got {got}")
    if batch is not None:
        check_index(batch, num_graphs, "batch")
    if batch is None:
        batch = torch.zeros(nodes.shape[0], dtype=torch.long, device=nodes.device)
    if one_of(how, "pooling", POOLINGS) == "mean" and nodes.is_cuda:
        # Sums over sorted rows: the same from run to run, which adding in any order is not.
        ordered, order = torch.sort(batch, stable=True)
        bounds = torch.searchsorted(ordered, torch.arange(num_graphs + 1, device=batch.device))
        rows = nodes.index_select(0, order)
        total = torch.segment_reduce(rows, "sum", offsets=bounds, initial=0.0, unsafe=True)
        return total / bounds.diff().clamp(min=1)[:, None]
    if how == "mean":
        total = nodes.new_zeros(num_graphs, nodes.shape[1]).index_add(0, batch, nodes)
        counts = torch.bincount(batch, minlength=num_graphs).clamp(min=1)
        return total / counts[:, None]
    index = batch[:, None].expand_as(nodes)
    out = nodes.new_zeros(num_graphs, nodes.shape[1])
    return out.scatter_reduce(0, index, nodes, "amax", include_self=False)
