"""Follow a tensor through a forward pass, operation by operation: is the output linear in it?

Autograd does not see what `detach`, a comparison or a branch hide. Here every operation that PyTorch runs is
seen, whoever calls it. A tensor is reached once an operation has read a reached one. If all operations on
reached tensors are sums, products with something not reached, and moves of numbers, the result is linear.
Reading a number out of a reached tensor, to branch on it or to compute elsewhere, ends the proof. Hidden ways
out, another thread say, show in a second run from another start: whatever is not reached must have the same
values in both (`_same_constants`).
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
_SHAPE_READERS = ("empty", "zeros", "ones", "full")
_BY_SHAPE = frozenset(f"{name}_like" for name in _SHAPE_READERS) | {f"new_{name}" for name in _SHAPE_READERS}
"""Operations that read the shape of a tensor only."""
_OVERWRITING = ("copy_", "fill_", "zero_")
"""Operations that do not read what they write into, which may be uninitialised memory."""
_UNREAD = frozenset([*f"{_SHAPES} {_PARTS}".split(), *_BY_SHAPE]) - {"index", "index_select", "gather"}
"""Operations that compute nothing from the numbers of a tensor."""
_READERS = "numpy __array__ tolist data_ptr __dlpack__ untyped_storage storage"
_EXITS = frozenset(f"{_READERS} __reduce_ex__ __repr__ __format__ __deepcopy__".split())
"""Ways out of a tensor that are not operations."""
_TYPES = (torch.float32, torch.float64)
SAMPLE = 64
"""Entries of a constant that are compared one by one, about."""
AGAIN = 1e-4
"""Relative change of constants computed again, by the order of sums on a GPU."""

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
    """Facts about tensors, by the memory they lie in, so that views share them."""

    def __init__(self) -> None:
        self._starts: dict[torch.device, list[int]] = {}
        self._facts: dict[tuple[torch.device, int], tuple[int, StorageWeakRef, V]] = {}

    def find(self, tensor: Tensor) -> V | None:
        starts, address = self._starts.get(tensor.device, []), tensor.data_ptr()
        while tensor.numel() and (index := bisect_right(starts, address) - 1) >= 0:
            end, memory, value = self._facts[tensor.device, starts[index]]
            if not memory.expired():
                return value if address < end else None
            del self._facts[tensor.device, starts.pop(index)]  # given back: something else may lie there
        return None

    def keep(self, tensor: Tensor, value: V) -> None:
        storage, starts = tensor.untyped_storage(), self._starts.setdefault(tensor.device, [])
        start = storage.data_ptr()
        if (tensor.device, start) not in self._facts:
            insort(starts, start)
        self._facts[tensor.device, start] = start + storage.nbytes(), StorageWeakRef(storage), value


class _Watch(TorchDispatchMode):
    """Sees every operation; `culprit` is the first one that ends the proof, or None."""

    culprit: str | None = None

    def blame(self, name: str) -> None:
        self.culprit = self.culprit or name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and note what it did."""
        name = func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded in func.tags:  # reached or not: the next run is another one
            self.blame(name)
        return self.watch(func, name, args, kwargs or {})

    def watch(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def reaches(self, *tree: Any) -> bool:
        raise NotImplementedError


class _Following(_Watch):
    """What happens to the tensors given to `start`; made by `_following`.

    `constants` are, for every operation since `start`, its name, its numbers and a summary of the tensors
    that are not reached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.started = False
        self.constants: list[tuple[str, tuple[Any, ...], tuple[Tensor, ...]]] = []
        self._reached: _Memory[bool] = _Memory()

    def start(self, tensor: Tensor) -> None:
        self.started = True
        if tensor.numel() and self._reached.find(tensor) is None:
            self._reached.keep(tensor, True)

    def reaches(self, *tree: Any) -> bool:
        # Memory is what is marked, so views and writes into a buffer are seen; sparse tensors are never made
        # of followed numbers without an operation that ends the proof.
        strided = (leaf for leaf in _tensors(tree) if leaf.layout is torch.strided)
        return any(self._reached.find(leaf) is not None for leaf in strided)

    def watch(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reached = self.reaches(args, kwargs)
        if self.started and name not in _UNREAD:
            self._note(name, args[1:] if name in _OVERWRITING else args, kwargs)
        out = func(*args, **kwargs)
        if reached and name not in _BY_SHAPE:
            self._pass_on(func, name.removesuffix("_"), args, kwargs, out)
        return out

    def _note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        others = {key: value for key, value in kwargs.items() if key != "out"}
        leaves = tree_leaves((args, others))
        numbers = tuple(leaf for leaf in leaves if isinstance(leaf, int | float))
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor) and not self.reaches(leaf))
        self.constants.append((name, numbers, tuple(_summary(one) for one in tensors)))

    def _pass_on(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        results = _tensors(out, _written(func, _by_name(func, args, {})))
        if not self._is_linear(func, name, args, kwargs) or not all(one.dtype in _TYPES for one in results):
            self.blame(name)
        for result in results:
            if result.layout is torch.strided:
                self.start(result)

    def _is_linear(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if func.namespace != "aten":
            return False
        if name in _PRODUCTS:
            first = _PRODUCTS[name]
            return sum(self.reaches(factor) for factor in args[first : first + 2]) <= 1
        if name == "div":
            return not self.reaches(args[1]) and kwargs.get("rounding_mode") is None
        if name in ("scatter_reduce", "segment_reduce"):
            return any(argument in ("sum", "mean") for argument in args if isinstance(argument, str))
        if name == "scatter":
            return bool(kwargs.get("reduce", "add") == "add")
        if name in _NORMS:
            return args[_NORMS[name]] is False and not self.reaches(args[1:5])
        if name == "_native_batch_norm_legit_no_training":
            return not self.reaches(args[1:5])
        return name in _LINEAR


def _summary(tensor: Tensor) -> Tensor:
    """A few numbers that tell tensors apart: sum and size first, then some of the entries."""
    flat = tensor.detach()
    flat = (flat.to_dense() if flat.layout is not torch.strided else flat).reshape(-1)
    some = flat[:: max(1, flat.numel() // SAMPLE)].double()
    total = flat.double() if flat.dtype == torch.bool else flat
    sums = total.sum(dtype=torch.float64), total.abs().sum(dtype=torch.float64)
    return torch.cat([torch.stack(sums), some]).cpu()


def _same_constants(one: _Following, other: _Following) -> str | None:
    """Name an operation that met other constants, or none, in another run; None where both are alike."""
    for first, second in zip_longest(one.constants, other.constants, fillvalue=("an operation", (), ())):
        alike = first[:2] == second[:2] and len(first[2]) == len(second[2])
        if not alike or not all(map(_alike, first[2], second[2])):
            return first[0]
    return None


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    size = one.nan_to_num(0.0, 0.0, 0.0).abs()
    sums, entries = size[1:2].expand(2), size[2:]  # no entries: a tensor without any
    room = AGAIN * torch.cat([sums, entries.amax().expand_as(entries) if len(entries) else entries])
    same = ((one - other).abs() <= room) | (one == other) | (one.isnan() & other.isnan())
    return bool(same.all())


class _Exits(TorchFunctionMode):
    """Blames numbers that are read out of PyTorch, if a mode has reached them."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.mode = watch

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _EXITS and self.mode.reaches(args):
            self.mode.blame(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def _following() -> Iterator[_Following]:
    """Watch every operation in the block, on tensors given to `start` and on what is computed from them.

    Example:
        >>> x = torch.ones(3)
        >>> with _following() as watched:
        ...     watched.start(x)
        ...     y = 2 * x + (x.round() - x).detach()
        >>> watched.culprit
        'round'
    """
    mode = _Following()
    with _Exits(mode), mode:
        yield mode
