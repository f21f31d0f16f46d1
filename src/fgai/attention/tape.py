"""`Tape`: what `record` writes on."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fgai.attention.heads import mean_heads
from fgai.attention.layer import LayerAttention
from fgai.attention.map import AttentionMap
from fgai.attention.perturb import Perturbation, PerturbLike
from fgai.attention.tap import EdgeType, NodeCount, Scores
from fgai.errors import AttentionError
from fgai.sparse import Adjacency, edge_keys
from fgai.typed import typed


class _Sorted(NamedTuple):
    """The edges of one layer as given and as recorded; kept from forward to forward."""

    given: tuple[Tensor, Tensor]
    source: Tensor
    destination: Tensor
    order: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, source: Tensor, destination: Tensor) -> _Sorted:
        order = torch.argsort(edge_keys(source, destination), stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        return cls((source, destination), source[order], destination[order], order, inverse)

    def fits(self, source: Tensor, destination: Tensor) -> bool:
        if self.source.device != source.device:
            return False
        return torch.equal(self.given[0], source) and torch.equal(self.given[1], destination)


@typed
class Tape:
    """The attention of the model's last forward.

    Each call of the recorded model starts afresh. A part of the model that is called on its own (say
    `model.encode(...)`) adds to the tape until `clear`. With a layout, nodes are numbered as it says, and a
    layer has an entry for every type of edges.
    """

    def __init__(
        self, perturb: PerturbLike | None = None, *, ranked: bool = True, layout: Any = None
    ) -> None:
        self._ranked, self._layout, self._num_nodes = ranked, layout, 0
        self._perturbation = None if perturb is None else Perturbation(perturb)
        self._used: list[LayerAttention] = []
        self._computed: list[LayerAttention] = []
        self._runs: Counter[tuple[str, EdgeType | None]] = Counter()
        self._edges: dict[int, _Sorted] = {}
        self._depth = 0
        self._complete = False
        self._thread = threading.get_ident()

    @property
    def perturbs(self) -> bool:
        """Whether layers go on with other attention than they computed."""
        return self._perturbation is not None

    @property
    def attention(self) -> AttentionMap:
        """The attention the layers went on with: perturbed, before dropout, not detached.

        The values lie on the way from input to output, so `torch.autograd.grad(output, values)` works.

        Raises:
            AttentionError: no forward has run to its end.
        """
        return self._map(self._used)

    @property
    def unperturbed(self) -> AttentionMap:
        """The attention as each layer computed it (from the perturbed output of the layers before it)."""
        return self._map(self._computed)

    def clear(self) -> None:
        """Forget what was recorded."""
        self._runs.clear()
        self._used.clear()
        self._computed.clear()
        self._complete = False

    def tap(
        self,
        name: str,
        attention: Tensor,
        source: Tensor,
        destination: Tensor,
        num_nodes: NodeCount,
        adjacency: Adjacency | None,
        scores: Scores | None = None,
        edge_type: EdgeType | None = None,
    ) -> Tensor:
        """Record the attention of one layer run and return the attention to go on with."""
        self._check_thread()
        self._check(name, attention, source)
        if self._layout is not None:
            name, edge_type = self._layout.place(name) if edge_type is None else (name, edge_type)
            source, destination = self._layout.ends(edge_type, source, destination)
            num_nodes = self._num_nodes
        elif isinstance(num_nodes, tuple):
            raise AttentionError(
                f"layer {name!r} ran on a bipartite graph ({num_nodes[0]} sources, {num_nodes[1]}"
                " destinations, numbered apart), which cannot be recorded; of a heterogeneous graph see"
                " `fgai.hetero`"
            )
        ranks = mean_heads(scores()) if self._ranked and scores is not None else None
        label = self._label(name, edge_type)
        if adjacency is not None:
            return self._write(LayerAttention.on(adjacency, attention, label, ranks))
        index = len(self._used)
        edges = self._edges.get(index)
        if edges is None or not edges.fits(source, destination):
            edges = self._edges[index] = _Sorted.of(source, destination)
        values = attention.index_select(0, edges.order)
        ranks = None if ranks is None else ranks.index_select(0, edges.order)
        ends = edges.source, edges.destination
        computed = LayerAttention(values, *ends, num_nodes, label, scores=ranks, edge_type=edge_type)
        return self._write(computed).index_select(0, edges.inverse)

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The recorded model was called."""
        self._check_thread()
        for value in (*args, *kwargs.values()):
            if isinstance(value, Mapping) and any(isinstance(key, tuple) and len(key) == 3 for key in value):
                raise AttentionError(
                    "the model was called with edges per type: heterogeneous models are recorded with their"
                    " data, see `fgai.hetero`"
                )
        if self._depth == 0:
            self.clear()
            self._num_nodes = 0 if self._layout is None else int(args[0].num_nodes)
        self._depth += 1

    def finish(self) -> None:
        """The recorded model returned without an error."""
        if self._depth == 1:
            if self._perturbation is not None:
                self._perturbation.check_depth(len(self._used))
            self._complete = True

    def end(self) -> None:
        """The recorded model returned or raised."""
        if threading.get_ident() != self._thread:
            return
        self._depth = max(0, self._depth - 1)
        if self._depth == 0 and not self._complete:
            self.clear()

    def _label(self, name: str, edge_type: EdgeType | None) -> str:
        """Name of a run: that of the layer, its number from the second on, and the type of its edges."""
        self._runs[name, edge_type] += 1
        count = self._runs[name, edge_type]
        label = name if count == 1 else f"{name}:{count}"
        return label if edge_type is None else f"{label}.{'__'.join(edge_type)}"

    def _write(self, computed: LayerAttention) -> Tensor:
        used = computed
        if self._perturbation is not None:
            used = computed.with_values(self._perturbation(len(self._used), computed))
        self._computed.append(computed)
        self._used.append(used)
        return used.values

    def _check(self, name: str, attention: Tensor, source: Tensor) -> None:
        if self._complete and self._depth == 0:
            raise AttentionError(
                f"layer {name!r} ran outside the recorded model's forward, after one had been recorded:"
                " call the model itself, or `tape.clear()` before calling a part of it (activation"
                " checkpointing, which runs layers again in the backward pass, cannot be recorded)"
            )
        if attention.dim() != 2 or attention.shape[0] != source.shape[0]:
            raise AttentionError(
                f"attention of layer {name!r} must have shape [{source.shape[0]}, heads], one row per edge,"
                f" got {tuple(attention.shape)}"
            )

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise AttentionError(
                "the model is being recorded in another thread; give every thread a copy of its own"
                " (`copy.deepcopy(model)`), or wait for the block to end"
            )

    def _map(self, layers: list[LayerAttention]) -> AttentionMap:
        if not layers and self._complete and not self._depth:
            raise AttentionError(
                "the model ran and none of its attention layers did; a `call` of `fgai.wrap` must use the"
                " model it is given"
            )
        if not layers or self._depth:
            raise AttentionError("nothing is recorded yet: call the model inside `record` and let it finish")
        return AttentionMap(tuple(layers))
