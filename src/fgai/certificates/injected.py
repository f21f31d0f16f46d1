"""`Injection`, the threat of new neighbours, and `InjectionCertificate`, what no such neighbour can do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypedDict

import torch
from torch import Tensor

from fgai.certificates.layer import tensor_from
from fgai.checks import one_of, whole
from fgai.errors import CheckpointError
from fgai.files import check
from fgai.records import Cell, Column, PackedArray, Table, TabledDocument, data_frame, pack_array, plain
from fgai.typed import typed

if TYPE_CHECKING:
    import pandas

WHERE = ("any", "direct")
INJECTION_PROMISE = (
    "Certified: new nodes with any features and any wiring, where a node gains at most t of them as"
    " neighbours. Old edges and features stay, and so do positional encodings, where a model reads them, as"
    " computed on the original graph. New neighbours may rank above old ones: order means the order of those"
    " that were there."
)


@typed
@dataclass(frozen=True)
class Injection:
    """New nodes with any features and any wiring.

    Attributes:
        neighbours: t, injected neighbours that a node gains at most.
        where: `any`: every node of the graph may gain t of them; `direct`: the certified node alone does.

    Raises:
        InputError: a number below 0, or another word.

    Example:
        >>> Injection(neighbours=2, where="direct")
        Injection(neighbours=2, where='direct')
    """

    neighbours: int = 1
    where: str = "any"

    def __post_init__(self) -> None:
        whole(self.neighbours, "neighbours", 0)
        one_of(self.where, "where", WHERE)


class OrderLayout(TypedDict):
    """A layer as a file holds it."""

    name: str
    status: Literal["invariant", "bound", "unknown"]
    reason: str
    holds: PackedArray | None


@typed
@dataclass(frozen=True, eq=False)
class LayerOrder:
    """What is proved about the ranking of old neighbours in one layer.

    Attributes:
        name: of the layer.
        status: `invariant`: no injection of any size reorders them (positional encodings, where a model reads
            them, kept as computed on the original graph); `bound`: `holds` says where; `unknown`.
        reason: in a sentence.
        holds: bool [N], the top-k among old neighbours stays; None where unknown.
    """

    name: str
    status: str
    reason: str
    holds: Tensor | None


@typed
@dataclass(frozen=True, kw_only=True, eq=False)
class InjectionCertificate(TabledDocument):
    """Which nodes keep their class, and which their explanation, whatever is injected.

    Attributes:
        neighbours: t, injected neighbours of a node at most.
        where: `any`, every node may gain them, or `direct`, the certified node alone.
        k: size of an explanation.
        holds: bool [N], the class provably stays.
        classes: int64 [N], the class that does; -1 where nothing is known.
        degree: int64 [N], neighbours, self-loops included.
        reason: why nothing is certified, or how it was; for readers.
        known: whether a bound of the class could be computed at all.
        layers: what is proved about the order of old neighbours, layer by layer.
        model: class and settings.
        data: name and sizes.
        version: of fgai and torch.
        seconds: it took.
        promise: what is certified, in a sentence.
        provenance: hashes of weights, data and code, date, command and seed, see `fgai.records.provenance`;
            empty in records of before.
    """

    KIND: ClassVar[str] = "injection-certificate"

    neighbours: int
    where: str
    k: int
    holds: Tensor
    classes: Tensor
    degree: Tensor
    reason: str
    known: bool
    layers: tuple[LayerOrder, ...]
    model: dict[str, Any]
    data: dict[str, Any]
    version: dict[str, str]
    seconds: float
    promise: str = INJECTION_PROMISE
    provenance: dict[str, Any] = field(default_factory=dict, compare=False)

    def share(self, nodes: Tensor | None = None) -> float:
        """Of all nodes, or of those under a mask, the ones whose class is certified."""
        return share_of(self.holds, nodes)

    def order_share(self, layer: int, nodes: Tensor | None = None) -> float | None:
        """Of the nodes with more than k neighbours, those whose top-k is certified; None where unknown."""
        held = self.layers[layer].holds
        if held is None:
            return None
        counted = self.degree > self.k
        if nodes is not None:
            counted &= nodes.to(counted.device)
        return share_of(held, counted)

    def tables(self) -> list[Table]:
        """Return one row for the class and one for every layer."""
        rows: list[list[Cell]] = [["class", "bound" if self.known else "unknown", self.share(), self.reason]]
        for place, layer in enumerate(self.layers):
            share = self.order_share(place)
            rows.append([f"top {self.k} of {layer.name}", layer.status, share, layer.reason])
        threat = f"t = {self.neighbours} injected neighbours, {self.where}"
        columns = [Column("what stays"), Column("status"), Column("share", ".3f"), Column("why")]
        title = f"{self.model['class']} on {self.data['name']}: {threat}"
        return [Table(title, columns, rows, (self.promise,))]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a `DataFrame` with a row per node, and for every layer whose order is known a column.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        orders = {f"top {self.k} of {one.name}": one.holds for one in self.layers if one.holds is not None}
        values = {"degree": self.degree, "class": self.classes, "class holds": self.holds, **orders}
        return data_frame({name: tensor.numpy() for name, tensor in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; arrays are packed."""
        special: dict[str, Any] = {
            "holds": _packed(self.holds),
            "classes": pack_array(self.classes.numpy()),
            "degree": pack_array(self.degree.numpy()),
            "layers": [
                {"name": one.name, "status": one.status, "reason": one.reason, "holds": _packed(one.holds)}
                for one in self.layers
            ],
        }
        names = [f.name for f in dataclasses.fields(self) if f.name not in special]
        fields = {name: plain(getattr(self, name)) for name in names}
        return {"kind": self.KIND, "schema": self.SCHEMA, **fields, **special}

    @classmethod
    def layout(cls) -> dict[str, Any]:
        """Return what a file of this kind holds."""
        arrays = dict.fromkeys(("holds", "classes", "degree"), PackedArray)
        return {**super().layout(), **arrays, "where": Literal[WHERE], "layers": list[OrderLayout]}

    @classmethod
    def _build(cls, fields: dict[str, Any]) -> Self:
        fields["holds"] = _unpacked(fields["holds"], "holds")
        for name in ("classes", "degree"):
            fields[name] = tensor_from(fields[name], name, "<i8", 1)
        fields["layers"] = tuple(_order_from(layer) for layer in fields["layers"])
        found = cls(**fields)
        sizes = {len(found.holds), len(found.classes), len(found.degree)}
        sizes |= {len(layer.holds) for layer in found.layers if layer.holds is not None}
        if len(sizes) != 1:
            raise CheckpointError(f"the values of the record are of {sorted(sizes)} nodes")
        if found.neighbours < 0 or found.k < 1:
            raise CheckpointError("neighbours or k of the record is out of range")
        return found


def _order_from(values: Mapping[str, Any]) -> LayerOrder:
    check(values, OrderLayout, "a layer")
    packed = values["holds"]
    held = None if packed is None else _unpacked(packed, "holds of a layer")
    return LayerOrder(values["name"], values["status"], values["reason"], held)


def _packed(holds: Tensor | None) -> dict[str, Any] | None:
    return None if holds is None else pack_array(holds.to(torch.uint8).numpy())


def _unpacked(packed: Mapping[str, Any], name: str) -> Tensor:
    found = tensor_from(packed, name, "|u1", 1)
    if found is None or bool((found > 1).any()):
        raise CheckpointError(f"{name} must be zeros and ones")
    return found.bool()


def share_of(holds: Tensor, nodes: Tensor | None) -> float:
    """Of all nodes, or of those under a mask, the ones where a bool [N] holds; 0 of none."""
    chosen = holds if nodes is None else holds[nodes.to(holds.device)]
    return float(chosen.double().mean()) if chosen.numel() else 0.0
