"""Ranges of limits from all nodes of a stored graph: order statistics of values that lie on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fgai.attention import Limits, collecting, limits_of
from fgai.attention.limits import SAMPLE, SLACK, largest, ranges
from fgai.errors import InputError
from fgai.large.arrays import Array, _ArrayFiles, map_array
from fgai.ops import clip, range_norm

NUMBERS = 1 << 22
"""Numbers that are in memory together; the order statistics of one channel take all its rows."""


class _LeftOut(NamedTuple):
    """Shares of the nodes that limits leave out."""

    clip_share: float  # at either end of each channel
    shrink: float  # those of largest norm
    sampled: bool  # take order statistics from a few thousand nodes, evenly spread


def _measure_layer(
    layer: nn.Module,
    run: Callable[[], Iterator[slice]],
    folder: Path,
    left_out: _LeftOut,
    num_nodes: int,
) -> None:
    """Take the ranges of a layer's limits from all rows it reads.

    `run` runs it on one block of nodes after another and yields, before each, the rows that count. Without
    `clip_share` and `shrink` limits change nothing and are measured together, else in order.
    """
    every = limits_of(layer)
    together = left_out.clip_share == left_out.shrink == 0
    for group in [every] if together and every else [[limits] for limits in every]:
        for limits, path in _written(run, group, folder).items():
            rows = map_array(path) if path.exists() else np.zeros(0)
            if len(rows) != num_nodes:
                raise InputError(
                    f"{type(layer).__name__} maps its input more than once, so its limits cannot be measured"
                    " block by block; call it with one tensor `x`, or give `limits=False`"
                )
            _measure(limits, rows, left_out)
            path.unlink()


def _written(run: Callable[[], Iterator[slice]], group: list[Limits], folder: Path) -> dict[Limits, Path]:
    """Write the inputs of some limits of a layer, a file each."""
    names = {limits: f"input.{number}" for number, limits in enumerate(group)}
    own = slice(None)
    with _ArrayFiles(folder) as files:

        def note(limits: Limits, rows: Tensor) -> None:
            files.append(names[limits], rows.reshape(-1, *limits.low.shape)[own].cpu().numpy())

        with collecting(group, note):
            for own in run():  # noqa: B007 (read by `note`)
                pass
    return {limits: folder / f"{name}.npy" for limits, name in names.items()}


def _measure(limits: Limits, rows: Array, left_out: _LeftOut) -> None:
    """As `Limits.measure`, from rows on disk."""
    every = max(1, len(rows) // SAMPLE) if left_out.sampled else 1
    clip_share, shrink = left_out.clip_share, left_out.shrink
    low, high = _ends(rows, 0.0) if clip_share == 0 else _ends(rows[::every], clip_share)
    radius = limits.radius
    if not limits.derived:
        counted = rows[::every] if shrink else rows
        norms = [range_norm(clip(block, low, high), low, high) for block in _blocks(counted)]
        radius = largest(torch.cat(norms), shrink) * (1 + SLACK)
    usual = limits.usual
    if every == 1:
        moved = sum(int((clip(block, low, high, radius) != block).sum()) for block in _blocks(rows))
        usual = torch.tensor(moved / max(1, rows.size))
    limits.set(low, high, radius, usual)


def _ends(rows: Array, clip_share: float) -> tuple[Tensor, Tensor]:
    if clip_share == 0:
        ends = [torch.stack([block.amin(0), block.amax(0)]) for block in _blocks(rows)]
        return ranges(torch.cat(ends), 0.0)
    shape, flat = rows.shape[1:], rows.reshape(len(rows), -1)
    step = max(1, NUMBERS // max(1, len(flat)))
    columns = range(0, flat.shape[1], step)
    parts = [ranges(torch.from_numpy(np.array(flat[:, at : at + step])), clip_share) for at in columns]
    low, high = (torch.cat(part).view(shape) for part in zip(*parts, strict=True))
    return low, high


def _blocks(rows: Array) -> Iterator[Tensor]:
    step = max(1, NUMBERS // max(1, int(np.prod(rows.shape[1:]))))
    for first in range(0, len(rows), step):
        yield torch.from_numpy(np.array(rows[first : first + step]))
