"""Sparse and dense node features, their edits, and their projection."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fgai.errors import InputError
from fgai.ops import dropout, project, reference, use_backend
from fgai.sparse import Features, SparseRows

N, F, D = 11, 7, 5


def matrix(seed: int = 0, density: float = 0.3) -> Tensor:
    """A random [N, F] matrix of mostly zeros, with an empty row and an empty column."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, F, generator=generator, dtype=torch.float64)
    x[torch.rand(N, F, generator=generator) > density] = 0
    x[4], x[:, 3] = 0, 0
    return x


def as_sparse(x: Tensor) -> Features:
    csr = sp.csr_matrix(x.numpy())
    parts = (torch.from_numpy(np.asarray(a)) for a in (csr.indptr, csr.indices, csr.data))
    return Features.sparse(*parts, num_columns=x.shape[1])


def randn(*shape: int, seed: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("wrap", [Features.dense, as_sparse])
class TestBoth:
    """What dense and sparse features share."""

    def test_shape_and_range(self, wrap: type) -> None:
        x = matrix()
        features = wrap(x)
        assert features.shape == (N, F) and features.dtype == torch.float64
        low, high = features.range()
        assert torch.equal(low, x.amin(0)) and torch.equal(high, x.amax(0))
        torch.testing.assert_close(features.to_dense(), x)

    def test_range_counts_zeros_that_are_not_stored(self, wrap: type) -> None:
        x = matrix().abs()
        assert torch.equal(wrap(x).range()[0], x.amin(0))

    def test_the_range_is_that_of_the_values_of_now(self, wrap: type) -> None:
        features = wrap(matrix().clone())
        before = features.range()
        assert features.range()[1] is before[1] and not torch.equal(features.range((0, 1))[1], before[1])
        features.stored.mul_(3)
        torch.testing.assert_close(features.range()[1], 3 * before[1])
        with torch.inference_mode():
            torch.testing.assert_close(wrap(matrix().clone()).range()[1], before[1])

    def test_projection_with_rows_appended_and_changed(self, wrap: type) -> None:
        x, weight = matrix(), randn(F, D, seed=1)
        extra, delta, rows = randn(3, F, seed=2), randn(2, F, seed=3), torch.tensor([6, 1])
        features = wrap(x).append(extra[:2]).perturb(rows, delta).append(extra[2:])
        assert features.shape == (N + 3, F)
        found = project(features, weight)
        dense = torch.cat([x.index_add(0, rows, delta), extra])
        torch.testing.assert_close(features.to_dense(), dense)
        torch.testing.assert_close(found, dense @ weight)
        target = randn(N + 3, D, seed=4).detach()
        ours = torch.autograd.grad((found * target).sum(), (weight, extra, delta))
        theirs = torch.autograd.grad(((dense @ weight) * target).sum(), (weight, extra, delta))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)

    def test_moments_count_zeros(self, wrap: type) -> None:
        x, extra, delta, rows = matrix(), randn(2, F, seed=2), randn(1, F, seed=3), torch.tensor([8])
        features = wrap(x).perturb(rows, delta).append(extra)
        mean, variance = features.moments()
        dense = features.to_dense()
        torch.testing.assert_close(mean, dense.mean(1))
        torch.testing.assert_close(variance, dense.var(1, correction=0))

    def test_rows_can_be_selected(self, wrap: type) -> None:
        rows = torch.tensor([9, 4, 0, 9])
        torch.testing.assert_close(wrap(matrix()).select(rows), matrix()[rows])

    def test_rows_can_be_taken_with_appended_ones(self, wrap: type) -> None:
        features = wrap(matrix())
        features = features.append(torch.ones(2, features.num_columns, dtype=features.dtype))
        rows = torch.tensor([0, 2, features.num_rows - 1])
        taken = features.take(rows)
        assert taken.is_sparse == features.is_sparse
        torch.testing.assert_close(taken.to_dense(), features.to_dense()[rows])

    def test_dropout_keeps_zeros_and_scales_the_rest(self, wrap: type) -> None:
        x = matrix(density=0.9)
        torch.manual_seed(0)
        out = dropout(wrap(x).append(torch.ones(2, F, dtype=torch.float64)), 0.5).to_dense()
        assert (out[:N][x == 0] == 0).all()
        stayed = out[:N] != 0
        torch.testing.assert_close(out[:N][stayed], 2 * x[stayed])
        assert 0 < int(stayed.sum()) < int((x != 0).sum())
        assert set(out[N:].unique().tolist()) <= {0.0, 2.0}
        assert dropout(wrap(x), 0.0).to_dense().equal(x)

    def test_types_and_devices_change_together(self, wrap: type) -> None:
        features = wrap(matrix()).append(randn(2, F)).perturb(torch.tensor([0]), randn(1, F))
        moved = features.to("cpu", torch.float32)
        assert moved.dtype == torch.float32 and moved.to_dense().dtype == torch.float32
        torch.testing.assert_close(moved.to_dense(), features.to_dense().float())

    def test_wrong_widths_and_second_deltas_are_refused(self, wrap: type) -> None:
        with pytest.raises(InputError, match=rf"\[M, {F}\]"):
            wrap(matrix()).append(torch.zeros(2, F + 1))
        once = wrap(matrix()).perturb(torch.tensor([0]), torch.zeros(1, F))
        with pytest.raises(InputError, match="delta"):
            once.perturb(torch.tensor([1]), torch.zeros(1, F))


class TestSparseRows:
    """The compressed matrix and its projection."""

    @given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 17), st.floats(0, 1), st.integers(0, 9))
    def test_projection_equals_scipy(self, n: int, f: int, d: int, density: float, seed: int) -> None:
        generator = np.random.default_rng(seed)
        csr = sp.random_array((n, f), density=density, rng=generator, format="csr")
        weight = generator.normal(size=(f, d))
        rows = SparseRows(
            torch.from_numpy(csr.indptr).long(),
            torch.from_numpy(csr.indices).long(),
            torch.from_numpy(csr.data),
            f,
        )
        for backend in ("numba", "reference"):
            with use_backend(backend):
                found = project(Features(rows), torch.from_numpy(weight))
            np.testing.assert_allclose(found.numpy(), csr @ weight, atol=1e-12)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_gradients_of_values_and_weight(self, dtype: torch.dtype) -> None:
        base = as_sparse(matrix()).base
        assert isinstance(base, SparseRows)
        values = base.values.to(dtype).requires_grad_()
        weight, target = (
            randn(F, 19).detach().to(dtype).requires_grad_(),
            randn(N, 19, seed=3).detach().to(dtype),
        )
        rows = base.with_values(values)
        ours = torch.autograd.grad((project(Features(rows), weight) * target).sum(), (values, weight))
        theirs = torch.autograd.grad(
            (reference.project_sparse(rows, weight) * target).sum(), (values, weight)
        )
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5 if dtype == torch.float32 else 1e-10, atol=1e-6)

    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("width", [5, 64, 71, 130])
    @pytest.mark.parametrize(("rows", "columns"), [(900, 7), (60, 41)])
    def test_wide_projection_and_gradient(self, rows: int, columns: int, width: int, threads: int) -> None:
        generator = np.random.default_rng(width)
        csr = sp.random_array((rows, columns), density=0.3, rng=generator, format="csr")
        rowptr, index = (torch.from_numpy(a).long() for a in (csr.indptr, csr.indices))
        sparse = SparseRows(rowptr, index, torch.from_numpy(csr.data), columns)
        weight = torch.from_numpy(generator.normal(size=(columns, width))).requires_grad_()
        pull = generator.normal(size=(rows, width))
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads)
            found = project(Features(sparse), weight)
            (got,) = torch.autograd.grad(found, weight, torch.from_numpy(pull))
        finally:
            torch.set_num_threads(before)
        np.testing.assert_allclose(found.detach().numpy(), csr @ weight.detach().numpy(), atol=1e-11)
        np.testing.assert_allclose(got.numpy(), csr.T @ pull, atol=1e-11)

    def test_gradcheck(self) -> None:
        base = as_sparse(matrix()).base
        assert isinstance(base, SparseRows)
        values = base.values.clone().requires_grad_()
        assert torch.autograd.gradcheck(
            lambda v, w: project(Features(base.with_values(v)), w), (values, randn(F, 2))
        )

    def test_patterns_are_derived_once_for_all_values(self) -> None:
        features = as_sparse(matrix())
        base, dropped = features.base, dropout(features, 0.5).base
        assert isinstance(base, SparseRows) and isinstance(dropped, SparseRows)
        assert dropped.columns is base.columns and dropped.pattern is base.pattern

    def test_no_stored_value_at_all(self) -> None:
        empty = Features.sparse(torch.zeros(N + 1), torch.zeros(0), torch.zeros(0), F)
        weight = torch.ones(F, D, requires_grad=True)
        out = project(empty, weight)
        assert out.shape == (N, D) and (out == 0).all()
        assert all(bool((end == 0).all()) for end in empty.range())
        out.sum().backward()
        assert weight.grad is not None and (weight.grad == 0).all()


def test_a_vector_is_one_column_and_a_cube_is_refused() -> None:
    assert Features.dense(torch.zeros(N)).shape == (N, 1)
    with pytest.raises(InputError, match="num_nodes"):
        Features.dense(torch.zeros(N, F, 2))
