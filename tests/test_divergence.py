"""Divergences against scipy, on asymmetric data, at equal, extreme and empty arguments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr
from torch import Tensor

from fgai import divergence as dv
from fgai.errors import InputError
from support.csr_rows import attention, pointer, split

DEGREES = [4, 0, 7, 1, 3]


def predictions(nodes: int, classes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(nodes, classes, generator=generator, dtype=torch.float64)


def test_total_variation_equals_a_loop() -> None:
    y, z = predictions(5, 3, 0), predictions(5, 3, 1)
    loop = [0.5 * sum(abs(float(y[i, c] - z[i, c])) for c in range(3)) for i in range(5)]
    torch.testing.assert_close(dv.tvd(y, z), torch.tensor(loop, dtype=torch.float64))
    assert dv.graph_tvd(y, z).item() == pytest.approx(np.mean(loop))
    p, q = y.softmax(1), z.softmax(1)
    probabilities = [0.5 * float((p[i] - q[i]).abs().sum()) for i in range(5)]
    assert dv.graph_tvd(y, z, "probabilities").item() == pytest.approx(np.mean(probabilities))
    assert 0 < dv.graph_tvd(y, z, "probabilities") < 1


def test_relative_total_variation_ignores_scale_and_is_asymmetric() -> None:
    y, z = predictions(6, 4, 2), predictions(6, 4, 3) * 2
    spread = sum(abs(float(y[i, c] - y[i].mean())) for i in range(6) for c in range(4))
    change = sum(abs(float(y[i, c] - z[i, c])) for i in range(6) for c in range(4))
    assert dv.graph_tvd_rel(y, z).item() == pytest.approx(change / spread)
    assert dv.graph_tvd_rel(0.01 * y, 0.01 * z).item() == pytest.approx(change / spread)
    assert dv.graph_tvd_rel(y, z) != dv.graph_tvd_rel(z, y)
    flat = torch.ones(3, 2)
    assert dv.graph_tvd_rel(flat, flat).item() == 0.0
    assert dv.graph_tvd_rel(flat, flat + 1).item() == math.inf


def test_divergences_equal_scipy() -> None:
    p, q = predictions(5, 3, 4).softmax(1), predictions(5, 3, 5).softmax(1)
    q[0, 0] = 0
    p[1, 2] = 0
    torch.testing.assert_close(dv.kl(p, q), torch.from_numpy(rel_entr(p.numpy(), q.numpy()).sum(1)))
    assert dv.kl(p, q)[0] == math.inf
    assert not torch.allclose(dv.kl(p, q), dv.kl(q, p))
    normal = p / p.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    expected = torch.from_numpy(jensenshannon(*(x.numpy() for x in normal), axis=1) ** 2)
    torch.testing.assert_close(dv.jsd(*normal), expected)


def test_row_forms_equal_scipy_row_by_row() -> None:
    w, rowptr = attention(DEGREES, 0)
    v, _ = attention(DEGREES, 1)
    got = [f(w, v, rowptr) for f in (dv.row_tvd, dv.row_kl, dv.row_jsd)]
    for i, (a, b) in enumerate(zip(split(w, rowptr), split(v, rowptr), strict=True)):
        a, b = a.numpy(), b.numpy()
        assert got[0][i].item() == pytest.approx(0.5 * np.abs(a - b).sum())
        assert got[1][i].item() == pytest.approx(rel_entr(a, b).sum())
        m = (a + b) / 2
        assert got[2][i].item() == pytest.approx((rel_entr(a, m).sum() + rel_entr(b, m).sum()) / 2)
    two = dv.row_jsd(torch.stack([w, v], 1), torch.stack([v, w], 1), rowptr)
    torch.testing.assert_close(two, torch.stack([got[2], got[2]], 1))


def test_graph_jsd_is_the_formula() -> None:
    w, _ = attention(DEGREES, 2)
    v, _ = attention(DEGREES, 3)
    m = (w + v) / 2
    formula = (rel_entr(w.numpy(), m.numpy()).sum() + rel_entr(v.numpy(), m.numpy()).sum()) / (2 * 15)
    assert dv.graph_jsd(w, v).item() == pytest.approx(formula, rel=1e-12)
    # A part of the edges need not sum to one; each term is still non-negative.
    part = torch.tensor([0, 2, 5, 9])
    assert dv.graph_jsd(w[part], v[part]) > 0


@example(3762, 0.0078125)  # |d| is nearly 1 at an edge, where the series is slow
@given(st.integers(0, 2**16), st.floats(1e-9, 1e-2))
def test_jsd_keeps_its_digits_for_nearly_equal_arguments(seed: int, shift: float) -> None:
    w, _ = attention(DEGREES, seed)
    v, _ = attention(DEGREES, seed + 1)
    near = (1 - shift) * w + shift * v
    single = dv.graph_jsd(w.float(), near.float()).item()
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
    assert dv.graph_jsd(w, w).item() == 0.0
    assert dv.graph_jsd(w, w.clone()).item() == 0.0
    assert dv.kl(w, w).item() == 0.0
    assert dv.row_tvd(w, w, rowptr).tolist() == [0.0, 0.0, 0.0]
    assert dv.row_kl(w, w, rowptr).tolist() == [0.0, 0.0, 0.0]


def test_gradients_agree_with_differences_and_stay_finite() -> None:
    w, rowptr = attention(DEGREES, 4)
    v, _ = attention(DEGREES, 5)
    v.requires_grad_()
    for f in (dv.row_tvd, dv.row_kl, dv.row_jsd):
        assert torch.autograd.gradcheck(lambda x, f=f: f(w, x, rowptr), v)
        assert torch.autograd.gradcheck(lambda x, f=f: f(x, w, rowptr), v)
    y, z = predictions(3, 4, 6), predictions(3, 4, 7).requires_grad_()
    for g in (dv.graph_tvd, lambda a, b: dv.graph_tvd(a, b, "probabilities"), dv.graph_tvd_rel):
        assert torch.autograd.gradcheck(lambda x, g=g: g(y, x), z)
    zeros = torch.tensor([0.0, 0.5, 0.0, 1.0], requires_grad=True)
    dv.graph_jsd(torch.tensor([1.0, 0.0, 0.0, 1.0]), zeros).backward()
    assert zeros.grad is not None
    assert torch.isfinite(zeros.grad).all()
    assert zeros.grad[0] < -1  # moving towards the other attention lowers the divergence
    assert zeros.grad[1] > 0


def test_extreme_values_stay_finite() -> None:
    y = torch.tensor([[1e30, -1e30, 0.0], [0.0, 1e4, -1e4]])
    z = -y
    assert torch.isfinite(dv.graph_tvd(y, z, "probabilities"))
    assert dv.graph_tvd(y, z, "probabilities").item() == pytest.approx(1.0)
    assert torch.isfinite(dv.graph_tvd_rel(y, z))
    tiny = torch.tensor([1e-40, 1.0, 0.0])
    assert torch.isfinite(dv.graph_jsd(tiny, tiny.roll(1)))
    assert dv.jsd(tiny, tiny.roll(1)).item() == pytest.approx(math.log(2))


def test_nothing_to_compare() -> None:
    empty = torch.zeros(0)
    assert dv.graph_jsd(empty, empty).item() == 0.0
    assert dv.graph_tvd(torch.zeros(0, 3), torch.zeros(0, 3)).item() == 0.0
    assert dv.row_jsd(empty, empty, pointer([0, 0])).tolist() == [0.0, 0.0]


def test_bad_input_is_named() -> None:
    with pytest.raises(InputError, match="same shape"):
        dv.graph_jsd(torch.ones(3), torch.ones(4))
    with pytest.raises(InputError, match="did you mean 'probabilities'"):
        dv.tvd(torch.ones(2, 3), torch.ones(2, 3), "probability")
    with pytest.raises(InputError, match="ends at 4, but there are 3 entries"):
        dv.row_kl(torch.ones(3), torch.ones(3), pointer([2, 2]))
