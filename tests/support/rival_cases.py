"""Outsiders against members on two devices: scores with ties, without numbers' end, edges that are gone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import torch
from torch import Tensor

from fgai.topk import swaps, topk_mask


def scene(long: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scores, edges that are there, rows from empty to `long`, which to compare in, and scores before."""
    degree = torch.tensor([0, 1, 3, 4, 5, long, 0, 9, 2, 12])
    rowptr = torch.nn.functional.pad(degree.cumsum(0), (1, 0))
    generator = torch.Generator().manual_seed(7)
    before, drawn, chance = (
        torch.rand(int(rowptr[-1]), generator=generator, dtype=torch.float64) for _ in range(3)
    )
    now = torch.where(chance < 0.4, (drawn * 3).round() / 3, drawn).log().to(dtype)  # some are minus infinity
    there = torch.rand(len(now), generator=generator) < 0.8
    return now, there, rowptr, torch.tensor([9, 0, 5, 3, 7, 4, 2]), before


def compare_rivals(device: str, long: int, compare: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Differences, pairs and gradients on `device` by a kernel, against the reference on the CPU."""
    for dtype in (torch.float32, torch.float64):
        now, there, rowptr, rows, before = scene(long, dtype)
        for k in (1, 2, 5):
            members = topk_mask(before, rowptr, k)
            found = []
            for where, work in (("cpu", None), (device, compare)):
                moving = now.to(where).requires_grad_()
                kept, top, ends, those = (each.to(where) for each in (there, members, rowptr, rows))
                with (
                    mock.patch.object(swaps, "_row_kernels", lambda _: None)
                    if work is None
                    else nullcontext()
                ):
                    gaps, real = (work or swaps.swap_gaps)(moving, kept, top, ends, those, k)
                (slope,) = torch.autograd.grad((torch.sigmoid(gaps) * real).sum(), moving)
                found.append((gaps.detach().cpu(), real.cpu(), slope.cpu()))
            (gaps, real, slope), made = found
            assert torch.equal(made[1], real) and torch.equal(made[0], gaps)
            torch.testing.assert_close(made[2], slope, equal_nan=True)
            assert real.any() and not real.all() and slope.any()
