"""Linear read-outs, `y = b + Σ_e w_e z_e`: recognised without doubt, then certified exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fgai.attention import LayerAttention, Observation, evaluating, observe
from fgai.certificates.kernels import class_norms
from fgai.certificates.prediction import BOUND, EXACT, Prediction, gaps, probability_change, radius_of
from fgai.models import AttentionLayer

# Operations on tensors of which only the attention varies; products are linear if one factor is fixed.
_SHAPES = (
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Expand",
    "Unsqueeze",
    "Squeeze",
    "T",
    "Transpose",
    "Permute",
)
_PARTS = ("Select", "Slice", "Split", "Unbind", "Index", "IndexSelect", "Gather", "Cat", "Stack", "Clone")
_SUMS = ("Add", "Sub", "Rsub", "Neg", "Sum", "Mean", "IndexAdd", "IndexPut", "Scatter", "ScatterAdd")
_LINEAR = {name.lower() for name in (*_SHAPES, *_PARTS, *_SUMS, "Alias", "ToCopy", "AccumulateGrad")}
_PRODUCTS = {"mul": 0, "mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "baddbmm": 1, "_aggregate": 0}
"""Name of a product → where its factors begin among its inputs."""


@dataclass(frozen=True, eq=False)
class LinearReadOut:
    """The logits of node i are `b_i + Σ_e Σ_h w_eh z_eh` over the edges e into i.

    Attributes:
        values: [M, H, C], z; a weight the read-out gives a head (1/H for an average) is part of it.
        index: [E] int64, the row of `values` each edge reads: its source, or its own place.
    """

    values: Tensor
    index: Tensor


def linear_prediction(
    read_out: LinearReadOut, rowptr: Tensor, logits: Tensor, radius: float, norm: str
) -> Prediction:
    """Certify every node of a linear read-out, each head's attention moved by at most `radius`.

    Class radius, exact:  min_c (y_top - y_c) / Σ_h ‖(z_eh,top - z_ehc)_e‖_dual.
    Logits, exact for l1 with one head, else a bound:  R/2 · total  of `class_norms`.
    Probabilities, a bound: `probability_change` of R · range.

    Args:
        read_out: see `LinearReadOut`.
        rowptr: [N+1].
        logits: [N, C].
        radius: R.
        norm: of the ball.
    """
    top, lead = gaps(logits)
    rate, spread, total = class_norms(rowptr, read_out.index, read_out.values, top, norm)
    exact = norm == "l1" and read_out.values.shape[1] == 1
    return Prediction(
        class_radius=radius_of(lead, rate),
        alpha2_logits=radius / 2 * total,
        alpha2_probabilities=probability_change(logits, radius * spread),
        class_status=EXACT,
        logits_status=EXACT if exact else BOUND,
        probabilities_status=BOUND,
        reason="the logits are linear in this layer's attention",
    )


def find_linear(model: nn.Module, seen: Observation) -> LinearReadOut | str:
    """Return the linear read-out of the last attention layer, or the reason why there is none.

    fgai's own output layer is recognised by the fact that it returned the logits themselves. For any other
    model the autograd graph from the last layer's attention to the logits is walked: if every operation on it
    is linear, the gradients are the values. One large random perturbation then shows whether each node's
    logits read that node's attention only, and whether anything acts that autograd does not see, such as a
    comparison that multiplies by 0 or 1.
    """
    last = seen.attention.last
    if seen.logits.dim() != 2 or seen.logits.shape[0] != last.num_nodes or seen.logits.shape[1] < 2:
        return f"logits of shape {tuple(seen.logits.shape)} are not one row of classes per node"
    run = seen.runs[-1] if seen.runs else None
    if run is not None and seen.ends_with_layer and isinstance(run.layer, AttentionLayer):
        layer = run.layer
        if layer.heads == 1 or not layer.concat:
            with torch.no_grad(), evaluating(layer):
                values = layer.attend(*run.inputs)[1]
            return LinearReadOut(values.detach().cpu().double() / layer.heads, last.source.cpu())
    return _from_gradients(model, seen)


def _from_gradients(model: nn.Module, seen: Observation) -> LinearReadOut | str:
    """Read the values off the gradients, after making sure that they are the values."""
    depth, leaf = len(seen.attention), seen.attention.last.values.clone().requires_grad_()

    def put(index: int, attention: Tensor, source: Tensor, destination: Tensor) -> Tensor:
        return leaf if index == depth - 1 else attention

    with torch.enable_grad(), evaluating(model, freeze=True):
        logits = observe(model, seen.graph, grad=True, perturb=put).logits
    if not logits.requires_grad:
        return "the logits do not depend on the last layer's attention in a way autograd can follow"
    culprit = _nonlinear(logits)
    if culprit is not None:
        hint = "; let the model return logits" if "softmax" in culprit.lower() else ""
        return f"{culprit} acts between the last attention layer and the output, which is not linear{hint}"
    columns = [
        torch.autograd.grad(logits[:, c].sum(), leaf, retain_graph=True)[0] for c in range(logits.shape[1])
    ]
    values = torch.stack(columns, dim=2).detach()
    if not _as_predicted(model, seen, values):
        return (
            "the logits move otherwise than their gradients say: they read the attention of other nodes, or a"
            " comparison hides what is not linear"
        )
    return LinearReadOut(values.cpu().double(), torch.arange(values.shape[0]))


def _nonlinear(logits: Tensor) -> str | None:
    """Name an operation between the one varying tensor and `logits` that is not linear, if there is one."""
    waiting: list[Any] = [logits.grad_fn]
    visited = set()
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        name: str = node.name().removeprefix("torch::autograd::").split("Backward")[0]
        inputs = [following for following, _ in node.next_functions]
        if not _is_linear(name, inputs, node):
            return name
        waiting += [following for following in inputs if following is not None]
    return None


def _is_linear(name: str, inputs: list[Any], node: Any) -> bool:
    # Only the attention requires a gradient: an input without a history is a constant.
    kind = name.lower()
    if kind in _PRODUCTS:
        return sum(factor is not None for factor in inputs[_PRODUCTS[kind] :]) <= 1
    if kind == "div":
        return inputs[1:] in ([], [None])
    if kind.endswith("batchnorm"):  # an affine map, unless it looks at the batch
        return getattr(node, "_saved_training", True) is False
    return kind in _LINEAR


def _as_predicted(model: nn.Module, seen: Observation, values: Tensor) -> bool:
    """Whether a random perturbation of all rows moves each node's logits as its own row says."""
    last = seen.attention.last
    generator = torch.Generator().manual_seed(0)
    delta = torch.rand(last.values.shape, generator=generator).to(last.values) - 0.5
    depth = len(seen.attention)

    def put(index: int, attention: Tensor, source: Tensor, destination: Tensor) -> Tensor:
        return attention + delta if index == depth - 1 else attention

    moved = observe(model, seen.graph, perturb=put).logits - seen.logits
    expected = torch.zeros_like(moved).index_add(
        0, last.destination, torch.einsum("eh,ehc->ec", delta, values)
    )
    reach = _reach(last, values)
    slack = 1e-3 if moved.dtype == torch.float32 else 1e-7
    return bool(((moved - expected).abs() <= slack * (reach + seen.logits.abs().amax())).all())


def _reach(last: LayerAttention, values: Tensor) -> Tensor:
    """[N, 1]: the size of what was summed, by which rounding errors are judged."""
    sizes = values.abs().sum((1, 2))
    return sizes.new_zeros(last.num_nodes).index_add(0, last.destination, sizes)[:, None]
