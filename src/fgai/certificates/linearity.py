"""Is the output linear in a tensor? Tracked through a forward pass, operation by operation.

It is if all operations on tracked tensors are sums, products with something untracked, and moves of numbers,
and none reads a number out. Operations that are not tracked, as in another thread, show as constants that
change in a second run from another start (`_changed_constant`).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SHAPES = "view _unsafe_view _reshape_alias reshape alias detach expand unsqueeze squeeze t transpose permute"
_PARTS = "select slice narrow split split_with_sizes unbind diagonal as_strided index index_select gather"
_MOVES = "clone _to_copy copy cat stack flip roll repeat constant_pad_nd masked_fill masked_select where"
_WRITES = "index_put index_copy select_scatter slice_scatter zero fill lift_fresh"
_SUMS = "add sub rsub neg sum mean cumsum index_add scatter_add"
_LINEAR = frozenset(f"{_SHAPES} {_PARTS} {_MOVES} {_WRITES} {_SUMS}".split())
_PRODUCTS = dict.fromkeys(("mul", "mm", "bmm", "mv", "dot", "linear"), 0)
_PRODUCTS |= dict.fromkeys(("addmm", "baddbmm", "addmv"), 1)
"""Name of a product → position of the first factor among its arguments."""
_NORMS = {"native_batch_norm": 5, "_native_batch_norm_legit": 5, "cudnn_batch_norm": 5}
"""Name of a batch norm → its argument that says whether it uses the statistics of the batch."""
_FACTORIES = ("empty", "zeros", "ones", "full")
_BY_SHAPE = frozenset(f"{name}_like" for name in _FACTORIES) | {f"new_{name}" for name in _FACTORIES}
_OVERWRITING = ("copy_", "fill_", "zero_")
"""Operations that do not read their first argument, which may be uninitialised memory."""
_UNREAD = frozenset([*f"{_SHAPES} {_PARTS}".split(), *_BY_SHAPE]) - {"index", "index_select", "gather"}
"""Operations that compute nothing from the numbers of a tensor."""
_READERS = "numpy __array__ tolist data_ptr __dlpack__ untyped_storage storage"
_EXITS = frozenset(f"{_READERS} __reduce_ex__ __repr__ __format__ __deepcopy__".split())
"""Methods that read numbers out of a tensor without an operation."""
_TYPES = (torch.float32, torch.float64)
SAMPLE = 64  # entries of a constant that are compared one by one, about as many
AGAIN = 1e-4  # relative change of constants computed again, by the order of sums on a GPU

# mypy: disable-error-code="no-untyped-call"


V = TypeVar("V")


def _tensors(*tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by their names in its schema."""
    return dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs


def _written(func: Any, named: dict[str, Any]) -> list[Any]:
    """Return the arguments that an operation writes into."""
    written = [one.name for one in func._schema.arguments if one.alias_info and one.alias_info.is_write]
    return [named[name] for name in written if name in named]


class _Memory(Generic[V]):
    """Values kept for tensors by their memory, so that views share them."""

    def __init__(self) -> None:
        self._starts: dict[torch.device, list[int]] = {}
        self._values: dict[tuple[torch.device, int], tuple[int, StorageWeakRef, V]] = {}

    def find(self, tensor: Tensor) -> V | None:
        if not tensor.numel() or tensor.layout is not torch.strided:
            return None
        starts, address = self._starts.get(tensor.device, []), tensor.data_ptr()
        while (index := bisect_right(starts, address) - 1) >= 0:
            end, memory, value = self._values[tensor.device, starts[index]]
            if not memory.expired():
                return value if address < end else None
            del self._values[tensor.device, starts.pop(index)]  # freed: another tensor may be there
        return None

    def keep(self, tensor: Tensor, value: V) -> None:
        storage, starts = tensor.untyped_storage(), self._starts.setdefault(tensor.device, [])
        start = storage.data_ptr()
        if (tensor.device, start) not in self._values:
            insort(starts, start)
        self._values[tensor.device, start] = start + storage.nbytes(), StorageWeakRef(storage), value


class _OperationMode(TorchDispatchMode):
    """Base of modes that see every operation; `violation` is the first one that breaks the property."""

    violation: str | None = None

    def report(self, name: str) -> None:
        self.violation = self.violation or name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags:  # the next run will differ
            self.report(name)
        return self.run(func, name, args, kwargs or {})

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def tracks(self, *tree: Any) -> bool:
        raise NotImplementedError


class _LinearityMode(_OperationMode):
    """Tracks the tensors given to `track`; `constants` summarise the other tensors of every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.started = False
        self.constants: list[tuple[str, tuple[Any, ...], tuple[Tensor, ...]]] = []
        self._tracked: _Memory[bool] = _Memory()

    def track(self, tensor: Tensor) -> None:
        self.started = True
        if tensor.numel() and self._tracked.find(tensor) is None:
            self._tracked.keep(tensor, True)

    def tracks(self, *tree: Any) -> bool:
        # By memory, so views and writes into a buffer are seen; no operation makes a sparse tensor of tracked
        # numbers without a violation.
        return any(self._tracked.find(leaf) is not None for leaf in _tensors(tree))

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tracked = self.tracks(args, kwargs)
        if self.started and name not in _UNREAD:
            self._keep_constants(name, args[1:] if name in _OVERWRITING else args, kwargs)
        out = func(*args, **kwargs)
        if tracked and name not in _BY_SHAPE:
            self._track_results(func, name.removesuffix("_"), args, kwargs, out)
        return out

    def _keep_constants(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = tree_leaves((args, {key: value for key, value in kwargs.items() if key != "out"}))
        numbers = tuple(leaf for leaf in leaves if isinstance(leaf, int | float))
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and not self.tracks(leaf))
        self.constants.append((name, numbers, tuple(_summary(one) for one in tensors)))

    def _track_results(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        results = _tensors(out, _written(func, _by_name(func, args, {})))
        if not self._is_linear(func, name, args, kwargs) or not all(one.dtype in _TYPES for one in results):
            self.report(name)
        for result in results:
            if result.layout is torch.strided:
                self.track(result)

    def _is_linear(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if func.namespace != "aten":
            return False
        if name in _PRODUCTS:
            first = _PRODUCTS[name]
            return sum(self.tracks(factor) for factor in args[first : first + 2]) <= 1
        if name == "div":
            return not self.tracks(args[1]) and kwargs.get("rounding_mode") is None
        if name in ("scatter_reduce", "segment_reduce"):
            return any(argument in ("sum", "mean") for argument in args if isinstance(argument, str))
        if name == "scatter":
            return bool(kwargs.get("reduce", "add") == "add")
        if name in _NORMS:
            return args[_NORMS[name]] is False and not self.tracks(args[1:5])
        if name == "_native_batch_norm_legit_no_training":
            return not self.tracks(args[1:5])
        return name in _LINEAR


def _summary(tensor: Tensor) -> Tensor:
    """Return a few numbers that tell tensors apart: sum and absolute sum, then some of the entries."""
    flat = tensor.detach()
    flat = (flat.to_dense() if flat.layout is not torch.strided else flat).reshape(-1)
    some = flat[:: max(1, flat.numel() // SAMPLE)].double()
    total = flat.double() if flat.dtype == torch.bool else flat
    sums = total.sum(dtype=torch.float64), total.abs().sum(dtype=torch.float64)
    return torch.cat([torch.stack(sums), some]).cpu()


def _changed_constant(one: _LinearityMode, other: _LinearityMode) -> str | None:
    """Name an operation whose constants differ between two runs; None if all are the same."""
    for first, second in zip_longest(one.constants, other.constants, fillvalue=("an operation", (), ())):
        same = first[:2] == second[:2] and len(first[2]) == len(second[2])
        if not same or not all(map(_summaries_near, first[2], second[2])):
            return first[0]
    return None


def _summaries_near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    size = one.nan_to_num(0.0, 0.0, 0.0).abs()
    sums, entries = size[1:2].expand(2), size[2:]  # no entries: a tensor without any
    room = AGAIN * torch.cat([sums, entries.amax().expand_as(entries) if len(entries) else entries])
    same = ((one - other).abs() <= room) | (one == other) | (one.isnan() & other.isnan())
    return bool(same.all())


class _ExitMode(TorchFunctionMode):
    """Reports methods that read tracked numbers out of a tensor."""

    def __init__(self, mode: _OperationMode) -> None:
        super().__init__()
        self.mode = mode

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _EXITS and self.mode.tracks(args):
            self.mode.report(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def _track_linearity() -> Iterator[_LinearityMode]:
    """Track the tensors given to `track`, and what is computed from them."""
    mode = _LinearityMode()
    with _ExitMode(mode), mode:
        yield mode
