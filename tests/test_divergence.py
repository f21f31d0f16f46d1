"""Distances against loops and scipy, on asymmetric data, at equal, extreme and empty arguments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.special import rel_entr
from torch import Tensor

from fgai import divergence as dv
from fgai.errors import InputError
from fgai.metrics import g_jsd, g_tvd, g_tvd_prob, g_tvd_rel
from support.csr_rows import attention, pointer, split

DEGREES = [4, 0, 7, 1, 3]


def predictions(nodes: int, classes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(nodes, classes, generator=generator, dtype=torch.float64)


def test_total_variation_equals_a_loop() -> None:
    y, z = predictions(5, 3, 0), predictions(5, 3, 1)
    loop = [0.5 * sum(abs(float(y[i, c] - z[i, c])) for c in range(3)) for i in range(5)]
    torch.testing.assert_close(dv.tvd(y, z), torch.tensor(loop, dtype=torch.float64))
    assert g_tvd(y, z) == pytest.approx(np.mean(loop))
    p, q = y.softmax(1), z.softmax(1)
    probabilities = [0.5 * float((p[i] - q[i]).abs().sum()) for i in range(5)]
    assert g_tvd_prob(y, z) == pytest.approx(np.mean(probabilities))
    assert 0 < g_tvd_prob(y, z) < 1


def test_relative_total_variation_ignores_scale_and_is_asymmetric() -> None:
    y, z = predictions(6, 4, 2), predictions(6, 4, 3) * 2
    spread = sum(abs(float(y[i, c] - y[i].mean())) for i in range(6) for c in range(4))
    change = sum(abs(float(y[i, c] - z[i, c])) for i in range(6) for c in range(4))
    assert g_tvd_rel(y, z) == pytest.approx(change / spread)
    assert g_tvd_rel(0.01 * y, 0.01 * z) == pytest.approx(change / spread)
    assert g_tvd_rel(y, z) != g_tvd_rel(z, y)
    flat = torch.ones(3, 2)
    assert g_tvd_rel(flat, flat) == 0.0
    assert g_tvd_rel(flat, flat + 1) == math.inf


def test_row_total_variation_equals_numpy_row_by_row() -> None:
    w, rowptr = attention(DEGREES, 0)
    v, _ = attention(DEGREES, 1)
    rows = dv.row_tvd(w, v, rowptr)
    for i, (a, b) in enumerate(zip(split(w, rowptr), split(v, rowptr), strict=True)):
        assert rows[i].item() == pytest.approx(0.5 * np.abs(a.numpy() - b.numpy()).sum())
    two = dv.row_tvd(torch.stack([w, v], 1), torch.stack([v, w], 1), rowptr)
    torch.testing.assert_close(two, torch.stack([rows, rows], 1))


def test_graph_jsd_is_the_formula() -> None:
    w, _ = attention(DEGREES, 2)
    v, _ = attention(DEGREES, 3)
    m = (w + v) / 2
    formula = (rel_entr(w.numpy(), m.numpy()).sum() + rel_entr(v.numpy(), m.numpy()).sum()) / (2 * 15)
    assert g_jsd(w, v) == pytest.approx(formula, rel=1e-12)
    # A part of the edges need not sum to one; each term is still non-negative.
    part = torch.tensor([0, 2, 5, 9])
    assert g_jsd(w[part], v[part]) > 0


@example(3762, 0.0078125)  # |d| is nearly 1 at an edge, where the series is slow
@given(st.integers(0, 2**16), st.floats(1e-9, 1e-2))
def test_jsd_keeps_its_digits_for_nearly_equal_arguments(seed: int, shift: float) -> None:
    w, _ = attention(DEGREES, seed)
    v, _ = attention(DEGREES, seed + 1)
    near = (1 - shift) * w + shift * v
    single = g_jsd(w.float(), near.float())
    a, b = w.float().double(), near.float().double()
    d = (a - b) / (a + b)
    series = sum(d ** (2 * n) / (n * (2 * n - 1)) for n in range(1, 40))
    closed = torch.special.xlog1py(1 + d, d) + torch.special.xlog1py(1 - d, -d)
    exact = ((a + b) / 2 * torch.where(d.abs() < 0.5, series, closed)).sum().item() / 30
    assert single == pytest.approx(exact, rel=1e-5, abs=1e-30)


@given(
    st.lists(st.floats(0, 1, width=32), min_size=2, max_size=9),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_equal_arguments_give_exactly_zero(numbers: list[float], dtype: torch.dtype) -> None:
    w = torch.tensor(numbers, dtype=dtype)
    rowptr = pointer([len(numbers) - 1, 0, 1])
    assert g_jsd(w, w) == 0.0
    assert g_jsd(w, w.clone()) == 0.0
    assert dv.row_tvd(w, w, rowptr).tolist() == [0.0, 0.0, 0.0]


def test_gradients_agree_with_differences() -> None:
    w, rowptr = attention(DEGREES, 4)
    v, _ = attention(DEGREES, 5)
    v.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: dv.row_tvd(w, x, rowptr), v)
    assert torch.autograd.gradcheck(lambda x: dv.row_tvd(x, w, rowptr), v)
    y, z = predictions(3, 4, 6), predictions(3, 4, 7).requires_grad_()
    for on in dv.SPACES:
        assert torch.autograd.gradcheck(lambda x, on=on: dv.tvd(y, x, on), z)


def test_extreme_values_stay_finite() -> None:
    y = torch.tensor([[1e30, -1e30, 0.0], [0.0, 1e4, -1e4]])
    z = -y
    assert g_tvd_prob(y, z) == pytest.approx(1.0)
    assert math.isfinite(g_tvd_rel(y, z))
    tiny = torch.tensor([1e-40, 1.0, 0.0])
    assert 6 * g_jsd(tiny, tiny.roll(1)) == pytest.approx(2 * math.log(2))


def test_nothing_to_compare() -> None:
    empty = torch.zeros(0)
    assert g_jsd(empty, empty) == 0.0
    assert g_tvd(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0
    assert dv.row_tvd(empty, empty, pointer([0, 0])).tolist() == [0.0, 0.0]


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="same shape"):
        g_jsd(torch.ones(3), torch.ones(4))
    with pytest.raises(InputError, match="did you mean 'probabilities'"):
        dv.tvd(torch.ones(2, 3), torch.ones(2, 3), "probability")
    with pytest.raises(InputError, match="ends at 4, but there are 3 entries"):
        dv.row_tvd(torch.ones(3), torch.ones(3), pointer([2, 2]))
