"""Several heads as one: the mean of their scores, and the softmax of it."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from fgai.ops.segments import row_index, row_max, row_sum

LOG_OF_ZERO = -1e6
"""In place of log 0: below the logarithm of every positive float64 by more than `exp` can tell from 0."""


def mean_heads(scores: Tensor) -> Tensor:
    """Mean over the heads of [E, H], added up in their order: no other edge has a say in any bit of it."""
    return reduce(torch.add, scores.unbind(1)) / scores.shape[1]


def mean_log(values: Tensor) -> Tensor:
    """Mean over the heads of log-attention, from [E, H] to float64 [E].

    A weight of 0 counts as smaller than all others: edges with fewer zeros come first, then the mean decides.
    """
    some = values > 0
    return mean_heads(torch.where(some, torch.where(some, values, 1.0).double().log(), LOG_OF_ZERO))


def row_softmax(scores: Tensor, rowptr: Tensor) -> Tensor:
    """Softmax of [E] over the edges of each row."""
    row = row_index(rowptr, scores.shape[0])
    raised = (scores - row_max(scores, rowptr)[row]).exp()
    return raised / row_sum(raised, rowptr)[row]
