"""How the rows are divided among GPU programs: long rows in pieces, the longest work first."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fgai.ops.adjacency import Adjacency

# A node with ten thousand neighbours would keep one program busy long after all others have ended, so no
# program gets more edges than this; what the pieces of a row found is put together afterwards.
PIECE = 256


class Work(NamedTuple):
    """Pieces of rows of the incoming or outgoing view, by falling size; all int32.

    Attributes:
        row: [P] node of each piece.
        first: [P] its first position in the view.
        last: [P] one after its last position.
        slot: [P] where it leaves its part of the result, -1 when it is the whole row.
        split_row: [R] nodes in more than one piece.
        split_slot: [R + 1] their slots.
        slots: number of slots.
        pointer: [N + 1] of the view.
        edge: [E] position of each edge in the incoming view.
        node: [E] the node at the other end.
    """

    row: Tensor
    first: Tensor
    last: Tensor
    slot: Tensor
    split_row: Tensor
    split_slot: Tensor
    slots: int
    pointer: Tensor
    edge: Tensor
    node: Tensor

    @property
    def pieces(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The first arguments of every kernel over pieces."""
        return self.row, self.first, self.last, self.slot


def _divide(pointer: Tensor, edge: Tensor, node: Tensor) -> Work:
    degree = pointer[1:] - pointer[:-1]
    count = torch.clamp((degree + PIECE - 1) // PIECE, min=1)
    row = torch.repeat_interleave(torch.arange(len(count), device=pointer.device), count.long())
    within = torch.arange(len(row), device=pointer.device) - (torch.cumsum(count, 0) - count)[row]
    first = pointer[row] + within * PIECE
    last = torch.minimum(first + PIECE, pointer[row + 1])
    split = count[row] > 1
    slot = torch.where(split, torch.cumsum(split, 0) - 1, -1)
    order = torch.argsort(last - first, descending=True, stable=True)
    split_row = torch.nonzero(count > 1).flatten()
    split_slot = torch.nn.functional.pad(torch.cumsum(count[split_row], 0), (1, 0))
    row, first, last, slot = (t[order].to(torch.int32) for t in (row, first, last, slot))
    ends = split_row.to(torch.int32), split_slot.to(torch.int32)
    return Work(row, first, last, slot, *ends, int(split.sum()), pointer, edge, node)


def incoming(adjacency: Adjacency) -> Work:
    """Return the work over incoming edges (`edge` is not used: positions are the edges), made once."""
    if "_gpu_incoming" not in adjacency.__dict__:
        index = adjacency.index32
        adjacency.__dict__["_gpu_incoming"] = _divide(index.rowptr, index.source, index.source)
    made = adjacency.__dict__["_gpu_incoming"]
    assert isinstance(made, Work)
    return made


def outgoing(adjacency: Adjacency) -> Work:
    """Return the work over outgoing edges, made once."""
    if "_gpu_outgoing" not in adjacency.__dict__:
        index = adjacency.index32
        adjacency.__dict__["_gpu_outgoing"] = _divide(
            index.colptr, index.csc, index.destination[adjacency.csc]
        )
    made = adjacency.__dict__["_gpu_outgoing"]
    assert isinstance(made, Work)
    return made
