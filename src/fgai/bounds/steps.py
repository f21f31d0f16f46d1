"""Bounds of what lies between attention layers: activations, batch norm in evaluation mode, linear maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fgai.bounds.reading import State


def _steepest_elu(_: nn.Module, high: Tensor) -> Tensor:
    return high.clamp(max=0).exp()


def _steepest_relu(step: nn.Module, high: Tensor) -> Tensor:
    below = step.negative_slope if isinstance(step, nn.LeakyReLU) else 0.0
    return torch.where(high > 0, 1.0, below).to(high)


SMOOTH: dict[type[nn.Module], Callable[[nn.Module, Tensor], Tensor]] = {
    nn.ELU: _steepest_elu,
    nn.ReLU: _steepest_relu,
    nn.LeakyReLU: _steepest_relu,
}
"""Activations that never fall, and their largest slope below an upper end; alpha of ELU is at most 1."""


def follow(step: nn.Module, state: State) -> State:
    """Return an uncertain state behind one step."""
    if isinstance(step, nn.Linear):
        return state.mapped(step.weight.t(), step.bias)
    if isinstance(step, nn.BatchNorm1d):
        factor, shift = scale_of(step)
        return state.pointwise(lambda x: x * factor + shift, factor)
    return state.pointwise(step, SMOOTH[type(step)](step, state.high))


def scale_of(norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """Return factor and shift of each channel of a batch norm in evaluation mode."""
    assert norm.running_mean is not None and norm.running_var is not None
    factor = (norm.running_var + norm.eps).rsqrt()
    factor = factor if norm.weight is None else factor * norm.weight
    shift = -norm.running_mean * factor
    return factor, shift if norm.bias is None else shift + norm.bias


def affine_map(steps: Sequence[nn.Module], width: int) -> tuple[Tensor, Tensor] | None:
    """Return weight [width, F] and bias [F] of linear steps in a row; None if one is not linear."""
    weight, bias = torch.eye(width, dtype=torch.float64), torch.zeros(width, dtype=torch.float64)
    for step in steps:
        if isinstance(step, nn.Linear):
            map_ = step.weight.t()
            weight, bias = weight @ map_, bias @ map_ + (0.0 if step.bias is None else step.bias)
        elif isinstance(step, nn.BatchNorm1d):
            factor, shift = scale_of(step)
            weight, bias = weight * factor, bias * factor + shift
        else:
            return None
    return weight, bias
