"""`joined`: train together with the other processes torchrun started.

Control messages use gloo on the CPU, gradients of models on GPUs use NCCL.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic, sleep
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from fgai.checks import above
from fgai.errors import RanksError
from fgai.processes import CURRENT, SINGLE, ProcessGroup
from fgai.typed import typed

T = TypeVar("T")
TIMEOUT = 1800.0
"""Seconds a rank waits for the others; exact passes over large graphs lie between two exchanges."""
ROUND, OPEN, FAILED = "fgai", "open", "failed"
"""Keys of the store: the part that all ranks use, whether it is open, the error of the first that fails."""
POLL = 0.05  # seconds between two looks at the store


class _TorchrunGroup(ProcessGroup):
    """One process among those torchrun started; errors of lost processes name their cause."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        super().__init__(rank, size)
        self._store = store

    def gather(self, value: T) -> list[T]:
        values: list[T | None] = [None] * self.size
        with self._explained():
            dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def first(self, value: T) -> T:
        values = [value]
        with self._explained():
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with self._explained():
            dist.all_reduce(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def average_gradients(self, parameters: Sequence[nn.Parameter], weight: int) -> None:
        """Weighted mean over all processes; a parameter without a gradient in all of them keeps none."""
        present = parameters[0].new_tensor([float(p.grad is not None) for p in parameters])
        total = parameters[0].new_tensor([float(weight)])
        sums = [torch.zeros_like(p) if p.grad is None else p.grad * weight for p in parameters]
        self.add_up([*sums, present, total])
        for parameter, value, some in zip(parameters, sums, present.tolist(), strict=True):
            parameter.grad = value / total if some else None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Raise the error that another process left instead of that of gloo or NCCL."""
        try:
            yield
        except RuntimeError as error:
            reason = (
                "a rank was lost without an error, or did not answer in time; torchrun says which. The"
                f" same command resumes from the last checkpoint ({error})"
            )
            with suppress(RuntimeError):
                if self._store.check([FAILED]):
                    reason = self._store.get(FAILED).decode(errors="replace")
            raise RanksError(reason) from error

    def leave_error(self, error: BaseException) -> None:
        """Store an error for the other processes; the first counts."""
        with suppress(RuntimeError):
            text = f"rank {self.rank} failed: {error or type(error).__name__}"
            self._store.compare_set(FAILED, "", text)


@contextmanager
@typed
def joined(device: torch.device | str = "cpu", *, timeout: float = TIMEOUT) -> Iterator[ProcessGroup]:
    """Train together with the other processes torchrun started, inside the block.

    `fgai.train` and `fgai.make_faithful` with a `batch_size` share their batches then. Without torchrun
    nothing happens. An error on one rank ends the block with an error on all. Ranks on one machine listen on
    its loopback interface alone, unless `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` say otherwise.

    Args:
        device: where models train; of GPUs every process takes its own.
        timeout: seconds to wait for the others, in every exchange.

    Raises:
        RanksError: the ranks do not find each other, disagree, share a GPU, or one failed.

    Example:
        >>> with joined() as ranks:
        ...     ranks.rank, ranks.size
        (0, 1)
    """
    seconds = timedelta(seconds=above(timeout, "timeout", 0.0))
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        yield SINGLE
        return
    if dist.is_initialized():
        raise RanksError("this process is in a group already; leave that first")
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        _stay_on_this_machine()
    ranks = _form_group(torch.device(device), seconds)
    token = CURRENT.set(ranks)
    try:
        if torch.device(device).type == "cuda":
            _take_own_gpu(ranks, torch.device(device))
        yield ranks
    except BaseException as error:
        ranks.leave_error(error)
        raise
    finally:
        CURRENT.reset(token)
        dist.destroy_process_group()


def _stay_on_this_machine() -> None:
    """Let gloo and NCCL listen on the loopback interface; by themselves they take that of the host's name."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)


def _part(store: Any, name: str) -> Any:
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _fresh(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a part of the store in which these processes, and no others, have written.

    After a restart torchrun's store may still hold keys of earlier processes, their addresses among them. So
    the first rank gives a new part a unique name, and opens it when all others have signed there. A part of
    before is signed by somebody else, or is never opened.
    """
    own, deadline = uuid4().hex, monotonic() + timeout.total_seconds()
    if rank == 0:
        part = _part(store, own)
        store.set(ROUND, own)
        part.wait([str(other) for other in range(1, size)], timeout)
        part.set(OPEN, own)
        return part
    while monotonic() < deadline:
        if store.check([ROUND]):
            part = _part(store, store.get(ROUND).decode())
            if part.compare_set(str(rank), "", own).decode() == own and part.check([OPEN]):
                return part
        sleep(POLL)
    raise RuntimeError(f"rank 0 did not answer within {timeout}")


def _form_group(device: torch.device, timeout: timedelta) -> _TorchrunGroup:
    """Form the group at torchrun's rendezvous."""
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        store = _fresh(store, rank, size, timeout)
        dist.init_process_group(
            backend, store=_part(store, "group"), rank=rank, world_size=size, timeout=timeout
        )
    except RuntimeError as error:
        raise RanksError(
            f"the processes did not connect at {os.environ.get('MASTER_ADDR')}; start all of them with"
            f" torchrun ({error})"
        ) from error
    return _TorchrunGroup(rank, size, store)


def _take_own_gpu(ranks: ProcessGroup, device: torch.device) -> None:
    """Make the GPU of this rank the current one, if it is no other's: NCCL knows one rank for each."""
    own, count = ranks.place(device), torch.cuda.device_count()
    index = torch.cuda.current_device() if own.index is None else own.index
    uuid = str(torch.cuda.get_device_properties(index).uuid) if index < count else None
    uuids = ranks.gather(uuid)
    if None in uuids or len(set(uuids)) < len(uuids):
        raise RanksError(
            f"each of the {ranks.size} processes needs a GPU of its own, this machine has {count}; start as"
            " many processes as GPUs, and give `device` without a number"
        )
    torch.cuda.set_device(index)
