"""Cosine similarity along edges against a dense loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from scipy.sparse import csr_matrix
from torch import Tensor

from experiments.defences import edge_cosine
from fgai.sparse import Adjacency, Features
from fgai.sparse.features import as_features
from support.ops_cases import adjacencies, skewed


def plain(x: Tensor, adjacency: Adjacency) -> Tensor:
    one, two = x[adjacency.source], x[adjacency.destination]
    sizes = one.norm(dim=1).clamp(min=1e-6) * two.norm(dim=1).clamp(min=1e-6)
    cosines: Tensor = (one * two).sum(1) / sizes
    return cosines


def drawn(rows: int, columns: int = 7, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    return x * (torch.rand(rows, columns, generator=generator) > 0.6)


def stored(x: Tensor) -> Features:
    made = as_features(csr_matrix(x.numpy()))
    assert made is not None and made.is_sparse
    return made


@given(adjacencies())
def test_dense_and_sparse_rows(adjacency: Adjacency) -> None:
    x = drawn(adjacency.num_nodes)
    expected = plain(x, adjacency)
    for features in (x, Features.dense(x), stored(x)):
        torch.testing.assert_close(edge_cosine(features, adjacency), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sparse", [False, True])
def test_appended_rows_and_deltas_with_gradients(sparse: bool) -> None:
    adjacency = skewed()
    n = adjacency.num_nodes - 3
    x, extra, rows = drawn(n), drawn(3, seed=1).requires_grad_(), torch.tensor([5, 2, 0])
    delta = drawn(3, seed=2).requires_grad_()
    base = stored(x) if sparse else Features.dense(x)
    dense = torch.cat([x.index_add(0, rows, delta), extra])
    ours = edge_cosine(base.perturb(rows, delta).append(extra), adjacency)
    theirs = plain(dense, adjacency)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    pull = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3))
    got = torch.autograd.grad((ours * pull).sum(), [extra, delta])
    expected = torch.autograd.grad((theirs * pull).sum(), [extra, delta])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_rows_of_zeros_have_a_gradient() -> None:
    adjacency, _ = Adjacency.build(torch.tensor([[0, 1], [1, 0]]), 2)
    zeros = torch.zeros(1, 3, requires_grad=True)
    similar = edge_cosine(stored(torch.tensor([[1.0, 0.0, 2.0]])).append(zeros), adjacency)
    similar.sum().backward()  # type: ignore[no-untyped-call]
    assert similar.tolist() == [0.0, 0.0] and zeros.grad is not None
    assert zeros.grad.sign().tolist() == [[1.0, 0.0, 1.0]]
