"""Which kernels run: numba on the CPU, Triton on the GPU, plain PyTorch elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import numba
import torch
from torch import Tensor

from fgai.checks import one_of
from fgai.errors import FgaiWarning, InputError, warn
from fgai.ops import cpu, reference
from fgai.typed import typed

BACKENDS = ("auto", "reference", "numba", "triton")
HOMES = {"numba": "cpu", "triton": "cuda"}  # the other backends run anywhere
_backend: ContextVar[str] = ContextVar("fgai_backend", default="auto")


@typed
@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Force a backend inside the block: `auto` (default), `reference`, `numba` or `triton`."""
    token = _backend.set(one_of(name, "name", BACKENDS))
    try:
        yield
    finally:
        _backend.reset(token)


@cache
def _triton() -> ModuleType:
    """The Triton kernels, or the reference with a warning when Triton cannot be imported."""
    try:
        from fgai.ops import gpu
    except ImportError as error:
        note = f"Triton is not available ({error}); the GPU runs plain PyTorch operations, which are slower"
        warn(FgaiWarning(note))
        return reference
    return gpu


@cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def _has_numba() -> bool:
    """Whether numba may be used: not with NUMBA_DISABLE_JIT=1, nor inside `torch.compile`."""
    return not numba.config.DISABLE_JIT and not torch.compiler.is_compiling()


def _kernels_for(tensor: Tensor, *, narrow: bool = False) -> ModuleType:
    """The backend for a tensor; `narrow`: the operation has kernels for 16 bits on the GPU."""
    forced = _backend.get()
    if forced == "numba" and numba.config.DISABLE_JIT:
        raise InputError('NUMBA_DISABLE_JIT=1 forbids the backend "numba"; use "auto" or unset it')
    home = tensor.device.type
    if forced in HOMES and HOMES[forced] != home:
        where = f"{HOMES[forced]} tensors, got one on {tensor.device}"
        raise InputError(f'the backend {forced!r} runs on {where}; use "auto" or move the tensor')
    types = [torch.float32, torch.float64]
    if narrow and home == "cuda":
        types += [torch.bfloat16, torch.float16]
    if forced == "reference" or tensor.dtype not in types:
        return reference
    if home == "cpu":
        return cpu if _has_numba() else reference
    return _triton() if home == "cuda" else reference
