"""Rows whose gradients are put together by kernels, beside PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fgai.ops.capture import add_columns, first_rows

CASES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "first": (lambda given: first_rows(given, 3), lambda given: given[:3]),
    "none": (lambda given: first_rows(given, 0), lambda given: given[:0]),
    "all": (lambda given: first_rows(given, 5), lambda given: given[:5]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("shape", [(5, 2, 3), (5, 1)])
def test_as_slices(name: str, shape: tuple[int, ...]) -> None:
    ours, theirs = CASES[name]
    given = torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    out, want = ours(given), theirs(given)
    assert torch.equal(out, want)
    flow = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (found,), (wanted,) = (torch.autograd.grad(each, given, flow) for each in (out, want))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_gradients(name: str) -> None:
    given = torch.randn(
        5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda values: CASES[name][0](values) ** 2, given)


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("goes_on", [False, True])
def test_columns_are_added_from_left_to_right(columns: int, goes_on: bool) -> None:
    stream = torch.Generator().manual_seed(0)
    given = torch.randn(4, columns, dtype=torch.float64, generator=stream).requires_grad_()
    begun = torch.randn(4, dtype=torch.float64, generator=stream).requires_grad_() if goes_on else None
    want = begun
    for column in given.unbind(1):
        want = column if want is None else want + column
    assert want is not None
    assert torch.equal(add_columns(given, begun), want)
    assert torch.autograd.gradgradcheck(lambda *all_of: add_columns(*all_of) ** 2, (given, begun))
