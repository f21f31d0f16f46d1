"""Hidden bounds behind limits: numbers move no further than said, whatever clips or softens them."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from fgai.attention import Limits
from fgai.bounds.reading import Range


@given(st.integers(0, 10_000), st.floats(0.0, 0.8), st.floats(0.0, 0.2), st.floats(1e-3, 3.0))
def test_nothing_moves_further_than_said(seed: int, soften: float, cut: float, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(30, 2, 3, generator=generator, dtype=torch.float64)
    limits = Limits(2, 3).double()
    limits.measure(x, cut, soften)
    moved = size * torch.rand(30, 2, 3, generator=generator, dtype=torch.float64)
    said = limits(x.clone())
    known, unknown = Range.of(limits).moved(said, moved), Range.of(limits).moved_at_most(moved)
    for _ in range(20):
        step = moved * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1)
        if seed % 2:
            step = moved * step.sign()
        change = (limits(x + step) - said).abs()
        assert bool((change <= known * (1 + 1e-9) + 1e-12).all())
        assert bool((change <= unknown * (1 + 1e-9) + 1e-12).all())


def test_without_a_radius_nothing_is_added() -> None:
    limits, moved = Limits(1, 2), torch.rand(4, 1, 2, dtype=torch.float64)
    assert torch.equal(Range.of(limits).moved_at_most(moved), moved)
