"""Ranges of limits from rows that come in blocks: what a layer reads of all nodes, kept on disk meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fgai.attention import Limits, collecting, limits_of
from fgai.attention.limits import SAMPLE, SLACK, largest, ranges
from fgai.ops import clip, loudness
from fgai.sparse import Features
from fgai.store.arrays import Array, ArrayFile, map_array

NUMBERS = 1 << 22
"""Numbers that are in memory together; the order statistics of one channel take all its rows."""


class LeftOut(NamedTuple):
    """How many honest nodes limits leave out.

    Attributes:
        cut: share of the nodes at either end of each channel.
        soften: share of the nodes, the loudest as a whole.
        sampled: take order statistics from a few thousand nodes, evenly spread.
    """

    cut: float
    soften: float
    sampled: bool


def measure_layer(
    layer: Any, blocks: Callable[[], Iterator[Tensor | Features]], folder: Path, left_out: LeftOut
) -> None:
    """Take the ranges of a layer's limits from all rows it reads.

    What is said is written down as it reaches each limits. Where nothing is left out, limits change nothing
    and all are met in one go; else those behind others must wait until these are known.

    Args:
        layer: in evaluation mode; without limits nothing is done.
        blocks: gives the layer's input in blocks of rows, as often as it is asked.
        folder: for what is in between.
        left_out: of the ranges.
    """
    found = limits_of(layer)
    together = left_out.cut == left_out.soften == 0
    for group in [found] if together and found else [[limits] for limits in found]:
        for limits, path in _written(layer, blocks(), group, folder).items():
            _measure(limits, map_array(path), left_out)
            path.unlink()


def _written(
    layer: Any, blocks: Iterator[Tensor | Features], group: list[Limits], folder: Path
) -> dict[Limits, Path]:
    """Write what reaches some limits of a layer, a file each."""
    paths = {limits: folder / f"said.{number}.npy" for number, limits in enumerate(group)}
    files: dict[Limits, ArrayFile] = {}
    with ExitStack() as stack:

        def note(limits: Limits, rows: Tensor) -> None:
            said = rows.reshape(-1, *limits.low.shape).numpy()
            if limits not in files:
                files[limits] = stack.enter_context(ArrayFile(paths[limits], said.dtype, said.shape[1:]))
            files[limits].append(said)

        with collecting(group, note):
            for x in blocks:
                layer.sides(x)
    return paths


def _measure(limits: Limits, rows: Array, left_out: LeftOut) -> None:
    """As `Limits.measure`, from rows on disk."""
    every = max(1, len(rows) // SAMPLE) if left_out.sampled else 1
    cut, soften = left_out.cut, left_out.soften
    low, high = _ends(rows, 0.0) if cut == 0 else _ends(rows[::every], cut)
    radius = limits.radius
    if not limits.derived:
        counted = rows[::every] if soften else rows
        loud = [loudness(clip(block, low, high), low, high) for block in _blocks(counted)]
        radius = largest(torch.cat(loud), soften) * (1 + SLACK)
    usual = limits.usual
    if every == 1:
        moved = sum(int((clip(block, low, high, radius) != block).sum()) for block in _blocks(rows))
        usual = torch.tensor(moved / max(1, rows.size))
    limits.set(low, high, radius, usual)


def _ends(rows: Array, cut: float) -> tuple[Tensor, Tensor]:
    """See `ranges`."""
    if cut == 0:
        ends = [torch.stack([block.amin(0), block.amax(0)]) for block in _blocks(rows)]
        return ranges(torch.cat(ends), 0.0)
    shape, flat = rows.shape[1:], rows.reshape(len(rows), -1)
    step = max(1, NUMBERS // max(1, len(flat)))
    columns = range(0, flat.shape[1], step)
    parts = [ranges(torch.from_numpy(np.array(flat[:, at : at + step])), cut) for at in columns]
    low, high = (torch.cat(part).view(shape) for part in zip(*parts, strict=True))
    return low, high


def _blocks(rows: Array) -> Iterator[Tensor]:
    step = max(1, NUMBERS // max(1, int(np.prod(rows.shape[1:]))))
    for first in range(0, len(rows), step):
        yield torch.from_numpy(np.array(rows[first : first + step]))
