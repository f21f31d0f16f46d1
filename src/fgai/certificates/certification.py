"""`certify`: certificates for the explanation and the prediction of every node."""

from __future__ import annotations

from time import perf_counter
from typing import Any, overload

import torch
from torch import Tensor, nn

from fgai.alone import with_gradients
from fgai.attention import LayerAttention, Observation, model_name, observe, prepared
from fgai.certificates.familiar import _alike, unfamiliar
from fgai.certificates.hidden import _hidden_predictions
from fgai.certificates.injection import Injection, InjectionCertificate, certify_injection
from fgai.certificates.layer import UNKNOWN, LayerCertificate, Prediction, _trivial_change
from fgai.certificates.linear import _item_prediction, _linear_prediction
from fgai.certificates.record import DIVERGENCES, CertificateRecord
from fgai.certificates.relu import _relu_prediction
from fgai.checks import at_least, finite, fraction, one_of
from fgai.divergence import tvd
from fgai.errors import AttentionError, InputError, ReliabilityWarning, warn
from fgai.graph import Graph
from fgai.graph.fingerprint import fingerprint_of
from fgai.metrics import sharpness
from fgai.models import as_graph
from fgai.records import provenance
from fgai.tasks import task_of
from fgai.topk import NORMS, check_k, overlap, swap_costs, topk_mask
from fgai.typed import typed
from fgai.version import versions

PRECISE = (torch.float32, torch.float64)


@overload
def certify(
    model: nn.Module,
    data: Any,
    *,
    vanilla: nn.Module | None = None,
    radius: float,
    k1: int | None = 5,
    k2: int | None = 5,
    norm: str = "l1",
    alpha: float | None = None,
    beta: float | None = None,
    divergence: str = "probabilities",
    threat: None = None,
) -> CertificateRecord: ...
@overload
def certify(
    model: nn.Module, data: Any, *, threat: Injection, k2: int | None = 5
) -> InjectionCertificate: ...
@typed
@with_gradients
def certify(
    model: nn.Module,
    data: Any,
    *,
    vanilla: nn.Module | None = None,
    radius: float | None = None,
    k1: int | None = 5,
    k2: int | None = 5,
    norm: str = "l1",
    alpha: float | None = None,
    beta: float | None = None,
    divergence: str = "probabilities",
    threat: Injection | None = None,
) -> CertificateRecord | InjectionCertificate:
    """Certify every node of a graph against all perturbations of its attention within `radius`.

    With a `threat` instead of a radius, against injected nodes: see `certify_injection`.

    For each layer, with the values that the attention weighs fixed, and R measured in `norm`:

    - the top-k2 of the explanation vector (`LayerAttention.explanation`, the normalised geometric mean of the
      heads) while that vector moves by at most R: certified overlap and radius, exact;
    - the predicted class while each head moves by at most R: the radius below which it cannot change, exact
      where the logits are linear in the attention (GAT, GATv2, PyG layers without a nonlinearity after the
      last one), a lower bound for the graph transformer's last layer and for hidden layers of GAT and GATv2,
      else unknown; for links (dot product) a lower bound, for graphs (mean of node logits) exact;
    - the change of logits and of probabilities in total variation while each head moves by at most R: exact,
      bound or unknown.

    With one head both are the attention itself; with several, one does not follow from the other. Against
    `vanilla`, overlap of the top-k1 and distance of the predictions are measured. Two attention vectors are
    never more than 2 apart in l1 (√2 in l2, 1 in linf). docs/certificates.md has the proofs.

    Args:
        model: fgai's or any PyG attention model; left as it was.
        data: a `Graph` or PyG `Data`.
        vanilla: the model the faithful one came from, for properties 1 and 3.
        radius: R ≥ 0; unless there is a `threat`.
        k1: size of the top-k compared with vanilla, None for all neighbours.
        k2: size of the certified top-k, None for all neighbours.
        norm: "l1", "l2" or "linf".
        alpha: α ≥ 0, largest change of prediction allowed; None leaves properties 3 and 4 out of the share.
        beta: β in [0, 1], least overlap allowed; None leaves properties 1 and 2 out of the share.
        divergence: D, total variation on "probabilities" or on "logits".
        threat: new nodes with any features; only `k2` counts beside it.

    Raises:
        InputError: an argument out of range, a graph the model cannot read, or a model that computes in less
            than float32 or gives something else when it runs again.
        AttentionError: no attention to certify, or a vanilla model with other layers or edges.

    Warns:
        ReliabilityWarning: `certificate-unknown`, if nothing can be said about predictions.

    Example:
        >>> import fgai
        >>> from fgai.certificates import certify
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train(fgai.GAT.for_data(data), data, epochs=3, progress=False)
        >>> certify(model, data, radius=0.01).layer().prediction.class_status
        'exact'
    """
    if threat is not None:
        if radius is not None or vanilla is not None:
            raise InputError(
                "give `radius` (and `vanilla`) for balls around the attention, or `threat`, not both"
            )
        if k2 is None:
            raise InputError(
                "`k2` must be a number: with all neighbours in the explanation nothing can leave it"
            )
        return certify_injection(model, data, neighbours=threat.neighbours, where=threat.where, k=k2)
    if radius is None:
        raise InputError("give `radius`, a ball around the attention, or `threat`, e.g. `Injection()`")
    at_least(radius, "radius", 0.0, "radius 0 is the attention itself")
    check_k(k1, "k1")
    check_k(k2, "k2")
    one_of(norm, "norm", NORMS)
    one_of(divergence, "divergence", DIVERGENCES)
    if alpha is not None:
        at_least(alpha, "alpha", 0.0)
    if beta is not None:
        fraction(beta, "beta", "it is an overlap")
    began = perf_counter()
    given = as_graph(data)
    seen = _observe(model, given)
    _require_repeatable(model, seen)
    other = None if vanilla is None else _observe(vanilla, given)
    graph = seen.graph
    ran = perf_counter()
    last = _last(model, seen, radius, norm)
    if last.class_status == UNKNOWN:
        text = f"predictions cannot be certified: {last.reason}"
        warn(ReliabilityWarning("certificate-unknown", text))
    predictions = [*_hidden_predictions(model, seen, radius, norm), last]
    others = _matched_layers(seen, other) if other is not None else [None] * len(seen.attention)
    layers = tuple(
        _layer(layer, before, prediction, (k1, k2), norm)
        for layer, before, prediction in zip(seen.attention, others, predictions, strict=True)
    )
    classes = predictions[-1].class_radius is not None
    done = perf_counter()
    return CertificateRecord(
        model={"class": model_name(model), "config": getattr(model, "config", None)},
        data={"name": graph.name, "nodes": graph.num_nodes, "edges": graph.num_edges},
        norm=norm,
        radius=float(radius),
        k1=k1,
        k2=k2,
        alpha=None if alpha is None else float(alpha),
        beta=None if beta is None else float(beta),
        divergence=divergence,
        compared=vanilla is not None,
        layers=layers,
        alpha1_logits=_distance(seen, other, "logits"),
        alpha1_probabilities=_distance(seen, other, "probabilities"),
        trivial_probabilities=_trivial_change(seen.logits) if classes else None,
        pairs=None if graph.links is None else graph.links.pairs.cpu(),
        batch=None if graph.batch is None else graph.batch.cpu(),
        version=versions(),
        seconds={"forward": ran - began, "certificates": done - ran, "total": done - began},
        provenance=provenance(model, fingerprint_of(given), command="fgai.certify"),
    )


def _observe(model: nn.Module, graph: Graph) -> Observation:
    """Run a model once, and require finite numbers that are precise enough."""
    seen = observe(model, prepared(model, graph), inputs=True)
    given = {f"attention of layer {layer.name!r}": layer.values for layer in seen.attention}
    for name, values in {"the model's logits": seen.logits, **given}.items():
        if values.dtype not in PRECISE:
            raise InputError(
                f"`{name}` must be float32 or float64, got {values.dtype}, which rounds too coarsely to"
                " certify small radii; use model.float()"
            )
        finite(values, name)
    return seen


def _require_repeatable(model: nn.Module, seen: Observation) -> None:
    """Raise unless another forward pass gives the same; that of a familiar model does."""
    if unfamiliar(model) is None:
        return
    again = observe(model, seen.graph)
    before, after = ([run.logits, *(layer.values for layer in run.attention)] for run in (seen, again))
    if len(before) == len(after) and all(map(_alike, before, after)):
        return
    raise InputError(
        f"{model_name(model)} gives something else when it runs again in evaluation mode, so nothing can"
        " be certified of it; take out what draws random numbers or remembers its last run"
    )


def _last(model: nn.Module, seen: Observation, radius: float, norm: str) -> Prediction:
    task = task_of(seen.graph)
    if getattr(model, "task", task.name) != task.name:
        return Prediction(reason=f"the model is made for task {model.task!r}, the data for {task.name!r}")
    if not task.row_per_node:
        return _item_prediction(model, seen, radius, norm)
    relu = _relu_prediction(model, seen, radius, norm)
    return _linear_prediction(model, seen, radius, norm) if relu is None else relu


def _layer(
    layer: LayerAttention,
    vanilla: LayerAttention | None,
    prediction: Prediction,
    sizes: tuple[int | None, int | None],
    norm: str,
) -> LayerCertificate:
    (k1, k2), layer = sizes, layer.to("cpu")
    rowptr, ranks = layer.rowptr, layer.ranking().double()
    explanation = finite(layer.explanation(), f"explanation of layer {layer.name!r}")
    beta1 = None
    if vanilla is not None:
        theirs = vanilla.to("cpu").ranking()
        beta1 = overlap(topk_mask(theirs, rowptr, k1), topk_mask(ranks, rowptr, k1), rowptr)
    # Equal scores are a tie, whatever the last bit of an exponential says.
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
        prediction=prediction,
    )


def _matched_layers(seen: Observation, other: Observation) -> list[LayerAttention | None]:
    """The vanilla model's layers, after making sure that rows may be compared."""
    if len(other.attention) != len(seen.attention):
        raise AttentionError(
            f"`vanilla` has {len(other.attention)} attention layers, the model {len(seen.attention)};"
            " give the model it was made from"
        )
    for mine, theirs in zip(seen.attention, other.attention, strict=True):
        mine.to("cpu").require_same_edges(theirs.to("cpu"))
    return list(other.attention)


def _distance(seen: Observation, other: Observation | None, space: str) -> Tensor | None:
    if other is None:
        return None
    if other.logits.shape != seen.logits.shape:
        raise InputError(
            f"`vanilla` returns logits of shape {tuple(other.logits.shape)}, the model"
            f" {tuple(seen.logits.shape)}; give the model it was made from"
        )
    if seen.logits.dim() != 2:
        return None
    return tvd(seen.logits.cpu().double(), other.logits.cpu().double(), space)
