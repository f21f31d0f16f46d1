"""Do nodes hear of each other along edges alone? Followed number by number through a forward pass.

New nodes that send nothing are added to a graph, and every number that depends on them is marked: their
features, the sources of the edges into them, values on those edges, and the rows that are there because they
are. Every operation PyTorch runs passes by, whoever calls it, and passes marks on: a product to rows and
columns, a sum to what it adds up to, a gather to what it reads, a scatter to where it writes. What is not
known here marks all that it returns. If no row of an old node is marked at the end, nothing a new node that
sends nothing does can change it. How many nodes there are must not count either: runs with more and with
fewer new nodes must call the same operations with the same numbers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fgai.attention import call_model
from fgai.certificates.following import Exits, Memory
from fgai.certificates.marks import along, by_name, fits, passed_on
from fgai.graph import Graph
from fgai.ops import use_backend
from fgai.sparse import Adjacency, Features

# mypy: disable-error-code="no-untyped-call"

_READS = ("_local_scalar_dense", "equal", "is_nonzero", "item")
_FACTORIES = ("empty", "zeros", "ones", "full")
_BY_SHAPE = frozenset(
    name for kind in _FACTORIES for name in (kind, f"{kind}_like", f"new_{kind}", f"{kind}_strided")
)
_KEEPS = frozenset(["cat", "stack", "clone", "index", "index_select"])
"""Operations that move numbers and change none."""
WIDE = 64
"""Numbers per entry of sparse features up to which dense ones are read in their place."""
_SEEDED = torch.Tag.nondeterministic_seeded


@dataclass
class _Marks:
    """Of a piece of memory.

    Attributes:
        shadow: bool, a mark for every number in it.
        step: bytes of a number.
        start: address of the first.
        source: what is marked are numbers of old nodes.
    """

    shadow: Tensor
    step: int
    start: int
    source: bool


class Locality(TorchDispatchMode):
    """Which numbers depend on the new nodes.

    Args:
        nodes: how many there are, and how many of them are old, which come first.
        edges: the same of edges: the last ones lead to new nodes.

    Attributes:
        culprit: the first operation all of whose results depend on them, or None.
        fatal: the first operation after which nothing can be proved, or None.
        scalars: numbers that operations were called with, in order; sizes are left out.
    """

    def __init__(self, nodes: tuple[int, int], edges: tuple[int, int]) -> None:
        super().__init__()
        self.sizes, self.old = {edges[0]: edges[1]}, nodes[1]
        self.sizes[nodes[0]] = min(nodes[1], self.sizes.get(nodes[0], nodes[1]))
        self.culprit: str | None = None
        self.fatal: str | None = None
        self.scalars: list[tuple[Any, ...]] = []
        self._marks: Memory[_Marks] = Memory()

    def mark(self, tensor: Tensor, rows: Tensor, *, source: bool = False) -> None:
        """Mark what `rows`, bool and broadcast to the tensor, says; numbers of old nodes are a `source`."""
        self._put(tensor, rows.expand(tensor.shape), source)

    def marks(self, tensor: Tensor) -> Tensor:
        """Return the marks of a tensor, bool of its shape."""
        if tensor.layout is not torch.strided:
            return torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device)
        known = self._marks.find(tensor)
        if known is None:
            return torch.zeros((), dtype=torch.bool, device=tensor.device).expand(tensor.shape)
        offset = tensor.data_ptr() - known.start
        if known.step != tensor.element_size() or offset % known.step:
            return known.shadow.any().expand(tensor.shape)
        return known.shadow.as_strided(tensor.shape, tensor.stride(), offset // known.step)

    def reaches(self, *given: Any) -> bool:
        """Whether something among `given` depends on the new nodes."""
        leaves = (leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
        return any(bool(self.marks(leaf).any()) for leaf in leaves)

    def blame(self, name: str) -> None:
        """End the proof, because of an operation of this name; the first one is kept."""
        self.fatal = self.fatal or name

    def _put(self, tensor: Tensor, marks: Tensor, source: bool = False) -> None:
        if not tensor.numel() or tensor.layout is not torch.strided:
            return
        known, storage = self._marks.find(tensor), tensor.untyped_storage()
        if known is None:
            if not bool(marks.any()):
                return
            step = tensor.element_size()
            shadow = torch.zeros(storage.nbytes() // step, dtype=torch.bool, device=tensor.device)
            known = _Marks(shadow, step, storage.data_ptr(), source)
            self._marks.keep(tensor, known)
        known.source = known.source and source
        if known.step != tensor.element_size() or (tensor.data_ptr() - known.start) % known.step:
            known.shadow.fill_(True)
        else:
            self.marks(tensor).copy_(marks)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and pass marks on."""
        given = kwargs or {}
        name = func.overloadpacket.__name__
        plain = name.removesuffix("_")
        inputs = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        marked = self.reaches(inputs)
        named = by_name(func, args, given)
        self._note(func, plain, named)
        if _SEEDED in func.tags or (marked and plain in _READS):
            self.blame(name)
        passed = None
        if marked and plain not in _BY_SHAPE:
            passed = self._compared(args[0], args[1]) if _compares(plain, args) else None
            passed = passed_on(func, args, given, self.marks) if passed is None else passed
        out = func(*args, **given)
        written = [
            named[one.name]
            for one in func._schema.arguments
            if one.alias_info is not None and one.alias_info.is_write and one.name in named
        ]
        if plain in _BY_SHAPE:
            self._created(out)
        elif marked:
            self._pass_on(name, out, written, inputs, passed)
        return out

    def _note(self, func: Any, name: str, named: dict[str, Any]) -> None:
        """Keep the numbers an operation computes with; sizes and places are of another type."""
        kinds = {one.name: str(one.type) for one in func._schema.arguments}
        values: list[Any] = [
            value
            for key, value in named.items()
            if isinstance(value, int | float | complex)
            and ("Tensor" in kinds[key] or "number" in kinds[key] or "float" in kinds[key])
        ]
        if name == "lift_fresh" and named["self"].numel() <= 64:
            values.append(tuple(named["self"].flatten().tolist()))
        if name == "arange":  # one number per node, or per edge, is what it is for
            values = []
        if values:
            self.scalars.append((name, *values))

    def _created(self, out: Any) -> None:
        """Mark rows that exist because of the new nodes."""
        for one in tree_leaves(out):
            for dim, size in enumerate(one.shape) if isinstance(one, Tensor) else ():
                if size in self.sizes:
                    new = torch.arange(size, device=one.device) >= self.sizes[size]
                    self._put(one, self.marks(one) | along(new, dim, one.dim()))

    def _pass_on(
        self, name: str, out: Any, written: list[Any], inputs: list[Tensor], passed: Tensor | None
    ) -> None:
        memory = {one.untyped_storage().data_ptr() for one in inputs if one.layout is torch.strided}
        results = [one for one in tree_leaves((out, written)) if isinstance(one, Tensor)]
        writes = any(one is other for one in results for other in written)
        source = name in _KEEPS and all(self._is_source(one) for one in inputs if self.reaches(one))
        for one in results:
            shared = one.layout is torch.strided and one.untyped_storage().data_ptr() in memory
            if not one.numel() or (shared and not writes):
                continue  # a view has the marks of what it shows
            known = passed is not None and fits(passed, one.shape)
            marks = passed if known and passed is not None else one.new_ones((), dtype=torch.bool)
            if one.numel() > 1 and bool(marks.all()) and not any(bool(self.marks(i).all()) for i in inputs):
                self.culprit = self.culprit or name
            self._put(one, marks.expand(one.shape), source)

    def _compared(self, left: Tensor, right: Tensor) -> Tensor:
        """Marks of whether two numbers are equal: an old node, whichever it is, is no new one."""
        marks = [self.marks(left), self.marks(right)]
        for one, (given, other) in enumerate(((left, right), (right, left))):
            if self._is_source(given) and not other.is_floating_point():
                marks[one] = marks[one] & ((other < self.old) | marks[1 - one])
        return marks[0] | marks[1]

    def _is_source(self, tensor: Tensor) -> bool:
        """Whether what is marked of a tensor are numbers of old nodes, moved and nothing else."""
        known = self._marks.find(tensor) if tensor.layout is torch.strided else None
        return known is not None and known.source


def _compares(name: str, args: tuple[Any, ...]) -> bool:
    return name in ("eq", "ne") and isinstance(args[1], Tensor)


def dependence(
    model: nn.Module, graph: Graph, added: int, *, dense: bool = False
) -> tuple[str | None, list[tuple[Any, ...]]]:
    """Run a model on a graph whose last nodes are new and send nothing, and follow what depends on them.

    Args:
        model: in evaluation mode.
        graph: prepared for it, new nodes appended (`Graph.inject`).
        added: how many nodes are new.
        dense: make features dense first, for models that read sparse ones by other means than PyTorch.

    Returns:
        The operation that lets rows of old nodes depend on new ones, or None, and the numbers operations
        were called with.
    """
    assert graph.features is not None and graph.features.appended is not None
    features = dataclasses.replace(graph.features, appended=graph.features.appended.clone())
    # Plain PyTorch spreads every entry of sparse rows over the channels of a layer.
    if dense or features.num_rows * features.num_columns <= WIDE * features.stored.numel():
        features = Features.dense(features.to_dense())
    old, nodes = graph.num_nodes - added, torch.arange(graph.num_nodes + 1, device=graph.device)
    # Nothing that was derived of the graph before: it would come without marks.
    edges = graph.edge_index.clone()
    adjacency = Adjacency.from_sorted(edges[0].clone(), edges[1].clone(), graph.num_nodes)
    adjacency.check_incoming()
    adjacency.check_outgoing()
    loops = graph.has_loops
    graph = graph.replace(adjacency=adjacency, features=features)
    graph.__dict__["has_loops"] = loops
    new = adjacency.destination >= old
    mode = Locality((graph.num_nodes, old), (graph.num_edges, graph.num_edges - int(new.sum())))
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
    with torch.no_grad(), use_backend("reference"), Exits(mode), mode:
        logits = call_model(model, graph)
    culprit = mode.fatal
    if culprit is None and bool(mode.marks(logits)[:old].any()):
        culprit = mode.culprit or "an operation"
    return culprit, mode.scalars
