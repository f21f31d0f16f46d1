"""Perturbations of the attention: a function, vectors, or values on edges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fgai.attention.layer import LayerAttention
from fgai.attention.map import AttentionMap
from fgai.errors import AttentionError, InputError
from fgai.sparse import edge_name, match_edges
from fgai.typed import typed

Perturb = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer number, attention [E, H], source [E], destination [E]) → attention [E, H]."""

Delta = Tensor | LayerAttention
PerturbLike = Perturb | Mapping[int, Delta] | Sequence[Delta | None] | AttentionMap


@typed
class Perturbation:
    """Changes each layer's attention, edges sorted by (destination, source).

    A function returns the new attention. A `Tensor` delta [E] or [E, H] is added row by row to the recorded
    edges. A `LayerAttention` delta is matched by (source, destination): edges it does not name are left
    alone, edges the layer does not have raise. One head is added to every head. Nothing is normalised again.

    Args:
        perturb: a function, `{layer number: delta}`, one delta (or None) per layer, or an `AttentionMap`.
    """

    def __init__(self, perturb: PerturbLike) -> None:
        self._function: Perturb | None = None
        self._deltas: dict[int, Delta] = {}
        self._depth: int | None = None
        if isinstance(perturb, Mapping):
            self._deltas = dict(perturb)
        elif isinstance(perturb, AttentionMap):
            self._deltas, self._depth = dict(enumerate(perturb)), len(perturb)
        elif isinstance(perturb, list | tuple):
            self._deltas = {index: delta for index, delta in enumerate(perturb) if delta is not None}
            self._depth = len(perturb)
        elif callable(perturb):
            self._function = perturb
        else:
            raise InputError(
                "`perturb` must be a function, a dict {layer number: delta}, a list with one delta per layer"
                f" or an AttentionMap, got {type(perturb).__name__}"
            )
        for index, delta in self._deltas.items():
            if not isinstance(index, int) or isinstance(index, bool) or index < 0:
                raise InputError(f"`perturb` must name layers by their number from 0 on, got {index!r}")
            if not isinstance(delta, Tensor | LayerAttention):
                kind = type(delta).__name__
                raise InputError(f"`perturb[{index}]` must be a Tensor or a LayerAttention, got {kind}")

    def __call__(self, index: int, layer: LayerAttention) -> Tensor:
        """Return the perturbed attention [E, H] of layer number `index`."""
        if self._function is not None:
            result = self._function(index, layer.values, layer.source, layer.destination)
            if not isinstance(result, Tensor) or result.shape != layer.values.shape:
                got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
                raise AttentionError(
                    f"`perturb` must return the attention of layer {layer.name!r} with shape"
                    f" {tuple(layer.values.shape)}, got {got}"
                )
            return result.to(layer.values.dtype)
        delta = self._deltas.get(index)
        if delta is None:
            return layer.values
        if isinstance(delta, LayerAttention):
            return _add_by_key(layer, delta)
        return layer.values + _fit(delta, layer, layer.num_edges)

    def check_depth(self, count: int) -> None:
        """Raise `AttentionError` if deltas were given for layers that did not run."""
        if self._depth is not None and self._depth != count:
            raise AttentionError(f"`perturb` has {self._depth} deltas, but {count} attention layers ran")
        beyond = sorted(index for index in self._deltas if index >= count)
        if beyond:
            raise AttentionError(f"`perturb` names layer {beyond[0]}, but only {count} attention layers ran")


def _fit(delta: Tensor, layer: LayerAttention, rows: int) -> Tensor:
    """Bring a delta to shape [rows, H or 1] and the type of the attention."""
    shaped = delta[:, None] if delta.dim() == 1 else delta
    if shaped.dim() != 2 or shaped.shape[0] != rows or shaped.shape[1] not in (1, layer.num_heads):
        raise AttentionError(
            f"the perturbation of layer {layer.name!r} must have shape [{rows}] or"
            f" [{rows}, {layer.num_heads}] (edges, heads), got {tuple(delta.shape)};"
            " give a LayerAttention to match edges by key"
        )
    return shaped.to(layer.values.dtype)


def _add_by_key(layer: LayerAttention, delta: LayerAttention) -> Tensor:
    values = _fit(delta.values, layer, delta.num_edges)
    if layer.same_edges(delta):
        return layer.values + values
    theirs, mine = match_edges(delta.keys, layer.keys)
    if theirs.numel() < delta.num_edges:
        missing = delta.keys.new_ones(delta.num_edges).bool()
        missing[theirs] = False
        first = edge_name(int(delta.keys[missing][0]))
        raise AttentionError(
            f"the perturbation names {int(missing.sum())} edges that layer {layer.name!r} does not have,"
            f" the first is {first}; `restrict` it to the layer's edges"
        )
    return layer.values.index_add(0, mine, values[theirs].expand(-1, layer.num_heads))
