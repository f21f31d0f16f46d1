"""Cosine similarity along edges: every way to compute it against a dense loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from scipy.sparse import csr_matrix
from torch import Tensor

from experiments import similarity
from experiments.similarity import edge_cosine
from fgai.errors import InputError
from fgai.sparse import Adjacency, Features, SparseRows
from fgai.sparse.features import as_features
from support.ops_cases import adjacencies, skewed


def plain(x: Tensor, adjacency: Adjacency) -> Tensor:
    one, two = x[adjacency.source], x[adjacency.destination]
    sizes = one.norm(dim=1).clamp(min=1e-6) * two.norm(dim=1).clamp(min=1e-6)
    return (one * two).sum(1) / sizes


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


def test_new_edges_cost_only_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    adjacency = skewed()
    x = drawn(adjacency.num_nodes)
    features, asked = stored(x), []
    original = similarity._between

    def counted(rows: SparseRows, keys: Tensor) -> Tensor:
        asked.append(keys.numel())
        return original(rows, keys)

    monkeypatch.setattr(similarity, "_between", counted)
    few, _ = Adjacency.build(
        torch.stack([adjacency.source, adjacency.destination])[:, ::2], adjacency.num_nodes
    )
    for chosen in (few, adjacency, few):
        torch.testing.assert_close(edge_cosine(features, chosen), plain(x, chosen), atol=1e-5, rtol=1e-5)
    fresh = ~torch.isin(adjacency.keys, few.keys)
    assert asked == [few.num_edges, int(fresh.sum())]


def test_looking_up_equals_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarity, "_CHUNK", 11)
    adjacency = skewed()
    rows = stored(drawn(adjacency.num_nodes)).base
    assert isinstance(rows, SparseRows)
    x = rows.to_dense().double()
    found = similarity._looked_up(rows, adjacency.source, adjacency.destination)
    torch.testing.assert_close(found, (x[adjacency.source] * x[adjacency.destination]).sum(1))


@pytest.mark.parametrize("x", [stored(torch.eye(5)[:2]), torch.ones(2, 5), torch.ones(3)])
def test_features_need_a_row_per_node(x: Tensor | Features) -> None:
    adjacency = Adjacency.build(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3)[0]
    with pytest.raises(InputError, match="`x` must be"):
        edge_cosine(x, adjacency)


def test_rows_of_zeros_have_a_gradient() -> None:
    adjacency, _ = Adjacency.build(torch.tensor([[0, 1], [1, 0]]), 2)
    zeros = torch.zeros(1, 3, requires_grad=True)
    similar = edge_cosine(stored(torch.tensor([[1.0, 0.0, 2.0]])).append(zeros), adjacency)
    similar.sum().backward()
    assert similar.tolist() == [0.0, 0.0] and zeros.grad is not None
    assert zeros.grad.sign().tolist() == [[1.0, 0.0, 1.0]]
