"""Do nodes affect each other along edges alone? Tracked number by number through a forward pass.

Numbers that depend on new nodes without outgoing edges are marked; every operation of PyTorch propagates
marks, an unknown one marks all its results. No old row may be marked at the end, and runs with more and with
fewer new nodes must call the same operations with the same numbers, so that the number of nodes does not
matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from fgai.attention import call_model
from fgai.certificates.linearity import (
    _FACTORIES,
    _NORMS,
    _by_name,
    _ExitMode,
    _Memory,
    _OperationMode,
    _tensors,
    _written,
)
from fgai.graph import Graph
from fgai.ops import use_backend
from fgai.sparse import Adjacency, Features

# mypy: disable-error-code="no-untyped-call"

Marks = Callable[[Tensor], Tensor]
Named = dict[str, Any]

_COPIES = ("clone", "_to_copy", "contiguous", "masked_fill", "lift_fresh", "nan_to_num", "dropout")
_HARD = "hardshrink hardsigmoid hardswish hardtanh relu relu6 threshold"
_SMOOTH = "celu elu gelu leaky_relu mish selu sigmoid silu softplus softshrink tanh"
_ACTIVATIONS = frozenset(f"{_HARD} {_SMOOTH}".split())
"""Functions of single numbers; PyTorch before 2.13 does not tag all of them as pointwise."""
_SMALLER = "sum mean amax amin max min any all prod logsumexp var std var_mean std_mean argmax argmin"
_REDUCTIONS = frozenset(f"{_SMALLER} nansum norm linalg_vector_norm median".split())
_ONE_DIM = ("_softmax", "_log_softmax", "sort", "topk", "argsort", "cumprod")
_PRODUCTS = dict.fromkeys(("mm", "bmm"), 0) | dict.fromkeys(("addmm", "baddbmm"), 1)
"""Name of a product of matrices → position of the first factor among its arguments."""
_MOVES = ("cat", "stack", "flip", "roll", "repeat", "constant_pad_nd", "tril", "triu")
_WRITES = frozenset(
    ["scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill", "index_put"]
)


def _output_marks(func: Any, args: tuple[Any, ...], kwargs: Named, marks: Marks) -> Tensor | None:
    """Return the marks of the result of an operation of PyTorch; None if the operation is unknown."""
    name = func.overloadpacket.__name__.removesuffix("_")
    if func.namespace != "aten":
        return None
    tensors = _tensors(args, kwargs)
    if name == "copy":
        return marks(args[1])
    if torch.Tag.pointwise in func.tags or name in _ACTIVATIONS or name in _COPIES:
        return reduce(torch.logical_or, [marks(one) for one in tensors])
    if name in _PRODUCTS:
        first = _PRODUCTS[name]
        left, right = (marks(one) for one in args[first : first + 2])
        out = left.any(-1, keepdim=True) | right.any(-2, keepdim=True)
        return out | marks(args[0]) if first else out
    if name in _MOVES:
        moved = [marks(one) for one in args[0]] if isinstance(args[0], list | tuple) else marks(args[0])
        return torch.as_tensor(func(moved, *args[1 : 2 if name == "constant_pad_nd" else None], **kwargs))
    if name in _NORMS or name == "_native_batch_norm_legit_no_training":
        of_the_batch = name in _NORMS and args[_NORMS[name]] is not False
        others = [one for one in tensors if one is not args[0]]
        return None if of_the_batch or _any_marked(others, marks) else marks(args[0])
    named = _by_name(func, args, kwargs)
    if name in ("linear", "native_layer_norm"):
        if _any_marked((named.get("weight"), named.get("bias")), marks):
            return None
        dims = len(named.get("normalized_shape", (0,)))
        return marks(named["input"]).any(tuple(range(-dims, 0)), keepdim=True)
    if name in _REDUCTIONS:
        return _reduction_marks(named, marks)
    if name in _ONE_DIM:
        return marks(named["self"]).any(named.get("dim", -1), keepdim=True)
    if name in _WRITES:
        return _write_marks(named, marks)
    rule = _RULES.get(name)
    return None if rule is None else rule(named, marks)


def _any_marked(tensors: Iterable[Tensor | None], marks: Marks) -> bool:
    return any(bool(marks(one).any()) for one in tensors if one is not None)


def _reduction_marks(named: Named, marks: Marks) -> Tensor:
    here, dim = marks(named["self"]), named.get("dim")
    if named.get("other") is not None:  # maximum of two tensors
        return here | marks(named["other"])
    if dim is None or dim == []:
        return here.any()
    return here.any(dim if isinstance(dim, int) else tuple(dim), keepdim=bool(named.get("keepdim", False)))


def _along_dim(marks: Tensor, dim: int, dims: int) -> Tensor:
    return marks.view([-1 if one == dim % dims else 1 for one in range(dims)])


def _after_mark(marks: Tensor) -> Tensor:
    """Whether there is a mark at a position of a vector or before it."""
    return marks.cumsum(0) > 0


def _index_marks(named: Named, marks: Marks) -> Tensor | None:
    """Indexing by one vector, of positions or bools, along one dimension; else by unmarked tensors alone."""
    source, indices = marks(named["self"]), named["indices"]
    chosen = source[tuple(slice(None) if one is None else one for one in indices)]
    vectors = [(dim, one) for dim, one in enumerate(indices) if one is not None]
    if not _any_marked(indices, marks):
        return chosen
    if len(vectors) != 1 or vectors[0][1].dim() != 1:
        return None
    dim, index = vectors[0]
    here = marks(index)
    if index.dtype == torch.bool:  # a position in the result depends on the bools before it
        here = _after_mark(here)[index]
    return chosen | _along_dim(here, dim, chosen.dim())


def _nonzero_marks(named: Named, marks: Marks) -> Tensor | None:
    vector = named["self"]
    return _after_mark(marks(vector))[vector != 0][:, None] if vector.dim() == 1 else None


def _repeat_marks(named: Named, marks: Marks) -> Tensor | None:
    counts = named.get("repeats")
    if counts is None or "self" in named or counts.dim() != 1:
        return None
    return torch.repeat_interleave(_after_mark(marks(counts)), counts)


def _write_marks(named: Named, marks: Marks) -> Tensor | None:
    """Marks of a tensor into which marks are written or added, at an index that is not marked."""
    indices = named["indices"] if "indices" in named else [named["index"]]
    values = [
        named[key] for key in ("src", "source", "values", "value") if isinstance(named.get(key), Tensor)
    ]
    if _any_marked(indices, marks):
        return None
    base = marks(named["self"])
    if not values:
        return base
    here, out = marks(values[0]).to(torch.int32), base.new_zeros(base.shape, dtype=torch.int32)
    if "indices" in named:
        out = torch.as_tensor(torch.ops.aten.index_put(out, indices, here, True))
    elif here.dim() == 0:
        return base | (here > 0)
    elif "src" in named:
        part = here[tuple(slice(size) for size in indices[0].shape)]
        out = out.scatter_add(named["dim"], indices[0], part)
    else:
        out = out.index_add(named["dim"], indices[0], here)
    return base | (out > 0)


def _segment_marks(named: Named, marks: Marks) -> Tensor | None:
    offsets = named.get("offsets")
    if offsets is None or named.get("axis", 0) != 0:
        return None
    here = marks(named["data"])
    before = torch.cat([here.new_zeros((1, *here.shape[1:]), dtype=torch.long), here.long().cumsum(0)])
    some, ends = before[offsets[1:]] != before[offsets[:-1]], marks(offsets)
    return some | _along_dim(ends[1:] | ends[:-1], 0, some.dim())


_RULES: dict[str, Callable[[Named, Marks], Tensor | None]] = {
    "index_select": lambda named, marks: (
        marks(named["self"]).index_select(named["dim"], named["index"])
        | _along_dim(marks(named["index"]).view(-1), named["dim"], named["self"].dim())
    ),
    "embedding": lambda named, marks: (
        marks(named["weight"])[named["indices"]] | marks(named["indices"])[..., None]
    ),
    "gather": lambda named, marks: (
        marks(named["self"]).gather(named["dim"], named["index"]) | marks(named["index"])
    ),
    "index": _index_marks,
    "nonzero": _nonzero_marks,
    "repeat_interleave": _repeat_marks,
    "segment_reduce": _segment_marks,
    "cumsum": lambda named, marks: marks(named["self"]).int().cumsum(named["dim"]) > 0,
    "mv": lambda named, marks: marks(named["self"]).any(-1) | marks(named["vec"]).any(),
}


_READERS = ("_local_scalar_dense", "equal", "is_nonzero", "item")
_BY_SHAPE = frozenset(
    name for kind in _FACTORIES for name in (kind, f"{kind}_like", f"new_{kind}", f"{kind}_strided")
)
_PURE_MOVES = frozenset(["cat", "stack", "clone", "index", "index_select"])
"""Operations that move numbers without changing any."""
_POSITIONS = {"select": "index", "slice": "start", "roll": "shifts"}
"""Name of an operation → its argument with the positions that are read; the same in every graph."""
DENSE_BELOW = 64  # numbers per entry of sparse features up to which dense ones are used instead


@dataclass
class _Marks:
    """Marks of a piece of memory: a bool per `step` bytes from address `start`."""

    shadow: Tensor
    step: int
    start: int
    source: bool  # as in `mark`


class _LocalityMode(_OperationMode):
    """Marks numbers that depend on the new nodes; `nodes`, `edges` are (all, old), the old ones first."""

    def __init__(self, nodes: tuple[int, int], edges: tuple[int, int]) -> None:
        super().__init__()
        self.sizes, self.old = {edges[0]: edges[1]}, nodes[1]
        self.sizes[nodes[0]] = min(nodes[1], self.sizes.get(nodes[0], nodes[1]))
        self.first_global: str | None = None  # operation all of whose results depend on new nodes
        self.scalars: list[tuple[Any, ...]] = []  # numbers that operations were called with, but sizes
        self._marks: _Memory[_Marks] = _Memory()

    def mark(self, tensor: Tensor, marks: Tensor, *, source: bool = False) -> None:
        """Mark a tensor where `marks`, bool and broadcast, are; `source`: numbers of old nodes."""
        if not tensor.numel() or tensor.layout is not torch.strided:
            return
        memory, storage = self._marks.find(tensor), tensor.untyped_storage()
        if memory is None:
            if not bool(marks.any()):
                return
            step = tensor.element_size()
            shadow = torch.zeros(storage.nbytes() // step, dtype=torch.bool, device=tensor.device)
            memory = _Marks(shadow, step, storage.data_ptr(), source)
            self._marks.keep(tensor, memory)
        memory.source = memory.source and source
        if memory.step != tensor.element_size() or (tensor.data_ptr() - memory.start) % memory.step:
            memory.shadow.fill_(True)
        else:
            self.marks(tensor).copy_(marks)

    def marks(self, tensor: Tensor) -> Tensor:
        if tensor.layout is not torch.strided:
            return torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)
        memory = self._marks.find(tensor)
        if memory is None:
            return torch.zeros((), dtype=torch.bool, device=tensor.device).expand(tensor.shape)
        offset = tensor.data_ptr() - memory.start
        if memory.step != tensor.element_size() or offset % memory.step:
            return memory.shadow.any().expand(tensor.shape)
        return memory.shadow.as_strided(tensor.shape, tensor.stride(), offset // memory.step)

    def tracks(self, *tree: Any) -> bool:
        return _any_marked(_tensors(tree), self.marks)

    def run(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plain, named, inputs = name.removesuffix("_"), _by_name(func, args, kwargs), _tensors(args, kwargs)
        marked, passed = self.tracks(inputs), None
        self._keep_scalars(func, plain, named)
        if marked and plain in _READERS:
            self.report(name)
        if marked and plain not in _BY_SHAPE:
            if plain in ("eq", "ne") and isinstance(args[1], Tensor):
                passed = self._equality_marks(args[0], args[1])
            else:
                passed = _output_marks(func, args, kwargs, self.marks)
        out = func(*args, **kwargs)
        if plain in _BY_SHAPE:
            for one in _tensors(out):
                for dim, size in enumerate(one.shape):
                    if size in self.sizes:  # these rows exist because of the new nodes
                        new = torch.arange(size, device=one.device) >= self.sizes[size]
                        self.mark(one, self.marks(one) | _along_dim(new, dim, one.dim()))
        elif marked:
            self._mark_results(name, out, _written(func, named), inputs, passed)
        return out

    def _keep_scalars(self, func: Any, name: str, named: dict[str, Any]) -> None:
        """Keep the numbers an operation computes with; sizes only where they are values."""
        kinds = {one.name: str(one.type) for one in func._schema.arguments}
        values: list[Any] = [
            value
            for key, value in named.items()
            if isinstance(value, int | float | complex)
            and ("Tensor" in kinds[key] or "number" in kinds[key] or "float" in kinds[key])
        ]
        if name == "lift_fresh" and named["self"].numel() <= 64:
            values.append(tuple(named["self"].flatten().tolist()))
        if name == "arange" and (named.get("start", 0), named.get("step", 1)) == (0, 1):
            values = []  # one number per node, or per edge, is its purpose
        elif name not in _BY_SHAPE and not _tensors(list(named.values())):  # as the ends of linspace, or eye
            values = [value for value in named.values() if isinstance(value, int | float | list | tuple)]
        elif name in _POSITIONS:
            values.append(named.get(_POSITIONS[name]))
        if values:
            self.scalars.append((name, *values))

    def _mark_results(
        self, name: str, out: Any, written: list[Any], inputs: list[Tensor], passed: Tensor | None
    ) -> None:
        memory = {one.untyped_storage().data_ptr() for one in inputs if one.layout is torch.strided}
        results = _tensors(out, written)
        writes = any(one is other for one in results for other in written)
        source = name in _PURE_MOVES and all(self._is_old_source(one) for one in inputs if self.tracks(one))
        for one in results:
            shared = one.layout is torch.strided and one.untyped_storage().data_ptr() in memory
            if not one.numel() or (shared and not writes):
                continue  # a view shares the marks of its memory
            marks = one.new_ones((), dtype=torch.bool)
            if passed is not None:
                with suppress(RuntimeError):  # of another shape
                    marks = passed.expand(one.shape)
            if one.numel() > 1 and bool(marks.all()) and not any(bool(self.marks(i).all()) for i in inputs):
                self.first_global = self.first_global or name
            self.mark(one, marks, source=source)

    def _equality_marks(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the marks of a comparison: every old node differs from a new one, whichever it is."""
        marks = [self.marks(left), self.marks(right)]
        for side, (one, other) in enumerate(((left, right), (right, left))):
            if self._is_old_source(one) and not other.is_floating_point():
                marks[side] = marks[side] & ((other < self.old) | marks[1 - side])
        return marks[0] | marks[1]

    def _is_old_source(self, tensor: Tensor) -> bool:
        """Whether the marked numbers of a tensor are numbers of old nodes, moved and not changed."""
        memory = self._marks.find(tensor)
        return memory is not None and memory.source


def _find_dependence(
    model: nn.Module, graph: Graph, added: int, *, dense: bool = False
) -> tuple[str | None, list[tuple[Any, ...]]]:
    """Return the operation by which old rows depend on the last `added` nodes, or None, and the scalars."""
    # The new nodes have no outgoing edges. `dense`: models compute with sparse features elsewhere.
    assert graph.features is not None and graph.features.appended is not None
    features = dataclasses.replace(graph.features, appended=graph.features.appended.clone())
    # Plain PyTorch spreads every entry of sparse rows over the channels of a layer.
    if dense or features.num_rows * features.num_columns <= DENSE_BELOW * features.stored.numel():
        features = Features.dense(features.to_dense())
    old, nodes = graph.num_nodes - added, torch.arange(graph.num_nodes + 1, device=graph.device)
    # Without cached results of the graph, which would have no marks.
    edges = graph.edge_index.clone()
    adjacency = Adjacency.from_sorted(edges[0].clone(), edges[1].clone(), graph.num_nodes)
    adjacency.check_incoming()
    adjacency.check_outgoing()
    loops = graph.has_loops
    graph = graph.replace(adjacency=adjacency, features=features)
    graph.__dict__["has_loops"] = loops
    new = adjacency.destination >= old
    mode = _LocalityMode((graph.num_nodes, old), (graph.num_edges, graph.num_edges - int(new.sum())))
    if isinstance(features.appended, Tensor):
        mode.mark(features.appended, features.appended.new_ones((), dtype=torch.bool))
    elif isinstance(features.base, Tensor):
        mode.mark(features.base, (nodes[:-1] >= old)[:, None])
    mode.mark(adjacency.source, new & (adjacency.source < old), source=True)  # a new node's loop is known
    mode.mark(adjacency.rowptr, nodes > old)
    for tensor in (adjacency.colptr, adjacency.csc):
        mode.mark(tensor, tensor.new_ones((), dtype=torch.bool))
    for values in (graph.edge_attr, graph.edge_weight):
        if values is not None:
            mode.mark(values, new.view(-1, *[1] * (values.dim() - 1)))
    with torch.no_grad(), use_backend("reference"), _ExitMode(mode), mode:
        logits = call_model(model, graph)
    violation = mode.violation
    if violation is None and bool(mode.marks(logits)[:old].any()):
        violation = mode.first_global or "an operation"
    return violation, mode.scalars
