"""`LayerCertificate` and its `Prediction`: certified properties of one layer, node by node."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NotRequired, Self, TypedDict

import torch
from torch import Tensor

from fgai.certificates.base import pack_tensor, unpack_tensor
from fgai.checks import at_least, fraction, one_of
from fgai.errors import CheckpointError
from fgai.files import check, check_items
from fgai.records import PackedArray
from fgai.topk import check_k
from fgai.typed import typed

EXACT, BOUND, UNKNOWN = "exact", "bound", "unknown"
SMALLEST = 5e-324
"""Radius of a node that is certified at radius 0 and no further."""


@typed
@dataclass(frozen=True, eq=False)
class Prediction:
    """How far perturbing one layer's attention can move the prediction of each node.

    The first three are each `exact` (attained inside the ball), a sound `bound`, or `unknown` and then None.

    Attributes:
        class_radius: float64 [N], no perturbation of this size or below changes the predicted class; infinite
            where the attention does not matter, 0 where two classes tie.
        alpha2_logits: float64 [N], largest change of the logits in total variation at the radius asked for.
        alpha2_probabilities: float64 [N], the same for probabilities.
        class_status: of `class_radius`.
        logits_status: of `alpha2_logits`.
        probabilities_status: of `alpha2_probabilities`.
        reason: why one is unknown, or the method of a bound.
        rows_are: `nodes`, `links` or `graphs`.
    """

    class_radius: Tensor | None = None
    alpha2_logits: Tensor | None = None
    alpha2_probabilities: Tensor | None = None
    class_status: str = UNKNOWN
    logits_status: str = UNKNOWN
    probabilities_status: str = UNKNOWN
    reason: str = ""
    rows_are: str = "nodes"


def _top_and_margins(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the predicted class [N] and its margin over each class [N, C], infinite over itself; float64."""
    y = logits.detach().cpu().double()
    top = y.argmax(1, keepdim=True)
    return top[:, 0], (y.gather(1, top) - y).scatter(1, top, torch.inf)


def _crossing_radius(margins: Tensor, rate: Tensor) -> Tensor:
    """Return the smallest radius at which some class reaches the top one, `min_c margin_c / rate_c` [N]."""
    ratio = margins / torch.where(rate > 0, rate, 1.0)
    return torch.where(rate > 0, ratio, torch.where(margins > 0, torch.inf, 0.0)).amin(1)


def _probability_change(logits: Tensor, spread: Tensor) -> Tensor:
    """Bound the change of probabilities in total variation [N] if logits differences move by `spread` [N].

    If every difference of two logits moves by at most r, a set of classes with probability s ends with at
    most `s e^r / (1 - s + s e^r)`, so it gains

        F(s) = s (1 - s) (1 - e^-r) / (e^-r + s (1 - e^-r)),

    which is largest at s* = 1 / (1 + e^{r/2}). No set but the top class and its supersets has more than
    `1 - p_top`, none has less than `p_min`, and beyond s* the smaller of s and 1 - s gains more: F at s*
    clamped to [p_min, 1 - p_top] is the bound.

    Example:
        >>> _probability_change(torch.tensor([[0.0, 0.0]]), torch.tensor([0.0])).tolist()
        [0.0]
    """
    p = logits.detach().cpu().double().softmax(1).sort(1).values
    r = spread.double()
    s = torch.sigmoid(-r / 2).maximum(p[:, 0]).minimum(p[:, :-1].sum(1))
    gained = -torch.expm1(-r)
    change = s * (1 - s) * gained / (torch.exp(-r) + s * gained)
    # 0/0, where the probability of a class is 0 in float64 and the spread infinite.
    return torch.nan_to_num(change, nan=1.0)


def _trivial_change(logits: Tensor) -> Tensor:
    """Return `1 - min_c p_c` [N]: no change of probabilities in total variation is larger."""
    return 1 - logits.detach().cpu().double().softmax(1).amin(1)


_BOUNDS = (BOUND,) * 3
KINDS = ("topk", "class")
RADII = tuple(10 ** (-3 + step / 8) for step in range(17))
"""Radii of curves: .001 to .1, eight steps a decade."""

_ROUNDING = 1e-9  # of an overlap such as 1 - 1/5
_TENSORS = {"degree": ("<i8", 1), "costs": ("<f8", 2), "beta1": ("<f8", 1), "heads_beta2": ("<f8", 1)}
_PREDICTION = dict.fromkeys(("class_radius", "alpha2_logits", "alpha2_probabilities"), ("<f8", 1))
_TEXTS = ("class_status", "logits_status", "probabilities_status", "reason", "rows_are")


class _LayerLayout(TypedDict):
    """A layer in a file."""

    name: str
    heads: int
    k: int | None
    sharpness: float | None
    class_status: Literal["exact", "bound", "unknown"]
    logits_status: Literal["exact", "bound", "unknown"]
    probabilities_status: Literal["exact", "bound", "unknown"]
    reason: str
    rows_are: NotRequired[Literal["nodes", "links", "graphs", "unknown"]]
    per_node: dict[str, PackedArray | None]


@typed
@dataclass(frozen=True, eq=False)
class LayerCertificate:
    """Certificates of one layer, for perturbations of this layer alone with its values fixed.

    For `costs` and the top-k the explanation vector (`LayerAttention.explanation`) moves by R, for
    `prediction` each head does. The top-k of nodes with at most k neighbours cannot change; shares count the
    others.

    Attributes:
        name: of the layer.
        heads: H.
        k: k2, the size of the explanation, or None for all neighbours.
        sharpness: of the explanation vector, see `fgai.metrics.sharpness`; NaN if no node has two neighbours.
        degree: int64 [N], neighbours of each node in this layer, self-loops included.
        costs: float64 [N, M], c(m) of `fgai.topk.swap_costs`; infinite where m members cannot leave.
        beta1: float64 [N], overlap of the top-k1 with the vanilla model's, or None.
        prediction: change of the predictions.
        heads_beta2: float64 [N], certified overlap while every head moves by the record's radius: a lower
            bound; None in older records.
    """

    name: str
    heads: int
    k: int | None
    sharpness: float
    degree: Tensor
    costs: Tensor
    beta1: Tensor | None
    prediction: Prediction
    heads_beta2: Tensor | None = None

    def __post_init__(self) -> None:
        check_k(self.k)

    @property
    def num_nodes(self) -> int:
        """N."""
        return int(self.degree.numel())

    @property
    def counted(self) -> Tensor:
        """Mask of the nodes with more than k neighbours, bool [N]."""
        if self.k is None:
            return torch.zeros_like(self.degree, dtype=torch.bool)
        return self.degree > self.k

    @property
    def trivial_share(self) -> float:
        """Share of nodes with at most k neighbours."""
        return 1.0 - float(self.counted.double().mean())

    @property
    def topk_radius(self) -> Tensor:
        """float64 [N]: below this radius the top-k set cannot change; infinite for trivial nodes."""
        return self.overlap_radius(1.0)

    def overlap_radius(self, beta: float) -> Tensor:
        """float64 [N]: below this radius at least the share `beta`, between 0 and 1, of the top-k stays."""
        fraction(beta, "beta", "it is an overlap")
        leavers = 0 if self.k is None else math.floor(self.k * (1 - beta) + _ROUNDING)
        if leavers >= self.costs.shape[1]:
            return torch.full((self.num_nodes,), torch.inf, dtype=torch.float64)
        return self.costs[:, leavers]

    def beta2(self, radius: float) -> Tensor:
        """Certified overlap at `radius`: `1 - max{m : c(m) <= R} / k`, float64 [N]; ties count as lost."""
        at_least(radius, "radius", 0.0)
        if self.k is None:
            return torch.ones(self.num_nodes, dtype=torch.float64)
        return 1 - (self.costs <= radius).sum(1).double() / self.k

    def certified(self, kind: str, radius: float, beta: float = 1.0) -> Tensor | None:
        """Which nodes are certified at `radius`: bool [N], None where unknown.

        `kind` is "topk" (at least the share `beta` of the top-k stays) or "class" (the prediction stays).

        Raises:
            InputError: an unknown `kind`, a negative or infinite radius, or `beta` not between 0 and 1.
        """
        one_of(kind, "kind", KINDS)
        at_least(radius, "radius", 0.0)
        fraction(beta, "beta", "it is an overlap")
        safe = self.overlap_radius(beta) if kind == "topk" else self.prediction.class_radius
        return None if safe is None else safe > radius

    def share(self, kind: str, radius: float, beta: float = 1.0) -> float | None:
        """Share of the counted nodes, or of all links or graphs, certified at `radius`; None if unknown."""
        certified = self.certified(kind, radius, beta)
        counted = self._counted(kind == "class")
        if certified is None or not bool(counted.any()):
            return None
        return float(certified[counted].double().mean())

    def curve(self, kind: str, radii: tuple[float, ...] = RADII, beta: float = 1.0) -> list[float | None]:
        """`share` at each of `radii`."""
        return [self.share(kind, radius, beta) for radius in radii]

    def median(self, values: Tensor | None, *, predicted: bool = False) -> float | None:
        """Median over the counted nodes, or, if `predicted`, over all links or graphs; None without any."""
        counted = self._counted(predicted)
        if values is None or not bool(counted.any()):
            return None
        return float(values[counted].quantile(0.5, interpolation="lower"))

    def _counted(self, predicted: bool) -> Tensor:
        """`counted`, or everything where predictions are not those of nodes."""
        radius = self.prediction.class_radius
        if not predicted or radius is None or self.prediction.rows_are in ("nodes", UNKNOWN):
            return self.counted
        return torch.ones_like(radius, dtype=torch.bool)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; arrays are packed."""
        arrays = {name: getattr(self, name) for name in _TENSORS}
        arrays |= {name: getattr(self.prediction, name) for name in _PREDICTION}
        if self.heads_beta2 is None:
            del arrays["heads_beta2"]
        return {
            "name": self.name,
            "heads": self.heads,
            "k": self.k,
            "sharpness": None if math.isnan(self.sharpness) else self.sharpness,
            **{name: getattr(self.prediction, name) for name in _TEXTS},
            "per_node": {name: pack_tensor(tensor) for name, tensor in arrays.items()},
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Inverse of `to_dict`; raises `CheckpointError` for values that are missing or do not fit."""
        check(values, _LayerLayout, "a layer")
        shapes = {**_TENSORS, **_PREDICTION}
        kinds, required = dict.fromkeys(shapes, PackedArray | None), shapes.keys() - {"heads_beta2"}
        check_items(values["per_node"], kinds, "per_node of a layer", required=required)
        arrays: dict[str, Any] = {
            name: unpack_tensor(values["per_node"].get(name), name, *shape) for name, shape in shapes.items()
        }
        prediction = Prediction(
            **{name: arrays.pop(name) for name in _PREDICTION},
            **{name: values.get(name, UNKNOWN) for name in _TEXTS},
        )
        fields = {name: values[name] for name in ("name", "heads", "k")}
        sharpness = math.nan if values["sharpness"] is None else values["sharpness"]
        layer = cls(**fields, sharpness=sharpness, prediction=prediction, **arrays)
        layer._check_shapes()
        return layer

    def _check_shapes(self) -> None:
        """Raise unless everything is about the same nodes, and about the same predictions."""
        if self.degree is None or self.costs is None:
            raise CheckpointError("a layer lacks its degrees or its costs")
        prediction = self.prediction
        rows = {len(t) for name in _PREDICTION if (t := getattr(prediction, name)) is not None}
        parts = (self.costs, self.beta1, self.heads_beta2)
        nodes = {self.num_nodes, *(len(part) for part in parts if part is not None)}
        if prediction.rows_are == "nodes":
            nodes |= rows
        if len(nodes) > 1 or len(rows) > 1:
            raise CheckpointError(f"the values of a layer are of {sorted(nodes | rows)} nodes")
        if self.heads < 1 or (self.k is not None and not self.k >= 1) or bool((self.degree < 0).any()):
            raise CheckpointError("heads, k or a degree of a layer is out of range")
