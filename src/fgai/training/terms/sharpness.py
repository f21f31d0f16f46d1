"""The term `sharpness`: attention that is not flatter than the vanilla model's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fgai.metrics import UNIFORM_SHARPNESS
from fgai.training.terms.base import StepContext, Term, first_rows, sum_scalars
from fgai.training.vanilla_outputs import layer_sharpness

MIN_SHARPNESS = 0.95
"""Share of the vanilla sharpness below which attention counts as too flat."""


def _too_flat(context: StepContext) -> Tensor:
    """Σ over layers of `relu(0.95 − sharpness / vanilla sharpness)`; 0 where no layer is flatter."""
    vanilla = context.vanilla_outputs
    layers = zip(context.attention, vanilla.rowptrs, context.layers, strict=True)
    now = [layer_sharpness(w, rowptr, first_rows(layer.destination, w)) for w, rowptr, layer in layers]
    return _sharpness_loss(now, vanilla.sharpness)


def _sharpness_loss(now: Sequence[Tensor], before: Sequence[float]) -> Tensor:
    """Layers that are flat in the vanilla model (sharpness up to 1e-6) do not count: they rank rounding."""
    return sum_scalars(
        [
            (MIN_SHARPNESS - new / old).clamp(min=0) if old > UNIFORM_SHARPNESS else new * 0
            for new, old in zip(now, before, strict=True)
        ]
    )


# What `@term` makes of a function of this name; `fgai.metrics` has the public function `sharpness`.
sharpness = Term("sharpness", _too_flat, on="clean", weight=1.0)
