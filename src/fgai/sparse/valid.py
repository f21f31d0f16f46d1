"""Checks that indices and pointers stay in bounds, once per tensor and again after it was changed."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fgai.errors import InputError

LARGEST = 2**31 - 1  # kernels count nodes, edges and entries in 32 bits
T = TypeVar("T")
INTEGERS = (torch.int64, torch.int32)
# Results of checks by tensor; not attributes of the tensor, since the caller may save it.
_RESULTS: MutableMapping[Tensor, dict[str, tuple[int, Any]]] = WeakTensorKeyDictionary()
_POINTERS = "valid pointers"


def check_index(index: Tensor, count: int, name: str) -> None:
    """Raise `InputError` unless every integer of `index` is in 0..count-1; a tensor is read once."""
    if _capturing(index.device):
        return
    low, high = _read_once(index, "valid index", _min_max)
    if low < 0 or high >= count:
        raise InputError(f"`{name}` must be in 0..{count - 1}, got {low}..{high}")


def check_pointers(pointers: Tensor, count: int | None, name: str, entries: str = "entries") -> None:
    """Raise `InputError` unless `pointers` rise from 0 to `count`, unless None; a tensor is read once."""
    if _capturing(pointers.device):
        return
    first, last, rising = _read_once(pointers, _POINTERS, _first_last_rising)
    if first != 0 or not rising:
        raise InputError(f"`{name}` must begin at 0 and never fall, since row i is `{name}[i]:{name}[i + 1]`")
    if count not in (None, last):
        raise InputError(f"`{name}` ends at {last}, but there are {count} {entries}")


def _mark_as_valid(pointers: Tensor, count: int) -> None:
    _read_once(pointers, _POINTERS, lambda _: (0, count, True))


def _check_count(count: int, what: str) -> None:
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= LARGEST:
        raise InputError(f"the number of {what} must be a whole number in 0..{LARGEST}, got {count!r}")


def row_index(pointers: Tensor, count: int) -> Tensor:
    """Return the row of each of `count` entries; `pointers` must be valid."""
    rows = torch.arange(len(pointers) - 1, device=pointers.device)
    return torch.repeat_interleave(rows, pointers.diff(), output_size=count)


def row_entries(pointers: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of the entries of `rows`, row by row, and for each entry its index in `rows`."""
    first, count = pointers[rows], pointers[rows + 1] - pointers[rows]
    index = torch.repeat_interleave(count)
    return torch.arange(len(index), device=rows.device) + (first - count.cumsum(0) + count)[index], index


def _min_max(index: Tensor) -> tuple[int, int]:
    return (int(index.min()), int(index.max())) if index.numel() else (0, -1)


def _first_last_rising(pointers: Tensor) -> tuple[int, int, bool]:
    return int(pointers[0]), int(pointers[-1]), bool((pointers[1:] >= pointers[:-1]).all())


def _read_once(tensor: Tensor, key: str, read: Callable[[Tensor], T]) -> T:
    """Return `read(tensor)`, computed again only after the tensor was changed in place."""
    if tensor.is_inference():  # such tensors have no `_version`
        return read(tensor)
    cache = _RESULTS.setdefault(tensor, {})
    version, value = cache.get(key, (-1, None))
    if version != tensor._version:
        value = read(tensor)
        cache[key] = tensor._version, value
    result: T = value
    return result


def _capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the device, so that no tensor can be read."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
