"""Rows of a CSR array: sums, maxima and orders of the incoming edges of every node.

Row i of `values` is `values[rowptr[i]:rowptr[i+1]]`, possibly empty (`rowptr` int64, [N+1]). Nothing here
waits for a CUDA device, so all of it can be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fgai.errors import InputError
from fgai.sparse.valid import check_pointers
from fgai.sparse.valid import row_index as row_index
from fgai.typed import typed


def check_rows(values: Tensor, rowptr: Tensor, name: str = "values") -> None:
    """Raise unless `values` [E, ...] has one entry per edge and `rowptr` [N+1] points into it."""
    if values.dim() < 1:
        raise InputError(f"`{name}` must have one entry per edge, got a single number")
    check_row_pointers(rowptr, values.shape[0], f"entries of `{name}`")
    if values.device != rowptr.device:
        got = f"{values.device} and {rowptr.device}"
        raise InputError(f"`{name}` and `rowptr` must be on one device, got {got}")


def check_row_pointers(rowptr: Tensor, num_edges: int | None = None, entries: str = "edges") -> None:
    """Raise unless `rowptr` is int64 [N+1] and rises from 0 to `num_edges` (None: to any number)."""
    if rowptr.dim() != 1 or rowptr.numel() < 1 or rowptr.dtype != torch.int64:
        got = f"{rowptr.dtype} {tuple(rowptr.shape)}"
        raise InputError(f"`rowptr` must be an int64 tensor of shape [num_nodes + 1], got {got}")
    check_pointers(rowptr, num_edges, "rowptr", entries)


@typed
def row_sum(values: Tensor, rowptr: Tensor) -> Tensor:
    """Sum over each row, `s_i = sum_{e in row i} values_e`; 0 for an empty row.

    `values` [E] or [E, H] are floating or integer (integers and booleans give int64). Deterministic on every
    device, and differentiable once.

    Example:
        >>> row_sum(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0, 2, 2, 3])).tolist()
        [3.0, 0.0, 5.0]
    """
    check_rows(values, rowptr)
    if not values.is_floating_point():
        return row_sum(values.double(), rowptr).long()  # exact below 2^53 edges
    return _segment_reduce(values, rowptr, "sum", 0)


def row_max(values: Tensor, rowptr: Tensor) -> Tensor:
    """Largest value of each row, [N] or [N, H]; minus infinity for an empty row. Not differentiable."""
    return _segment_reduce(values.detach(), rowptr, "max", float("-inf"))


def _segment_reduce(values: Tensor, rowptr: Tensor, how: str, initial: float) -> Tensor:
    if rowptr.numel() == 1:
        return values.new_zeros((0, *values.shape[1:]))
    values = values.contiguous()
    return torch.segment_reduce(values, how, offsets=rowptr, axis=0, unsafe=True, initial=initial)


def row_order(values: Tensor, rowptr: Tensor) -> Tensor:
    """Edge positions [E], row after row, each row from its largest value to its smallest; ties in edge order.

    The s-th largest edge of row i is `order[rowptr[i] + s]`. `values` [E] may be infinite but not NaN.
    """
    check_rows(values, rowptr)
    if values.dim() != 1:
        shape = tuple(values.shape)
        raise InputError(f"`values` must have shape [num_edges], got {shape}; average the heads first")
    values, row = prepare_values(values), row_index(rowptr, values.shape[0])
    if values.dtype == torch.float64:
        by_value = torch.sort(values, descending=True, stable=True).indices
        return by_value[torch.sort(row[by_value], stable=True).indices]
    # One sort instead of two: the bits of an IEEE float, flipped if negative, have its order as an integer.
    # Adding 0.0 turns -0.0 into 0.0.
    bits = (values + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return torch.sort((row << 32) + (2**31 - 1 - ordered), stable=True).indices


def prepare_values(values: Tensor) -> Tensor:
    """`values` detached, contiguous and in float32 or float64, as the kernels need them."""
    values = values.detach()
    if values.dtype not in (torch.float32, torch.float64):
        values = values.to(torch.float32 if values.is_floating_point() else torch.float64)
    return values.contiguous()
