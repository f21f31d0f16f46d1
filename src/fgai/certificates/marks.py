"""How operations pass marks on: which of the numbers they return depend on a marked number.

A mark is one bool for every number of a tensor. Each rule takes the arguments of an operation by name and
gives the marks of what it returns, up to broadcasting, or None where all of it may depend on the marked ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# mypy: disable-error-code="no-untyped-call"

Marks = Callable[[Tensor], Tensor]
"""From a tensor to its marks, bool of its shape."""
Named = dict[str, Any]

_COPIES = ("clone", "_to_copy", "contiguous", "masked_fill", "lift_fresh", "nan_to_num", "dropout")
_SMALLER = "sum mean amax amin max min any all prod logsumexp var std var_mean std_mean argmax argmin"
_REDUCTIONS = frozenset(f"{_SMALLER} nansum norm linalg_vector_norm median".split())
_ALONG = ("_softmax", "_log_softmax", "sort", "topk", "argsort", "cumprod")
_PRODUCTS = dict.fromkeys(("mm", "bmm"), 0) | dict.fromkeys(("addmm", "baddbmm"), 1)
"""Name of a product of matrices → where its two factors begin among its arguments."""
_MOVES = ("cat", "stack", "flip", "roll", "repeat", "constant_pad_nd", "tril", "triu")
_NORMS = {"native_batch_norm": 5, "_native_batch_norm_legit": 5, "cudnn_batch_norm": 5}
"""Name of a batch norm → its argument that says whether it looks at the batch."""


def passed_on(func: Any, args: tuple[Any, ...], kwargs: Named, marks: Marks) -> Tensor | None:
    """Return the marks of what an operation returns; None where nothing is known of it.

    Args:
        func: of PyTorch.
        args: by position.
        kwargs: by name.
        marks: of its arguments.
    """
    name = func.overloadpacket.__name__.removesuffix("_")
    if func.namespace != "aten":
        return None
    tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    if name == "copy":
        return marks(args[1])
    if torch.Tag.pointwise in func.tags or name in _COPIES:
        return either(marks(one) for one in tensors)
    if name in _PRODUCTS:
        return _product(args, _PRODUCTS[name], marks)
    if name in _MOVES:
        return _moved(func, args, kwargs, marks)
    if name in _NORMS or name == "_native_batch_norm_legit_no_training":
        looks = name in _NORMS and args[_NORMS[name]] is not False
        others = any(bool(marks(one).any()) for one in tensors if one is not args[0])
        return None if looks or others else marks(args[0])
    named = by_name(func, args, kwargs)
    if name in _REDUCTIONS:
        return _reduced(named, marks)
    if name in _ALONG:
        return marks(named["self"]).any(named.get("dim", -1), keepdim=True)
    rule = _RULES.get(name)
    return None if rule is None else rule(named, marks)


def by_name(func: Any, args: tuple[Any, ...], kwargs: Named) -> Named:
    """Return the arguments of an operation by the names its schema has for them."""
    return dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs


def _product(args: tuple[Any, ...], first: int, marks: Marks) -> Tensor:
    left, right = (marks(one) for one in args[first : first + 2])
    out = left.any(-1, keepdim=True) | right.any(-2, keepdim=True)
    return out | marks(args[0]) if first else out


def _moved(func: Any, args: tuple[Any, ...], kwargs: Named, marks: Marks) -> Tensor:
    first, *rest = args
    if func.overloadpacket is torch.ops.aten.constant_pad_nd:
        rest = rest[:1]
    moved = [marks(one) for one in first] if isinstance(first, list | tuple) else marks(first)
    return torch.as_tensor(func(moved, *rest, **kwargs))


def _reduced(named: Named, marks: Marks) -> Tensor:
    here, dim = marks(named["self"]), named.get("dim")
    if named.get("other") is not None:  # the larger of two tensors
        return here | marks(named["other"])
    if dim is None or dim == []:
        return here.any()
    for one in sorted({one % here.dim() for one in ([dim] if isinstance(dim, int) else dim)}, reverse=True):
        here = here.any(one, keepdim=bool(named.get("keepdim", False)))
    return here


def either(marks: Iterable[Tensor]) -> Tensor:
    """Where one of some is marked, after broadcasting."""
    out: Tensor | None = None
    for one in marks:
        out = one if out is None else out | one
    assert out is not None
    return out


def fits(marks: Tensor, shape: torch.Size) -> bool:
    """Whether marks can be broadcast to a shape."""
    try:
        return bool(torch.broadcast_shapes(marks.shape, shape) == shape)
    except RuntimeError:
        return False


def _index_select(named: Named, marks: Marks) -> Tensor:
    dim, index = named["dim"], named["index"]
    here = marks(named["self"])
    return here.index_select(dim, index) | along(marks(index).view(-1), dim, here.dim())


def along(marks: Tensor, dim: int, dims: int) -> Tensor:
    """A vector laid along one of some dimensions."""
    return marks.view([-1 if one == dim % dims else 1 for one in range(dims)])


def _embedding(named: Named, marks: Marks) -> Tensor:
    here = marks(named["weight"])[named["indices"]]
    return here | marks(named["indices"])[..., None]


def _gather(named: Named, marks: Marks) -> Tensor:
    return marks(named["self"]).gather(named["dim"], named["index"]) | marks(named["index"])


def _index(named: Named, marks: Marks) -> Tensor | None:
    """Reading by one vector, of places or of truths, along one dimension; else by what is not marked."""
    source, indices = marks(named["self"]), named["indices"]
    chosen = source[tuple(slice(None) if one is None else one for one in indices)]
    told = [(dim, one) for dim, one in enumerate(indices) if one is not None]
    if not any(bool(marks(one).any()) for _, one in told):
        return chosen
    if len(told) != 1 or told[0][1].dim() != 1:
        return None
    dim, index = told[0]
    here = marks(index)
    if index.dtype == torch.bool:  # where a truth lands depends on the truths before it
        here = _until(here)[index]
    return chosen | along(here, dim, chosen.dim())


def _until(marks: Tensor) -> Tensor:
    """Whether there is a mark here or before, along a vector."""
    return marks.cumsum(0) > 0


def _nonzero(named: Named, marks: Marks) -> Tensor | None:
    given = named["self"]
    return _until(marks(given))[given != 0][:, None] if given.dim() == 1 else None


def _repeat_interleave(named: Named, marks: Marks) -> Tensor | None:
    counts = named.get("repeats")
    if counts is None or "self" in named or counts.dim() != 1:
        return None
    return torch.repeat_interleave(_until(marks(counts)), counts)


def _scatter(named: Named, marks: Marks) -> Tensor | None:
    index, dim = named["index"], named["dim"]
    if bool(marks(index).any()):
        return None
    base, value = marks(named["self"]), named.get("src")
    if not isinstance(value, Tensor):
        return base
    here = marks(value)[tuple(slice(size) for size in index.shape)].to(torch.uint8)
    return base | (base.new_zeros(base.shape, dtype=torch.uint8).scatter_reduce(dim, index, here, "amax") > 0)


def _index_add(named: Named, marks: Marks) -> Tensor | None:
    index = named["index"]
    if bool(marks(index).any()):
        return None
    base, value = marks(named["self"]), named.get("source")
    if not isinstance(value, Tensor):
        return base
    here = marks(value).expand(value.shape).to(torch.int32)
    return base | (base.new_zeros(base.shape, dtype=torch.int32).index_add(named["dim"], index, here) > 0)


def _index_put(named: Named, marks: Marks) -> Tensor | None:
    indices = [one for one in named["indices"] if one is not None]
    if any(bool(marks(one).any()) for one in indices):
        return None
    base = marks(named["self"])
    here, out = marks(named["values"]).to(torch.int32), base.new_zeros(base.shape, dtype=torch.int32)
    return base | torch.as_tensor(torch.ops.aten.index_put(out, named["indices"], here, True) > 0)


def _layer_norm(named: Named, marks: Marks) -> Tensor | None:
    if any(one is not None and bool(marks(one).any()) for one in (named["weight"], named["bias"])):
        return None
    here = marks(named["input"])
    for dim in range(1, len(named["normalized_shape"]) + 1):
        here = here.any(-dim, keepdim=True)
    return here


def _cumsum(named: Named, marks: Marks) -> Tensor:
    return marks(named["self"]).int().cumsum(named["dim"]) > 0


def _mv(named: Named, marks: Marks) -> Tensor:
    return marks(named["self"]).any(-1) | marks(named["vec"]).any()


def _segment_reduce(named: Named, marks: Marks) -> Tensor | None:
    offsets = named.get("offsets")
    if offsets is None or named.get("axis", 0) != 0:
        return None
    here = marks(named["data"])
    before = torch.cat([here.new_zeros((1, *here.shape[1:]), dtype=torch.long), here.long().cumsum(0)])
    some = before[offsets[1:]] != before[offsets[:-1]]
    ends = marks(offsets)
    return some | along(ends[1:] | ends[:-1], 0, some.dim())


def _linear(named: Named, marks: Marks) -> Tensor | None:
    others = (named.get(name) for name in ("weight", "bias"))
    if any(one is not None and bool(marks(one).any()) for one in others):
        return None
    return marks(named["input"]).any(-1, keepdim=True)


_RULES: dict[str, Callable[[Named, Marks], Tensor | None]] = {
    "index_select": _index_select,
    "embedding": _embedding,
    "gather": _gather,
    "index": _index,
    "nonzero": _nonzero,
    "repeat_interleave": _repeat_interleave,
    "scatter": _scatter,
    "scatter_add": _scatter,
    "scatter_reduce": _scatter,
    "index_add": _index_add,
    "index_copy": _index_add,
    "index_fill": _index_add,
    "index_put": _index_put,
    "segment_reduce": _segment_reduce,
    "native_layer_norm": _layer_norm,
    "cumsum": _cumsum,
    "linear": _linear,
    "mv": _mv,
}
