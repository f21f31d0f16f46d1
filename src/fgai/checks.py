"""Checks of arguments: each raises one `InputError` with argument, requirement, value and remedy."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fgai.errors import InputError

__all__ = [
    "above", "at_least", "dense", "device", "edge_index", "finite", "fraction", "mask", "memory", "one_of",
    "positions", "rate", "real_number", "seed", "whole",
]  # fmt: skip

S = TypeVar("S", str, str | None)
LARGEST = 2**63 - 1  # the largest whole number that tensors hold
SMALL = 1 << 26  # bytes that are allocated without checking the free memory


def one_of(value: S, name: str, options: Sequence[S], *, any_case: bool = False) -> S:
    """Return the option that `value` is, else raise and suggest the nearest; `any_case` ignores case."""
    if value in options:
        return value
    words = {str(option).lower(): option for option in options}
    if any_case and str(value).lower() in words:
        return words[str(value).lower()]
    near = get_close_matches(str(value).lower(), list(words), n=1)
    hint = f"; did you mean {words[near[0]]!r}?" if near else ""
    listed = ", ".join(str(option) for option in options)
    raise InputError(f"`{name}` must be one of {listed}, got {value!r}{hint}")


def _number(
    value: float, name: str, rule: str, satisfied: Callable[[float], bool], remedy: str = ""
) -> float:
    """Return `value` if it is a finite number that satisfies the rule, else raise."""
    is_int = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST
    if not (is_int or (isinstance(value, float) and isfinite(value))) or not satisfied(value):
        raise InputError(f"`{name}` must be {rule}, got {value!r}{f'; {remedy}' if remedy else ''}")
    return value


def real_number(value: float, name: str) -> float:
    """Return `value` if it is a finite number, else raise."""
    return _number(value, name, "a finite number", lambda number: True)


def at_least(value: float, name: str, low: float, remedy: str = "") -> float:
    """Return `value` if it is a finite number `>= low`, else raise."""
    return _number(value, name, f"at least {low}", lambda number: number >= low, remedy)


def above(value: float, name: str, low: float) -> float:
    """Return `value` if it is a finite number `> low`, else raise."""
    return _number(value, name, f"above {low}", lambda number: number > low)


def fraction(value: float, name: str, remedy: str = "") -> float:
    """Return `value` if it is a number between 0 and 1, else raise."""
    return _number(value, name, "between 0 and 1", lambda number: 0 <= number <= 1, remedy)


def rate(value: float, name: str = "dropout") -> float:
    """Return `value` if it is a number in [0, 1), e.g. a rate of dropout, else raise."""
    return _number(value, name, "at least 0 and below 1", lambda number: 0 <= number < 1)


def whole(value: int, name: str, low: int = 0, high: int | None = None) -> int:
    """Return `value` if it is a whole number in `low..high`, else raise."""
    most = LARGEST if high is None else high
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
        limit = "" if high is None else f", at most {high}"
        raise InputError(f"`{name}` must be at least {low}{limit} and whole, got {value!r}")
    return value


def memory(count: int, item_size: int, name: str) -> None:
    """Raise if `count` items of `item_size` bytes exceed the free memory; some allocators grant any size."""
    if count * item_size <= SMALL:
        return
    free = _free_memory()
    if count * item_size > free:
        need, free_gb = count * item_size / 1e9, free / 1e9
        raise InputError(f"`{name}` needs {need:.3g} GB of memory, and {free_gb:.3g} GB are free; lower it")


def _free_memory() -> int:
    """Return the bytes that can be allocated without swapping, or those the machine has in all."""
    if sys.platform == "linux":
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return LARGEST


def seed(value: int, name: str = "seed") -> int:
    """Return `value` if it is a whole number in 0..2³²−1, which random generators take, else raise."""
    return whole(value, name, 0, 2**32 - 1)


def device(value: torch.device | str, name: str = "device") -> torch.device:
    """Return the device if torch knows it and this machine has it, else raise."""
    try:
        chosen = torch.device(value)
    except RuntimeError as error:
        raise InputError(f"`{name}` must be a device of torch such as cpu or cuda, got {value!r}") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise InputError(f"`{name}` must exist, got {value!s}, and torch finds {count} GPUs; use cpu")
    return chosen


def dense(tensor: Tensor, name: str) -> Tensor:
    """Return `tensor` if it is dense and holds values, else raise."""
    if tensor.is_meta or tensor.layout != torch.strided:
        kind = "one on the device meta" if tensor.is_meta else str(tensor.layout)
        raise InputError(f"`{name}` must be a dense tensor with values, got {kind}; use `.to_dense()`")
    return tensor


def finite(tensor: Tensor, name: str) -> Tensor:
    """Return `tensor` if every entry is finite, else raise with the count and the first bad row."""
    dense(tensor, name)
    good = torch.isfinite(tensor)
    if bool(good.all()):
        return tensor
    bad = (~good).nonzero()
    row = int(bad[0, 0]) if bad.dim() == 2 and bad.shape[1] else 0
    text = f"got {bad.shape[0]} NaN or infinite entries, the first in row {row}"
    raise InputError(f"`{name}` must be finite, {text}; clean or impute them before use")


def edge_index(edges: Tensor, num_nodes: int, name: str = "edge_index") -> Tensor:
    """Return `edges` if it is an integer tensor of shape [2, E] and entries 0..num_nodes-1, else raise."""
    if not isinstance(edges, Tensor) or edges.dim() != 2 or edges.shape[0] != 2:
        shape = tuple(edges.shape) if isinstance(edges, Tensor) else type(edges).__name__
        raise InputError(f"`{name}` must have shape [2, num_edges], got {shape}")
    if edges.dtype not in (torch.int64, torch.int32):
        raise InputError(f"`{name}` must hold integers (torch.long), got {edges.dtype}; use `.long()`")
    if edges.numel() and (int(edges.min()) < 0 or int(edges.max()) >= num_nodes):
        nodes = f"0..{num_nodes - 1}, got {int(edges.min())}..{int(edges.max())}"
        raise InputError(f"`{name}` must name nodes {nodes}; check `num_nodes` or relabel the nodes")
    return edges.long()


def mask(values: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Return `values` if it is a boolean tensor of this shape, else raise."""
    if values.dtype != torch.bool or values.shape != shape:
        got = f"{values.dtype} {tuple(values.shape)}"
        raise InputError(f"`{name}` must be a boolean mask of shape {tuple(shape)}, got {got}")
    return values


def positions(index: Tensor, count: int, name: str = "positions") -> Tensor:
    """Return `index` if it holds positions 0..count-1 or is a boolean mask of shape [count], else raise."""
    if index.dtype == torch.bool:
        if index.shape != (count,):
            raise InputError(f"a mask for `{name}` must have shape [{count}], got {tuple(index.shape)}")
        return index
    if index.dtype not in (torch.int64, torch.int32):
        raise InputError(f"`{name}` must hold integers or be a boolean mask, got {index.dtype}")
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= count):
        raise InputError(f"`{name}` must be in 0..{count - 1}, got {int(index.min())}..{int(index.max())}")
    return index.long()
