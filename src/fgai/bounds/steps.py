"""Bounds of the steps between attention layers: activations, batch norm in evaluation mode, linear maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fgai.bounds.intervals import StateBounds


def _relu_slope(step: nn.Module, high: Tensor) -> Tensor:
    below = step.negative_slope if isinstance(step, nn.LeakyReLU) else 0.0
    return torch.where(high > 0, 1.0, below).to(high)


ACTIVATIONS: dict[type[nn.Module], Callable[[nn.Module, Tensor], Tensor]] = {
    nn.ELU: lambda _, high: high.clamp(max=0).exp(),
    nn.ReLU: _relu_slope,
    nn.LeakyReLU: _relu_slope,
}
"""Monotone activation → its largest slope [N, D] below an upper bound; alpha of ELU is at most 1."""


def propagate(step: nn.Module, state: StateBounds) -> StateBounds:
    """Return the bounds of a state after one step."""
    if isinstance(step, nn.Linear):
        return StateBounds(*state.linear(step.weight.t(), step.bias))
    if isinstance(step, nn.BatchNorm1d):
        factor, shift = batch_norm_map(step)
        return state.pointwise(lambda x: x * factor + shift, factor)
    return state.pointwise(step, ACTIVATIONS[type(step)](step, state.high))


def batch_norm_map(norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """Return factor and shift of each channel of a batch norm in evaluation mode."""
    assert norm.running_mean is not None and norm.running_var is not None
    factor = (norm.running_var + norm.eps).rsqrt()
    factor = factor if norm.weight is None else factor * norm.weight
    shift = -norm.running_mean * factor
    return factor, shift if norm.bias is None else shift + norm.bias


def linear_map(steps: Sequence[nn.Module], width: int) -> tuple[Tensor, Tensor] | None:
    """Return weight [width, F] and bias [F] of a sequence of linear steps; None if one is not linear."""
    weight, bias = torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    for step in steps:
        if isinstance(step, nn.Linear):
            map_ = step.weight.t()
            weight, bias = weight @ map_, bias @ map_ + (0.0 if step.bias is None else step.bias)
        elif isinstance(step, nn.BatchNorm1d):
            factor, shift = batch_norm_map(step)
            weight, bias = weight * factor, bias * factor + shift
        else:
            return None
    return weight, bias
