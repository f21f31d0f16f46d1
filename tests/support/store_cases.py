"""What tests of stored graphs share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fgai.attention import AttentionMap, LayerAttention
from fgai.large import StoredObservation

HEADING = 128
"""Bytes of an `.npy` file before its numbers."""


def array_bytes(folder: Path) -> int:
    """Bytes of the files in a folder, without the headings of arrays."""
    return sum(file.stat().st_size - HEADING * (file.suffix == ".npy") for file in folder.iterdir())


def loaded_attention(observation: StoredObservation) -> AttentionMap:
    """Copy the attention of all layers into memory."""
    adjacency, layers = observation.rows().to_adjacency(), []
    for number, name in enumerate(observation.layers):
        values, scores = np.array(observation.attention(number)), observation.scores(number)
        ranks = None if scores is None else torch.from_numpy(np.array(scores))
        layers.append(LayerAttention.from_adjacency(adjacency, torch.from_numpy(values), name, ranks))
    return AttentionMap(tuple(layers))


def slow(*cases: tuple[Any, ...]) -> list[Any]:
    """Mark cases of a parametrised test slow."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]
