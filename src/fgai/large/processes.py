"""`process_group`: train with the other processes of torchrun, by gloo, and NCCL for gradients on GPUs."""

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
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from fgai.checks import above
from fgai.errors import RanksError
from fgai.processes import CURRENT, SINGLE, ProcessGroup
from fgai.typed import typed

T = TypeVar("T")
TIMEOUT = 1800.0  # seconds a rank waits for the others; exact passes lie between two exchanges
PREFIX, OPEN, FAILED = "fgai", "open", "failed"  # keys: prefix of all ranks, if it is open, first error
POLL = 0.05  # seconds between two reads of the store


class _TorchrunGroup(ProcessGroup):
    """One process among those that torchrun started; an error names the rank that failed."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        super().__init__(rank, size)
        self._store = store

    def gather(self, value: T) -> list[T]:
        values: list[T | None] = [None] * self.size
        with self._translate_errors():
            dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def broadcast(self, value: T) -> T:
        values = [value]
        with self._translate_errors():
            dist.broadcast_object_list(values, src=0)
        return values[0]

    def all_reduce(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with self._translate_errors():
            dist.all_reduce(flat)
        sums = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, values in zip(tensors, sums, strict=True):
            tensor.copy_(values.view_as(tensor))

    def average_gradients(self, parameters: Sequence[nn.Parameter], weight: int) -> None:
        """Take weighted means over all processes; None for a parameter without a gradient in all of them."""
        counts = parameters[0].new_tensor([float(p.grad is not None) for p in parameters])
        total = parameters[0].new_tensor([float(weight)])
        sums = [torch.zeros_like(p) if p.grad is None else p.grad * weight for p in parameters]
        self.all_reduce([*sums, counts, total])
        for parameter, value, count in zip(parameters, sums, counts.tolist(), strict=True):
            parameter.grad = value / total if count else None

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise the error that another process stored instead of that of gloo or NCCL."""
        try:
            yield
        except RuntimeError as error:
            reason = "a rank was lost without an error, or did not answer in time; torchrun says which. The"
            reason += f" same command resumes from the last checkpoint ({error})"
            with suppress(RuntimeError):
                if self._store.check([FAILED]):
                    reason = self._store.get(FAILED).decode(errors="replace")
            raise RanksError(reason) from error

    def store_error(self, error: BaseException) -> None:
        """Store an error for the other processes, unless there is one."""
        with suppress(RuntimeError):
            self._store.compare_set(FAILED, "", f"rank {self.rank} failed: {error or type(error).__name__}")


@contextmanager
@typed
def process_group(device: torch.device | str = "cpu", *, timeout: float = TIMEOUT) -> Iterator[ProcessGroup]:
    """Train together with the other processes that torchrun started, inside the block.

    Without torchrun the group is this process alone. Each process takes a GPU of its own, if the `device` is
    one, and waits `timeout` seconds for the others, in every exchange. An error on one rank ends the block
    with a `RanksError` on all. Ranks on one machine listen on its loopback interface alone, unless
    `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` name others.

    Example:
        >>> with process_group() as group:
        ...     group.rank, group.size
        (0, 1)
    """
    seconds = timedelta(seconds=above(timeout, "timeout", 0.0))
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        yield SINGLE
        return
    if dist.is_initialized():
        raise RanksError("this process is in a group already; leave that first")
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1"):
        # By themselves gloo and NCCL listen on the interface of the host's name.
        for loopback in [name for _, name in socket.if_nameindex() if name.startswith("lo")][:1]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    device = torch.device(device)
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    try:
        store, rank, size = next(rendezvous("env://", timeout=seconds))
        store = _new_prefix(store, rank, size, seconds)
        dist.init_process_group(
            backend, store=PrefixStore("group", store), rank=rank, world_size=size, timeout=seconds
        )
    except RuntimeError as error:
        text = f"the processes did not connect at {os.environ.get('MASTER_ADDR')}"
        raise RanksError(f"{text}; start all of them with torchrun ({error})") from error
    group = _TorchrunGroup(rank, size, store)
    token = CURRENT.set(group)
    try:
        if device.type == "cuda":
            _take_own_gpu(group, device)
        yield group
    except BaseException as error:
        group.store_error(error)
        raise
    finally:
        CURRENT.reset(token)
        dist.destroy_process_group()


def _new_prefix(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the store under a prefix that these processes, and no others, have used.

    After a restart torchrun's store may hold keys of earlier processes: the first rank chooses a unique
    prefix, and opens it when all others have written their rank there.
    """
    own, deadline = uuid4().hex, monotonic() + timeout.total_seconds()
    if rank == 0:
        shared = PrefixStore(own, store)
        store.set(PREFIX, own)
        shared.wait([str(other) for other in range(1, size)], timeout)
        shared.set(OPEN, own)
        return shared
    while monotonic() < deadline:
        if store.check([PREFIX]):
            shared = PrefixStore(store.get(PREFIX).decode(), store)
            if shared.compare_set(str(rank), "", own).decode() == own and shared.check([OPEN]):
                return shared
        sleep(POLL)
    raise RuntimeError(f"rank 0 did not answer within {timeout}")


def _take_own_gpu(group: ProcessGroup, device: torch.device) -> None:
    """Make the GPU of this process the current one; raise if several share one, which NCCL refuses."""
    own, count = group.local_device(device), torch.cuda.device_count()
    index = torch.cuda.current_device() if own.index is None else own.index
    uuids = group.gather(str(torch.cuda.get_device_properties(index).uuid) if index < count else None)
    if None in uuids or len(set(uuids)) < len(uuids):
        text = f"each of the {group.size} processes needs a GPU of its own, this machine has {count}"
        raise RanksError(f"{text}; start as many processes as GPUs, and give `device` without a number")
    torch.cuda.set_device(index)
