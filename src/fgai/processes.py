"""Processes that train together: a single one by default, several inside `fgai.large.process_group`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor, nn

from fgai.errors import RanksError

T = TypeVar("T")


class ProcessGroup:
    """Process number `rank` of the `size` of a training; by default a single one, which keeps its values.

    All processes must call the same methods in the same order. `fgai.large` implements groups of several.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.is_main = rank == 0  # the process that writes and prints
        self.is_distributed = size > 1

    def local_device(self, device: torch.device) -> torch.device:
        """Return the device of this process: of GPUs without a number, its own on its machine."""
        if self.is_distributed and device.type == "cuda" and device.index is None:
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return device

    def gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks."""
        return [value]

    def broadcast(self, value: T) -> T:
        """Return the value of rank 0."""
        return value

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over all processes, in place."""

    def average_gradients(self, parameters: Sequence[nn.Parameter], weight: int) -> None:
        """Replace gradients by their mean over all processes, weighted by the seeds of their batches."""

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        self.gather(None)

    def share(self, items: Sequence[T]) -> list[T]:
        """Return this process's contiguous share of the items."""
        ends = [len(items) * rank // self.size for rank in (self.rank, self.rank + 1)]
        return list(items[slice(*ends)])

    def any(self, flag: bool) -> bool:
        """Whether a flag is set in any process."""
        return max(self.gather(flag))

    def require_equal(self, values: Mapping[str, object]) -> None:
        """Raise `RanksError` unless values, by name, are the same in all processes."""
        others = self.gather(dict(values))
        differ = [name for name in values if any(other[name] != others[0][name] for other in others)]
        if differ:
            same = f"the {self.size} processes must have the same {', '.join(differ)}"
            raise RanksError(f"{same}; start all with the same command, versions and files")


SINGLE = ProcessGroup()  # this process alone
CURRENT: ContextVar[ProcessGroup] = ContextVar("processes", default=SINGLE)


def current() -> ProcessGroup:
    """Return the group that this process has joined; a single process if none."""
    return CURRENT.get()
