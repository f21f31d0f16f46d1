"""Ranks: the processes torchrun starts for one training. Where nothing was joined there is one, and it leads.

Control goes over gloo, on the CPU, and gradients of models on GPUs over NCCL; both are PyTorch's own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
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

T = TypeVar("T")
TIMEOUT = 1800.0
"""Seconds a rank waits for the others; exact passes over large graphs lie between two exchanges."""
ROUND, OPEN, POLL = "fgai", "open", 0.05
"""Where the part of the store is named that all ranks use, where it is opened; seconds between two looks."""
FAILED = "failed"
"""Where in the store the first rank that fails says why."""


class Ranks:
    """One process among those of a training; alone by default, when every exchange gives back what it got.

    What is exchanged must be exchanged by all ranks, in the same order.

    Args:
        rank: of this process, from 0.
        size: how many there are.
        store: of the group they have joined, where a rank that fails leaves word; None where there is none.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size, self._store = rank, size, store

    @property
    def _alone(self) -> bool:
        """Whether there is no group; that of one process is one, too."""
        return self._store is None

    @property
    def leads(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are others."""
        return self.size > 1

    def place(self, device: torch.device) -> torch.device:
        """Return the device of this rank: of GPUs that are not numbered, its own on its machine."""
        if self.several and device.type == "cuda" and device.index is None:
            return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        return device

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, in their order."""
        if self._alone:
            return [value]
        found: list[T | None] = [None] * self.size
        with self._heard():
            dist.all_gather_object(found, value)
        return found  # type: ignore[return-value]

    def wait(self) -> None:
        """Wait until all ranks are here."""
        self.gather(None)

    def share(self, items: Sequence[T]) -> list[T]:
        """Return the items that are this rank's, a stretch of them; together the ranks have all, in order."""
        ends = [len(items) * rank // self.size for rank in (self.rank, self.rank + 1)]
        return list(items[slice(*ends)])

    def any(self, flag: bool) -> bool:
        """Whether a flag is up on any rank."""
        return max(self.gather(flag))

    def first(self, value: T) -> T:
        """Return the value of the rank that leads."""
        if self._alone:
            return value
        found = [value]
        with self._heard():
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def agree(self, found: Mapping[str, object]) -> None:
        """Make sure that values are the same on all ranks.

        Args:
            found: what to compare, by the name an error gives it.

        Raises:
            RanksError: they are not.
        """
        others = self.gather(dict(found))
        differ = [name for name in found if any(other[name] != others[0][name] for other in others)]
        if differ:
            raise RanksError(
                f"the {self.size} ranks do not have the same {', '.join(differ)}; start all of them with the"
                " same command, versions and files"
            )

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Give all ranks the sums over all ranks, in place and in one message."""
        if self._alone:
            return
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        with self._heard():
            dist.all_reduce(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def average_gradients(self, parameters: Sequence[nn.Parameter], weight: int) -> None:
        """Give all ranks the gradient averaged over ranks.

        A parameter without a gradient on every rank stays without one: an optimizer leaves it alone.

        Args:
            parameters: of a model that is the same everywhere.
            weight: of this rank, the seeds of its batch; 0 where it had none.
        """
        if self._alone:
            return
        like = parameters[0]
        known = like.new_tensor([float(p.grad is not None) for p in parameters])
        total = like.new_tensor([float(weight)])
        sums = [torch.zeros_like(p) if p.grad is None else p.grad * weight for p in parameters]
        self.add_up([*sums, known, total])
        for parameter, value, some in zip(parameters, sums, known.tolist(), strict=True):
            parameter.grad = value / total if some else None

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Turn what gloo and NCCL raise when a rank is gone into what that rank said."""
        try:
            yield
        except RuntimeError as error:
            raise RanksError(self._reason(error)) from error

    def _reason(self, error: RuntimeError) -> str:
        with suppress(RuntimeError):
            if not self._alone and self._store.check([FAILED]):
                return str(self._store.get(FAILED).decode(errors="replace"))
        return (
            "a rank was lost without a word, or none was heard of for too long; torchrun says which. The"
            f" same command goes on from the last checkpoint ({error})"
        )

    def _tell(self, error: BaseException) -> None:
        """Leave word of a failure for the others; the first counts."""
        with suppress(RuntimeError):
            if not self._alone:
                text = f"rank {self.rank} failed: {error or type(error).__name__}"
                self._store.compare_set(FAILED, "", text)


ALONE = Ranks()
"""This process, when nothing was joined."""
_CURRENT: ContextVar[Ranks] = ContextVar("ranks", default=ALONE)


def current() -> Ranks:
    """Return the ranks this process has joined; itself alone if none."""
    return _CURRENT.get()


@contextmanager
def joined(device: torch.device | str = "cpu", *, timeout: float = TIMEOUT) -> Iterator[Ranks]:
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
        yield ALONE
        return
    if dist.is_initialized():
        raise RanksError("this process has joined a group already; leave it first, or do not join twice")
    if _from_environment("LOCAL_WORLD_SIZE") == _from_environment("WORLD_SIZE"):
        _stay_on_this_machine()
    ranks = _met(torch.device(device), seconds)
    token = _CURRENT.set(ranks)
    try:
        if torch.device(device).type == "cuda":
            _take_own_gpu(ranks, torch.device(device))
        yield ranks
    except BaseException as error:
        ranks._tell(error)
        raise
    finally:
        _CURRENT.reset(token)
        dist.destroy_process_group()


def _from_environment(name: str) -> int:
    return int(os.environ.get(name, "1"))


def _stay_on_this_machine() -> None:
    """Let gloo and NCCL listen on the loopback interface; by themselves they take that of the host's name."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)


def _part(store: Any, name: str) -> Any:
    """A part of a store, where keys do not meet those of other parts."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]


def _fresh(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return a part of the store in which these processes, and no others, have written.

    After a restart torchrun's store may still hold what processes that are gone have left, their addresses
    among it. So the first rank gives a new part a name that nobody had, and opens it when all others have
    signed there. A part that is old is signed by somebody else, or is never opened.
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
    raise RuntimeError(f"rank 0 was not there in {timeout}")


def _met(device: torch.device, timeout: timedelta) -> Ranks:
    """Meet the other ranks where torchrun says."""
    backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
    try:
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        store = _fresh(store, rank, size, timeout)
        dist.init_process_group(
            backend, store=_part(store, "group"), rank=rank, world_size=size, timeout=timeout
        )
    except RuntimeError as error:
        raise RanksError(
            f"the ranks did not find each other at {os.environ.get('MASTER_ADDR')}; start them with torchrun,"
            f" as many as there are ({error})"
        ) from error
    return Ranks(rank, size, store)


def _take_own_gpu(ranks: Ranks, device: torch.device) -> None:
    """Make the GPU of this rank the current one, if it is no other's: NCCL knows one rank for each.

    Raises:
        RanksError: there are fewer GPUs than ranks, or several were given the same.
    """
    place, count = ranks.place(device), torch.cuda.device_count()
    index = torch.cuda.current_device() if place.index is None else place.index
    own = str(torch.cuda.get_device_properties(index).uuid) if index < count else None
    found = ranks.gather(own)
    if None in found or len(set(found)) < len(found):
        raise RanksError(
            f"every rank needs a GPU of its own; of {ranks.size} at least one has none or shares one. This"
            f" machine has {count}: start as many ranks as there are GPUs, and `device` without a number"
        )
    torch.cuda.set_device(index)
