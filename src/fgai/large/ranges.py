"""Ranges of limits from all nodes of a stored graph: order statistics of values that lie on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fgai.attention import Limits, limits_of, overriding
from fgai.attention.limits import SAMPLE, SLACK, largest, ranges
from fgai.errors import InputError
from fgai.large.arrays import Array, _ArrayFiles, _blocks, map_array
from fgai.ops import clip, range_norm

NUMBERS = 1 << 22
"""Numbers that are in memory together; the order statistics of one channel take all its rows."""


class _RangeOptions(NamedTuple):
    """Shares of the nodes outside the ranges of limits."""

    clip_share: float  # at either end of each channel
    shrink: float  # those of largest norm
    sampled: bool  # take order statistics from a few thousand nodes, evenly spread


def _measure_layer(
    layer: nn.Module,
    run: Callable[[], Iterator[slice]],
    folder: Path,
    options: _RangeOptions,
    num_nodes: int,
) -> None:
    """Set the ranges of a layer's limits from all rows it reads.

    `run` runs it on one block of nodes after another and yields, before each, the rows that count. Without
    `clip_share` and `shrink` limits change nothing and are measured together, else in order.
    """
    every = limits_of(layer)
    together = options.clip_share == options.shrink == 0
    for group in [every] if together and every else [[limits] for limits in every]:
        _write_inputs(run, group, folder)
        for number, limits in enumerate(group):
            path = folder / f"input.{number}.npy"
            rows = map_array(path) if path.exists() else np.zeros(0)
            if len(rows) != num_nodes:
                raise InputError(
                    f"{type(layer).__name__} maps its input more than once, so its limits cannot be measured"
                    " block by block; call it with one tensor `x`, or give `limits=False`"
                )
            _measure(limits, rows, options)
            path.unlink()


def _write_inputs(run: Callable[[], Iterator[slice]], group: list[Limits], folder: Path) -> None:
    """Write the inputs of some limits of a layer, a file each."""
    numbers = {limits: number for number, limits in enumerate(group)}
    own = slice(None)
    with _ArrayFiles(folder) as files:

        def write(limits: Limits, _: Any, rows: Tensor) -> Tensor:
            block = rows.detach().reshape(-1, *limits.low.shape)[own].cpu().numpy()
            files.append(f"input.{numbers[limits]}", block)
            return rows

        with overriding(group, write):
            for own in run():  # noqa: B007 (read by `write`)
                pass


def _measure(limits: Limits, rows: Array, options: _RangeOptions) -> None:
    """Do what `Limits.measure` does, for rows on disk."""
    step = max(1, len(rows) // SAMPLE) if options.sampled else 1
    clip_share, shrink = options.clip_share, options.shrink
    low, high = _channel_ranges(rows if clip_share == 0 else rows[::step], clip_share)
    radius = limits.radius
    if not limits.derived:
        counted = rows[::step] if shrink else rows
        norms = [range_norm(clip(block, low, high), low, high) for block in _tensors(counted)]
        radius = largest(torch.cat(norms), shrink) * (1 + SLACK)
    usual = limits.usual
    if step == 1:
        moved = sum(int((clip(block, low, high, radius) != block).sum()) for block in _tensors(rows))
        usual = torch.tensor(moved / max(1, rows.size))
    limits.set(low, high, radius, usual)


def _channel_ranges(rows: Array, clip_share: float) -> tuple[Tensor, Tensor]:
    if clip_share == 0:
        ends = [torch.stack([block.amin(0), block.amax(0)]) for block in _tensors(rows)]
        return ranges(torch.cat(ends), 0.0)
    shape, flat = rows.shape[1:], rows.reshape(len(rows), -1)
    step = max(1, NUMBERS // max(1, len(flat)))
    columns = range(0, flat.shape[1], step)
    found = [ranges(torch.from_numpy(np.array(flat[:, at : at + step])), clip_share) for at in columns]
    low, high = (torch.cat(ends).view(shape) for ends in zip(*found, strict=True))
    return low, high


def _tensors(rows: Array) -> Iterator[Tensor]:
    """Yield rows in blocks, copied to memory."""
    for block in _blocks(rows, max(1, NUMBERS // max(1, int(np.prod(rows.shape[1:]))))):
        yield torch.from_numpy(np.array(block))
