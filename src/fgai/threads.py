"""Locks on what threads share: torch's random generators, and a model's mode and hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")
_LOCK = threading.RLock()


def exclusive() -> AbstractContextManager[object]:
    """Return a context that no two threads are in at a time; blocks of one thread may be nested."""
    return _LOCK


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the global generators for the block, exclusively, and restore them afterwards."""
    cuda = device.type == "cuda"
    with exclusive(), torch.random.fork_rng([device] if cuda else []):
        torch.default_generator.manual_seed(seed)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def with_gradients(function: Callable[P, T]) -> Callable[P, T]:
    """Enable gradients in a function, also under `torch.no_grad` and `torch.inference_mode`."""

    @wraps(function)
    def enabled(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch.inference_mode(False), torch.enable_grad():
            return function(*args, **kwargs)

    return enabled
