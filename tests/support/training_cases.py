"""A small graph, models that are always the same, and how two are compared."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fgai.attention import add_limits
from fgai.trackers import Tracker
from fgai.training import FaithfulSettings, HardenSettings, untrained_model
from fgai.training.capture import _backward, _sum_by_name
from fgai.training.resume import copy_model
from support.graph_cases import small_data

GRAPH = small_data()
SHORT: dict[str, Any] = {"epochs": 4, "progress": False}


def fresh(name: str = "GAT", seed: int = 0, **changes: Any) -> nn.Module:
    sizes = {"GT": {"hidden_channels": 16, "heads": (4, 1)}, "GCN": {"hidden_channels": 6}}.get(
        name, {"hidden_channels": 2, "heads": 3}
    )
    return untrained_model(name, GRAPH, seed=seed, **{**sizes, **changes})


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


def gradients(
    model: nn.Module, parts: Iterator[dict[str, Tensor]]
) -> tuple[dict[str, Tensor], dict[str, float]]:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    names, terms = _backward(parts)
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return found, _sum_by_name(names, terms.tolist())


def close(one: dict[str, Tensor], two: dict[str, Tensor], most: float = 1e-5) -> None:
    """Assert that two gradients differ by a small part of their length."""
    assert one.keys() == two.keys()
    apart = sum(float((one[name] - two[name]).square().sum()) for name in two)
    assert (apart / sum(float(value.square().sum()) for value in two.values())) ** 0.5 < most


def nudged(vanilla: nn.Module, config: FaithfulSettings | HardenSettings) -> Any:
    """A copy whose weights differ a little, so that no term is at its minimum."""
    other, generator = copy_model(vanilla), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    if config.limits:
        add_limits(other)
    return other
