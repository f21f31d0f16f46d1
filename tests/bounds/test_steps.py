"""What lies between attention layers: no state inside the bounds before a step leaves those behind it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fgai.bounds.intervals import StateBounds, _Ball
from fgai.bounds.steps import linear_map, propagate

NODES, WIDTH = 40, 5


def batch_norm() -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(WIDTH).double().eval()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-2.0, 1.5, WIDTH))
        norm.bias.copy_(torch.linspace(-0.5, 0.5, WIDTH))
        norm.running_mean.copy_(torch.linspace(-0.4, 0.2, WIDTH))  # type: ignore[union-attr]
        norm.running_var.copy_(torch.linspace(0.2, 3.0, WIDTH))  # type: ignore[union-attr]
    return norm


STEPS: dict[str, list[nn.Module]] = {
    "elu": [nn.ELU()],
    "flat elu": [nn.ELU(0.4)],
    "relu": [nn.ReLU()],
    "leaky relu": [nn.LeakyReLU(0.3)],
    "norm": [batch_norm()],
    "norm, relu, norm": [batch_norm(), nn.ReLU(), batch_norm()],
    "elu, linear, relu": [nn.ELU(), nn.Linear(WIDTH, 7).double(), nn.ReLU()],
}


def points(generator: torch.Generator, state: StateBounds) -> Tensor:
    """A state inside box and ball."""
    ball = state.ball
    assert ball is not None
    share = torch.rand(NODES, WIDTH, generator=generator).round(decimals=1).double()
    spot = torch.randn(NODES, WIDTH, generator=generator).double()
    spot = spot / spot.norm(dim=1, keepdim=True) * ball.radius
    inside = ball.base + share * ball.drift + ball.spread * spot
    return torch.minimum(torch.maximum(inside, state.low), state.high)


@pytest.mark.parametrize("name", STEPS)
def test_no_state_leaves_the_bounds(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    base, drift = (torch.randn(NODES, WIDTH, generator=generator).double() for _ in range(2))
    spread = torch.rand(NODES, WIDTH, generator=generator).double()
    ball = _Ball(base, drift, spread, torch.tensor(0.8).double())
    reach = 0.8 * spread
    before = after = StateBounds(base + drift.clamp(max=0) - reach, base + drift.clamp(min=0) + reach, ball)
    steps = STEPS[name]
    for step in steps:
        after = propagate(step, after)
    assert after.ball is not None or "linear" in name
    width = after.low.shape[1]
    reading = torch.randn(width, 9, generator=generator).double()
    low, high = after.linear(reading)
    assert bool((low < high).any())
    with torch.no_grad():
        for _ in range(300):
            state = points(generator, before)
            for step in steps:
                state = step(state)
            assert bool((state >= after.low - 1e-9).all() & (state <= after.high + 1e-9).all())
            read = state @ reading
            assert bool((read >= low - 1e-9).all() & (read <= high + 1e-9).all())


def test_linear_steps_in_a_row_are_one() -> None:
    steps = [batch_norm(), nn.Linear(WIDTH, 4).double(), nn.Linear(4, 3, bias=False).double()]
    found = linear_map(steps, WIDTH)
    assert found is not None and linear_map([nn.ReLU()], WIDTH) is None
    x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1)).double()
    assert torch.allclose(x @ found[0] + found[1], nn.Sequential(*steps)(x))
