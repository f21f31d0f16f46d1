"""`certify_attention`: Definition 1, measured and certified for every node."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from fgai.attention import LayerAttention, Observation, model_name, observe, prepared
from fgai.attention.interface import originals
from fgai.certificates.base import PRECISE, _record_fields
from fgai.certificates.hidden import _hidden_predictions
from fgai.certificates.integrity import _rows_near, find_alteration
from fgai.certificates.kernels import _lost_members
from fgai.certificates.linear import _last_prediction, _trivial_change
from fgai.certificates.record import DIVERGENCES, UNKNOWN, CertificateRecord, LayerCertificate, Prediction
from fgai.checks import at_least, finite, fraction, one_of
from fgai.divergence import tvd
from fgai.errors import AttentionError, InputError, ReliabilityWarning, warn
from fgai.graph import Graph
from fgai.metrics import sharpness
from fgai.models import as_graph
from fgai.threads import with_gradients
from fgai.topk import NORMS, check_k, overlap, swap_costs, topk_mask
from fgai.typed import typed


@typed
@with_gradients
def certify_attention(
    model: nn.Module,
    data: Any,
    *,
    vanilla: nn.Module | None = None,
    radius: float = 0.01,
    alpha: float = 0.1,
    beta: float = 0.8,
    k1: int | None = 5,
    k2: int | None = 5,
    norm: str = "l1",
    divergence: str = "probabilities",
) -> CertificateRecord:
    """Measure and certify the four properties of Definition 1, for every node and layer.

    1. same explanation: at least the share β of the vanilla model's top-k1 is in the model's (measured);
    2. stable explanation: at least the share β of the top-k2 stays while the explanation vector
       (`LayerAttention.explanation`, which `fgai.explain` shows) moves by at most R (exact);
    3. same prediction: at most α from the vanilla model's in total variation (measured);
    4. stable prediction: it changes by at most α while each head moves by at most R (exact, bound, unknown).

    One layer is perturbed at a time, with the values that its attention weighs fixed: this is no guarantee
    against injected nodes, see `certify_injection`. docs/certificates.md has the proofs.

    Args:
        model: fgai's or any PyG attention model; left as it was.
        data: a `Graph` or PyG `Data`.
        vanilla: the model it came from, for properties 1 and 3.
        radius: R ≥ 0; two attention vectors are never more than 2 apart in l1 (√2 in l2, 1 in linf).
        alpha: α ≥ 0, largest change of the prediction allowed.
        beta: β in [0, 1], least overlap allowed.
        k1: size of the top-k compared with vanilla, None for all neighbours.
        k2: size of the certified top-k, None for all neighbours.
        norm: "l1", "l2" or "linf".
        divergence: total variation on "probabilities" or on "logits".

    Raises:
        InputError: an argument out of range, a graph that does not fit the model, or a model that computes in
            less than float32 or returns something else when it runs again.
        AttentionError: no attention to certify, or a vanilla model with other layers or edges.

    Warns:
        ReliabilityWarning: `certificate-unknown`, if nothing can be said about predictions.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train(fgai.GAT.for_data(data), data, epochs=3, progress=False)
        >>> certificate = fgai.certify_attention(model, data, vanilla=model)
        >>> certificate.layer().prediction.class_status, certificate.shares()["same_explanation"]
        ('exact', 1.0)
    """
    model, vanilla = originals(model, vanilla)
    check_k(k1, "k1")
    check_k(k2, "k2")
    one_of(norm, "norm", NORMS)
    one_of(divergence, "divergence", DIVERGENCES)
    at_least(alpha, "alpha", 0.0)
    fraction(beta, "beta", "it is an overlap")
    settings: dict[str, Any] = {"k1": k1, "k2": k2, "norm": norm, "divergence": divergence}
    settings |= {"alpha": float(alpha), "beta": float(beta)}
    (record,) = certify_radii(model, data, vanilla, (radius,), settings, complete=True)
    last = record.layer().prediction
    if last.class_status == UNKNOWN:
        warn(ReliabilityWarning("certificate-unknown", f"predictions cannot be certified: {last.reason}"))
    return record


def certify_radii(
    model: nn.Module,
    data: Any,
    vanilla: nn.Module | None,
    radii: Sequence[float],
    settings: Mapping[str, Any],
    *,
    complete: bool = False,
) -> list[CertificateRecord]:
    """Return a record per radius from one pass of each model; `settings` are fields of the records.

    Only `complete` ones have all class radii of hidden layers and the top-k bound while heads move.
    """
    for radius in radii:
        at_least(radius, "radius", 0.0, "radius 0 is the attention itself")
    began = perf_counter()
    original = as_graph(data)
    observation = _observe(model, original)
    _require_repeatable(model, observation)
    reference = observation if vanilla is model else None if vanilla is None else _observe(vanilla, original)
    _require_comparable(observation, reference)
    graph, norm, attention = observation.graph, settings["norm"], observation.attention
    references: Iterable[LayerAttention | None] = repeat(None) if reference is None else reference.attention
    explanations = [
        _explanation(layer, before, settings["k1"], settings["k2"], norm)
        for layer, before in zip(attention, references, strict=False)
    ]
    common = {
        **settings,
        **{f"alpha1_{space}": _distance(observation, reference, space) for space in DIVERGENCES},
        "compared": vanilla is not None,
        "pairs": None if graph.links is None else graph.links.pairs.cpu(),
        "batch": None if graph.batch is None else graph.batch.cpu(),
        **_record_fields(model, graph, original, "fgai.certify_attention"),
    }
    forward = perf_counter() - began
    records = []
    for radius in radii:
        last = _last_prediction(model, observation, radius, norm)
        predictions = [*_hidden_predictions(model, observation, radius, norm, complete), last]
        heads = [
            _heads_overlap(layer.to("cpu"), settings["k2"], radius, norm) if complete else None
            for layer in attention
        ]
        layers = tuple(
            replace(layer, prediction=prediction, heads_beta2=beta2)
            for layer, prediction, beta2 in zip(explanations, predictions, heads, strict=True)
        )
        total = perf_counter() - began
        record = CertificateRecord(
            radius=float(radius),
            layers=layers,
            trivial_probabilities=None if last.class_radius is None else _trivial_change(observation.logits),
            seconds={"forward": forward, "certificates": total - forward, "total": total},
            **common,
        )
        records.append(record)
    return records


def _observe(model: nn.Module, graph: Graph) -> Observation:
    """Run a model once; raise unless its numbers are finite and float32 or float64."""
    observation = observe(model, prepared(model, graph), inputs=True)
    checked = {f"attention of layer {layer.name!r}": layer.values for layer in observation.attention}
    for name, values in {"the model's logits": observation.logits, **checked}.items():
        if values.dtype not in PRECISE:
            raise InputError(f"`{name}` must be float32 or float64, got {values.dtype}; use model.float()")
        finite(values, name)
    return observation


def _require_repeatable(model: nn.Module, observation: Observation) -> None:
    """Raise unless another forward pass returns the same; unaltered models need none."""
    if find_alteration(model) is None:
        return
    again = observe(model, observation.graph)
    before, after = ([run.logits, *(layer.values for layer in run.attention)] for run in (observation, again))
    if len(before) == len(after) and all(map(_rows_near, before, after)):
        return
    name = model_name(model)
    raise InputError(
        f"{name} must return the same outputs in two runs in eval mode; remove random draws and states"
    )


def _explanation(
    layer: LayerAttention, vanilla: LayerAttention | None, k1: int | None, k2: int | None, norm: str
) -> LayerCertificate:
    layer = layer.to("cpu")
    rowptr, ranks = layer.rowptr, layer.ranking().double()
    explanation = finite(layer.explanation(), f"explanation of layer {layer.name!r}")
    beta1 = None
    if vanilla is not None:
        reference = topk_mask(vanilla.to("cpu").ranking(), rowptr, k1)
        beta1 = overlap(reference, topk_mask(ranks, rowptr, k1), rowptr)
    # Equal scores are a tie, whatever the last bit of their exponentials.
    tied = ~(swap_costs(ranks, rowptr, k2, "linf") > 0)
    costs = swap_costs(explanation, rowptr, k2, norm).masked_fill(tied, 0.0)
    return LayerCertificate(
        name=layer.name,
        heads=layer.num_heads,
        k=k2,
        sharpness=sharpness(explanation, rowptr),
        degree=rowptr.diff(),
        costs=costs,
        beta1=beta1,
        prediction=Prediction(),
    )


def _heads_overlap(layer: LayerAttention, k: int | None, radius: float, norm: str) -> Tensor:
    """Bound the overlap of the top-k [N] from below while every head moves by at most `radius`."""
    w, kept = layer.values.double(), torch.ones(layer.num_nodes, dtype=torch.float64)
    if k is None:
        return kept

    def ahead(members: Tensor, others: Tensor) -> Tensor:
        return _least_gap(w[members], w[others], radius, norm) > 0

    # Members are compared one by one, so for several of them it is a bound.
    top = topk_mask(layer.ranking().double(), layer.rowptr, k)
    return kept - _lost_members(layer.rowptr, top, k, ahead) / k


def _least_gap(mine: Tensor, other: Tensor, radius: float, norm: str) -> Tensor:
    """Return the least Σ_h log(mine_h − a_h) − log(other_h + b_h) [M] over the ball of each head.

    In l1, a_h + b_h = R, and the difference is least at an end: at a_h = R if other_h + R > mine_h, else at
    b_h = R. In linf both are R. An l2 ball lies in the linf ball of R and in the l1 ball of √2 R.
    """
    in_linf = (mine - radius).clamp(min=0).log() - (other + radius).log()
    if norm == "linf":
        return in_linf.sum(-1)
    size = radius if norm == "l1" else math.sqrt(2) * radius
    at_mine = (mine - size).clamp(min=0).log() - other.log()
    at_other = mine.clamp(min=0).log() - (other + size).log()
    in_l1 = torch.where(other + size > mine, at_mine, at_other)
    return (in_l1 if norm == "l1" else torch.maximum(in_linf, in_l1)).sum(-1)


def _require_comparable(observation: Observation, other: Observation | None) -> None:
    if other is None:
        return
    if len(other.attention) != len(observation.attention):
        counts = f"{len(other.attention)} attention layers, the model {len(observation.attention)}"
        raise AttentionError(f"`vanilla` has {counts}; give the model it was made from")
    for mine, theirs in zip(observation.attention, other.attention, strict=True):
        mine.to("cpu").require_same_edges(theirs.to("cpu"))
    if other.logits.shape != observation.logits.shape:
        shapes = f"{tuple(other.logits.shape)}, the model {tuple(observation.logits.shape)}"
        raise InputError(f"`vanilla` returns logits of shape {shapes}; give the model it was made from")


def _distance(observation: Observation, other: Observation | None, space: str) -> Tensor | None:
    if other is None or observation.logits.dim() != 2:
        return None
    return tvd(observation.logits.cpu().double(), other.logits.cpu().double(), space)
