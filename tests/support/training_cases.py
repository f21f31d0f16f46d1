"""A small graph, models that are always the same, and how two are compared."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fgai.trackers import Tracker
from fgai.training import untrained
from support.graph_cases import small_data

GRAPH = small_data()
SHORT: dict[str, Any] = {"epochs": 4, "progress": False}


def fresh(name: str = "GAT", seed: int = 0, **changes: Any) -> nn.Module:
    sizes = {"GT": {"hidden_channels": 16, "heads": (4, 1)}, "GCN": {"hidden_channels": 6}}.get(
        name, {"hidden_channels": 2, "heads": 3}
    )
    return untrained(name, GRAPH, seed=seed, **{**sizes, **changes})


def assert_same_weights(first: nn.Module, second: nn.Module) -> None:
    a, b = first.state_dict(), second.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def header_of(path: Path) -> dict[str, str]:
    """What a file of tensors says about itself."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size])["__metadata__"]


class Calling(Tracker):
    """Calls a function after every epoch, with its number and values."""

    def __init__(self, call: Callable[[int, Any], object]) -> None:
        self.call = call

    def on_epoch(self, run: str, epoch: int, values: Any) -> None:
        self.call(epoch, values)
