"""Dropout by position: rate, draws, gradients, and the same numbers from every backend."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fgai import ops
from fgai.ops import cpu, reference
from fgai.ops.reference import _factors
from support.ops_cases import FUSED, SEED, TOLERANCE, assert_same, call, inputs, results_and_gradients, skewed


@given(st.floats(0.01, 0.99), st.integers(0, (1 << 62) - 1), st.integers(1, 70))
def test_kernel_and_reference_draw_the_same(p: float, seed: int, size: int) -> None:
    given_ = torch.linspace(-2, 3, size)
    torch.testing.assert_close(cpu.dropout(given_, p, seed), reference.dropout(given_, p, seed))


def test_rate_scale_and_independence() -> None:
    count, p = 200_000, 0.3
    ones = torch.ones(count, dtype=torch.float64)
    draws = torch.stack([cpu.dropout(ones, p, seed) for seed in (1, 2, SEED, SEED + (1 << 40))])
    assert sorted(draws.unique().tolist()) == pytest.approx([0.0, 1 / (1 - p)])
    # Five standard deviations of a binomial share.
    assert ((draws == 0).double().mean(1) - p).abs().max() < 5 * (p * (1 - p) / count) ** 0.5
    correlation = torch.corrcoef(torch.cat([draws, draws.roll(1, 1)])) - torch.eye(8, dtype=torch.float64)
    assert correlation.abs().max() < 6 / count**0.5


def test_positions_beyond_32_bits_draw_anew() -> None:
    first = _factors(torch.Size([64]), 0.5, SEED, torch.empty(0))
    assert not torch.equal(first, _factors(torch.Size([64]), 0.5, SEED + 1, torch.empty(0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(("heads", "channels"), [(8, 8), (3, 5)])
def test_fused_attention_with_dropout_equals_the_reference(
    name: str, heads: int, channels: int, dtype: torch.dtype
) -> None:
    adjacency = skewed()
    made = inputs(name, adjacency, heads, channels, dtype)
    ours = results_and_gradients(lambda given: call(cpu, name, given, adjacency, 0.4), made)
    theirs = results_and_gradients(lambda given: call(reference, name, given, adjacency, 0.4), made)
    assert_same(ours, theirs, TOLERANCE[dtype])


def test_attention_comes_back_before_dropout() -> None:
    adjacency = skewed()
    left, right, values = inputs("attend_additive", adjacency, 8, 8, torch.float64)
    clear, attention = ops.attend_additive(left, right, values, adjacency)
    dropped, same = ops.attend_additive(left, right, values, adjacency, dropout=0.5, seed=SEED)
    torch.testing.assert_close(attention, same)
    assert not torch.allclose(clear, dropped)
    kept = ops.dropout(attention, 0.5, seed=SEED)
    torch.testing.assert_close(dropped, ops.aggregate(kept, values, adjacency))


def test_draws_follow_torch_and_stop_in_evaluation() -> None:
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(1))
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(ops.dropout(x, 0.5))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert ops.dropout(x, 0.5, training=False) is x and ops.dropout(x, 0.0) is x
    assert (ops.dropout(x, 1.0) == 0).all()


def test_gradient_is_the_factor() -> None:
    x = torch.ones(9, 4, dtype=torch.float64, requires_grad=True)
    out = ops.dropout(x, 0.5, seed=SEED)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient, out.detach())
