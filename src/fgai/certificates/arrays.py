"""Tensors in the files of certificates, as packed arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fgai.errors import CheckpointError
from fgai.records import PackedArray, TabledDocument, pack_array, plain, unpack_array

BOOL = "|u1"
"""Type in a file of masks, as zeros and ones."""


def packed(tensor: Tensor | None) -> dict[str, Any] | None:
    """Return a tensor as a packed array."""
    if tensor is None:
        return None
    return pack_array((tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor).numpy())


def unpacked(values: Mapping[str, Any] | None, name: str, dtype: str, dimensions: int) -> Tensor | None:
    """Inverse of `packed`; raises `CheckpointError` for another type or shape."""
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
class _ArrayDocument(TabledDocument):
    """A record with tensors, and with `layers` where there is a `LAYER`.

    `ARRAYS` names type and dimensions of each tensor in a file.
    """

    ARRAYS: ClassVar[dict[str, tuple[str, int]]]
    LAYER: ClassVar[Any] = None
    LAYER_LAYOUT: ClassVar[Any] = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; arrays are packed."""
        special: dict[str, Any] = {}
        if self.LAYER is not None:
            special["layers"] = [layer.to_dict() for layer in vars(self)["layers"]]
        special |= {name: packed(getattr(self, name)) for name in self.ARRAYS}
        names = [f.name for f in dataclasses.fields(self) if f.name not in special]
        fields = {name: plain(getattr(self, name)) for name in names}
        return {"kind": self.KIND, "schema": self.SCHEMA, **fields, **special}

    @classmethod
    def layout(cls) -> dict[str, Any]:
        """Return the fields of a file."""
        fields = super().layout()
        arrays: dict[str, Any] = {
            name: PackedArray if fields[name] is Tensor else PackedArray | None for name in cls.ARRAYS
        }
        layers = {} if cls.LAYER is None else {"layers": cls.LAYER_LAYOUT}
        return {**fields, **arrays, **layers}

    @classmethod
    def _build(cls, fields: dict[str, Any]) -> Self:
        if cls.LAYER is not None:
            fields["layers"] = tuple(cls.LAYER.from_dict(layer) for layer in fields["layers"])
        for name, shape in cls.ARRAYS.items():
            fields[name] = unpacked(fields.get(name), name, *shape)
        record = cls(**fields)
        record._check_lengths()
        return record

    def _check_lengths(self) -> None:
        """Raise unless everything is about the same nodes."""
