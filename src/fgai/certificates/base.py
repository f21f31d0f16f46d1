"""Base classes of the certificates' records: tensors in files as packed arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from fgai.attention import model_name
from fgai.errors import CheckpointError
from fgai.graph import Graph
from fgai.graph.fingerprint import fingerprint
from fgai.records import PackedArray, TabledDocument, pack_array, plain, provenance, unpack_array
from fgai.version import versions

BOOL = "|u1"  # type in a file of masks, as zeros and ones
PRECISE = (torch.float32, torch.float64)  # types of models that can be certified


def _pack_tensor(tensor: Tensor | None) -> dict[str, Any] | None:
    if tensor is None:
        return None
    return pack_array((tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor).numpy())


def _unpack_tensor(values: Mapping[str, Any] | None, name: str, dtype: str, dimensions: int) -> Tensor | None:
    """Inverse of `_pack_tensor`; raises `CheckpointError` for another type or shape."""
    if values is None:
        return None
    array = unpack_array(values)
    if array.dtype.str != dtype or array.ndim != dimensions:
        raise CheckpointError(f"{name} must be {dtype} in {dimensions} dimensions, got {array.dtype.str}")
    tensor = torch.from_numpy(array.copy())
    if dtype != BOOL:
        return tensor
    if bool((tensor > 1).any()):
        raise CheckpointError(f"{name} must be zeros and ones")
    return tensor.bool()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Certificate(TabledDocument):
    """A record with tensors (`ARRAYS`: type and dimensions), and with `layers` if there is a `LAYER`."""

    ARRAYS: ClassVar[dict[str, tuple[str, int]]]
    OLD_NAMES: ClassVar[dict[str, str]] = {}
    LAYER: ClassVar[Any] = None

    model: dict[str, Any]
    data: dict[str, Any]
    version: dict[str, str]
    promise: str
    provenance: dict[str, Any] = dataclasses.field(default_factory=dict, compare=False)

    def to_dict(self) -> dict[str, Any]:
        special: dict[str, Any] = {name: _pack_tensor(getattr(self, name)) for name in self.ARRAYS}
        if self.LAYER is not None:
            special["layers"] = [layer.to_dict() for layer in vars(self)["layers"]]
        names = [f.name for f in dataclasses.fields(self) if f.name not in special]
        fields = {name: plain(getattr(self, name)) for name in names}
        return {"kind": self.KIND, "schema": self.SCHEMA, **fields, **special}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        values = cls._rename(values)
        if isinstance(values, Mapping) and isinstance(layers := values.get("layers"), list):
            values = {**values, "layers": [cls._rename(layer) for layer in layers]}
        return super().from_dict(values)

    @classmethod
    def _rename(cls, values: Any) -> Any:
        """Replace the names of fields in older files."""
        if not isinstance(values, Mapping):
            return values
        return {cls.OLD_NAMES.get(key, key): value for key, value in values.items()}

    @classmethod
    def layout(cls) -> dict[str, Any]:
        fields = super().layout()
        for name in cls.ARRAYS:
            fields[name] = PackedArray if fields[name] is Tensor else PackedArray | None
        return fields if cls.LAYER is None else {**fields, "layers": cls.LAYER.LAYOUT}

    @classmethod
    def _build(cls, fields: dict[str, Any]) -> Self:
        if cls.LAYER is not None:
            fields["layers"] = tuple(cls.LAYER.from_dict(layer) for layer in fields["layers"])
        for name, shape in cls.ARRAYS.items():
            fields[name] = _unpack_tensor(fields.get(name), name, *shape)
        record = cls(**fields)
        record._check_shapes()
        return record

    def _check_shapes(self) -> None:
        sizes = {len(getattr(self, name)) for name in self.ARRAYS}
        if len(sizes) != 1:
            raise CheckpointError(f"the values of the record are of {sorted(sizes)} nodes")


def _record_fields(model: nn.Module, graph: Graph, original: Graph, command: str) -> dict[str, Any]:
    return {
        "model": {"class": model_name(model), "config": getattr(model, "config", None)},
        "data": {"name": graph.name, "nodes": graph.num_nodes, "edges": graph.num_edges},
        "version": versions(),
        "provenance": provenance(model, fingerprint(original), command=command),
    }


def _share_of(mask: Tensor, nodes: Tensor | None) -> float:
    """Return the share of nodes [N], or of those under the mask `nodes`, in a bool [N]; 0 of none."""
    mask = mask if nodes is None else mask[nodes.to(mask.device)]
    return float(mask.double().mean()) if mask.numel() else 0.0
