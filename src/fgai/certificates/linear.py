"""Linear read-outs, `y = b + Σ_e w_e z_e`, of nodes, links and graphs: detected, then certified."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from fgai.attention import LayerAttention, LayerRun, Observation, evaluating, observe
from fgai.certificates.integrity import _layer_values, find_alteration
from fgai.certificates.kernels import channel_norms, class_norms
from fgai.certificates.layer import (
    _BOUNDS,
    BOUND,
    EXACT,
    Prediction,
    _crossing_radius,
    _probability_change,
    _top_and_margins,
)
from fgai.certificates.linearity import _changed_constant, _track_linearity
from fgai.models import AttentionLayer
from fgai.ops import use_backend
from fgai.ops.segments import row_index
from fgai.tasks import link_logits, pool, task_of

_HINTS = {
    "softmax": "; let the model return logits",
    "log_softmax": "; let the model return logits",
    "local_scalar_dense": ": a number is read out, as for a branch",
}
PROBES = (1.0, 1 / 64, 1024.0)
"""Sizes of the random perturbations in the test of a read-out; attentions are never more than 2 apart."""
_ROUNDING = {torch.float32: (1e-4, 1e-5), torch.float64: (1e-9, 1e-12)}
"""Type → rounding of a change of the logits: relative to what was summed, and to the logits."""


@dataclass(frozen=True, eq=False)
class _LinearReadOut:
    """The logits of node i are `b_i + Σ_e Σ_h w_eh z_eh` over the edges e into i.

    z are `values` [M, H, C], weighted as in the read-out (1/H for an average), at the rows `index` [E].
    """

    values: Tensor
    index: Tensor


def _node_prediction(
    read_out: _LinearReadOut,
    rowptr: Tensor,
    logits: Tensor,
    radius: float,
    norm: str,
    batch: Tensor | None = None,
) -> Prediction:
    """Certify every node of a linear read-out, or the mean over each graph of `batch`.

    Class radius, exact:  min_c (y_top - y_c) / Σ_h ‖(z_eh,top - z_ehc)_e‖_dual, for a graph with the mean of
    its nodes' norms, each of which is attained independently of the others.
    Logits, exact for l1 with one head, for a graph a bound:  R/2 · total  of `class_norms`.
    """
    top, lead = _top_and_margins(logits)
    tops = top if batch is None else top[batch]
    rate, spread, total = class_norms(rowptr, read_out.index, read_out.values, tops, norm)
    exact, rows = norm == "l1" and read_out.values.shape[1] == 1, "nodes"
    reason = "the logits are linear in this layer's attention"
    if batch is not None:
        rates = pool(torch.cat([rate, spread[:, None], total[:, None]], dim=1), batch, len(top), "mean")
        rate, spread, total = rates[:, :-2], rates[:, -2], rates[:, -1]
        exact, rows = False, "graphs"
        reason = "the logits are means over nodes of numbers that are linear in this layer's attention"
    change, statuses = _probability_change(logits, radius * spread), (EXACT, EXACT if exact else BOUND, BOUND)
    return Prediction(_crossing_radius(lead, rate), radius / 2 * total, change, *statuses, reason, rows)


def _linear_prediction(model: nn.Module, observation: Observation, radius: float, norm: str) -> Prediction:
    """Certify nodes whose logits are linear in the last layer's attention."""
    read_out, rowptr = linear_read_out(model, observation), observation.attention.last.rowptr.cpu()
    if isinstance(read_out, str):
        return Prediction(reason=read_out)
    return _node_prediction(read_out, rowptr, observation.logits, radius, norm)


def linear_read_out(model: nn.Module, observation: Observation) -> _LinearReadOut | str:
    """Return the linear read-out of the last attention layer, or the reason why there is none.

    The output layer of an unaltered model (see `find_alteration`) must have returned the logits themselves.
    Any other model runs with random perturbations of the last attention, small and large, and every operation
    from there to the logits must be linear. Then the gradients are the values, if every backward step is
    PyTorch's own. The same runs show that the values are complete and that the logits of each node depend on
    the attention of that node alone: node by node the logits must move as the gradients predict. Constants
    must be the same in all runs, or an operation out of sight depends on the attention.
    """
    last, logits = observation.attention.last, observation.logits
    if logits.dim() != 2 or logits.shape[0] != last.num_nodes or logits.shape[1] < 2:
        return f"logits of shape {tuple(logits.shape)} are not one row of classes per node"
    run = observation.runs[-1] if observation.runs else None
    if run is not None and observation.ends_with_layer and find_alteration(model) is None:
        layer = run.layer
        assert isinstance(layer, AttentionLayer)
        if layer.heads == 1 or not layer.concat:
            return _output_read_out(run, last)
    return _gradient_read_out(model, observation)


def _gradient_read_out(model: nn.Module, observation: Observation) -> _LinearReadOut | str:
    last = observation.attention.last
    probes, generator = [], torch.Generator()
    generator.seed()  # so that no read-out can be made to fit one draw
    for size in PROBES:
        drawn = torch.rand(last.values.shape, generator=generator, dtype=torch.float32)
        delta = size * (drawn - 0.5).to(last.values)
        with _track_linearity() as mode:
            moved = _run_with_attention(model, observation, last.values + delta, mode.track)
        if mode.violation is not None:
            name = mode.violation.strip("_")
            reason = f"`{name}` acts between the last attention layer and the output, which is not linear"
            return f"{reason}{_HINTS.get(name, '')}"
        probes.append((delta, moved, mode))
    for _, _, mode in probes[1:]:
        if (operation := _changed_constant(probes[0][2], mode)) is not None:
            return (
                f"`{operation.strip('_')}` has other constants when the attention is another one: something"
                " computes with it out of sight, in another thread perhaps"
            )
    leaf = last.values.clone().requires_grad_()
    with torch.enable_grad(), evaluating(model, freeze=True):
        logits = _run_with_attention(model, observation, leaf, grad=True)
    if not all(mode.tracks(moved) for _, moved, mode in probes) or not logits.requires_grad:
        return "the logits do not depend on the last layer's attention in a way that can be followed"
    if (custom := _custom_backward(logits)) is not None:
        return f"`{custom}` between the last attention layer and the output has gradients of its own"
    columns = [
        torch.autograd.grad(logits[:, c].sum(), leaf, retain_graph=True)[0] for c in range(logits.shape[1])
    ]
    values, clean = torch.stack(columns, dim=2).detach(), logits.detach()
    if not all(_moves_as_gradients(last, delta, values, clean, moved) for delta, moved, _ in probes):
        return (
            "the logits move otherwise than their gradients predict: they depend on the attention of other"
            " nodes, or autograd does not see some operation"
        )
    return _LinearReadOut(values.cpu().double(), torch.arange(values.shape[0]))


def _run_with_attention(
    model: nn.Module,
    observation: Observation,
    attention: Tensor,
    start: Callable[[Tensor], None] | None = None,
    *,
    grad: bool = False,
) -> Tensor:
    """Return the logits with this attention [E, H] in the last layer, and PyTorch's operations behind it.

    `start` is called with the attention.
    """
    last = len(observation.attention) - 1
    with ExitStack() as stack:

        def replace(index: int, computed: Tensor, source: Tensor, destination: Tensor) -> Tensor:
            if index != last:
                return computed
            stack.enter_context(use_backend("reference"))
            if start is not None:
                start(attention)
            return attention

        return observe(model, observation.graph, grad=grad, perturb=replace).logits


def _custom_backward(logits: Tensor) -> str | None:
    """Name a backward step between the leaf and `logits` that is not PyTorch's own; None if there is none."""
    waiting: list[Any] = [logits.grad_fn]
    visited = set()
    while waiting:
        node = waiting.pop()
        if node in visited:
            continue
        visited.add(node)
        name: str = node.name().removeprefix("torch::autograd::")
        if isinstance(node, BackwardCFunction) or "::" in name:
            return name
        waiting += [before for before, _ in node.next_functions if before is not None]
    return None


def _moves_as_gradients(
    last: LayerAttention, delta: Tensor, values: Tensor, clean: Tensor, moved: Tensor
) -> bool:
    """Whether a perturbation [E, H] moves each node's logits as `values` [E, H, C] of its edges predict."""
    of_sums, of_logits = _ROUNDING[clean.dtype]
    parts = torch.einsum("eh,ehc->ec", delta.double(), values.double())
    sizes = torch.einsum("eh,ehc->ec", delta.double().abs(), values.double().abs())
    expected, size = (
        torch.zeros_like(clean, dtype=torch.float64).index_add(0, last.destination, part)
        for part in (parts, sizes)
    )
    # Node by node: the tolerance does not depend on large numbers of other nodes.
    allowed = of_sums * size.amax(1, keepdim=True) + of_logits * clean.double().abs().amax(1, keepdim=True)
    return bool(((moved.double() - clean.double() - expected).abs() <= allowed).all())


def _link_or_graph_prediction(
    model: nn.Module, observation: Observation, radius: float, norm: str
) -> Prediction:
    """Certify every link or small graph when the last layer's attention of every node moves by `radius`.

    The model must be unaltered (see `find_alteration`) and its output, bit by bit, the dot product or the
    mean over each graph of its last layer's output. Anything else (cosine, maximum, an MLP head) is unknown.
    """
    if (alteration := find_alteration(model)) is not None:
        return Prediction(
            reason=f"{alteration}; links and graphs are certified for fgai's models as they are"
        )
    run = observation.runs[-1] if observation.runs else None
    if run is None or run.output is None:
        return Prediction(reason="which layer ran last cannot be determined")
    layer, graph, logits, last = run.layer, observation.graph, observation.logits, observation.attention.last
    assert isinstance(layer, AttentionLayer)
    if layer.heads > 1 and layer.concat:
        return Prediction(reason="the last attention layer concatenates its heads")
    task, pairs = task_of(graph), None if graph.links is None else graph.links.pairs
    if task.linear_read_out == "product" and pairs is not None:
        plain = link_logits(run.output, pairs)
    elif task.linear_read_out == "mean":
        plain = pool(run.output, graph.batch, logits.shape[0], "mean")
    else:
        return Prediction(reason=f"how {task.rows_are} follow from the last attention layer is not known")
    if plain.shape != logits.shape or not torch.equal(plain, logits):
        return Prediction(
            reason="something other than a dot product or a mean follows the last attention layer"
        )
    read_out = _output_read_out(run, last)
    if isinstance(read_out, str):
        return Prediction(reason=read_out)
    if task.linear_read_out == "product" and pairs is not None:
        states = run.output.detach().cpu().double()
        return _link_prediction(read_out, last.rowptr.cpu(), states, pairs.cpu(), logits, radius, norm)
    assert graph.batch is not None
    return _node_prediction(read_out, last.rowptr.cpu(), logits, radius, norm, graph.batch.cpu())


def _link_prediction(
    read_out: _LinearReadOut,
    rowptr: Tensor,
    states: Tensor,
    pairs: Tensor,
    logits: Tensor,
    radius: float,
    norm: str,
) -> Prediction:
    """Bound the change of scores `s = ⟨h_u, h_v⟩` with `h = b + Σ_e w_e z_e`, both ends perturbed.

        |Δs| ≤ R (a_u + a_v) + R² A_u A_v,
        a_u = Σ_h ‖(⟨z_eh, h_v⟩)_e‖_dual,   A_u = Σ_h ‖(‖z_eh‖₂)_e‖_dual   over the edges e into u,

    the last term by Cauchy-Schwarz. The class is safe below the positive root of
    `R² A_u A_v + R (a_u + a_v) = |s|`. `states` [N, D] are h; `pairs` [2, L] are u and v, which differ.
    """
    score = logits.detach().cpu().double().diff(dim=1).squeeze(1)
    sizes = read_out.values.norm(dim=2, keepdim=True)
    size = channel_norms(rowptr, read_out.index, sizes, norm)[:, :, 0].sum(1)
    first = _pair_norms(read_out, rowptr, states, pairs, norm)
    first = first + _pair_norms(read_out, rowptr, states, pairs.flip(0), norm)
    second = size[pairs[0]] * size[pairs[1]]
    # 2c / (b + √(b² + 4ac)) is the root without cancellation, and without a division by a = 0.
    below = first + (first.square() + 4 * second * score.abs()).sqrt()
    safe = torch.where(below > 0, 2 * score.abs() / torch.where(below > 0, below, 1.0), torch.inf)
    safe = torch.where(score == 0, 0.0, safe)
    moved = radius * first + radius**2 * second
    reason = "the score is a product of two embeddings, each linear in this layer's attention"
    return Prediction(safe, moved / 2, _probability_change(logits, moved), *_BOUNDS, reason, "links")


def _output_read_out(run: LayerRun, last: LayerAttention) -> _LinearReadOut | str:
    """Return the read-out of an unaltered model's output layer, which averages its heads, or why not."""
    values = _layer_values(run, last)
    return values if isinstance(values, str) else _LinearReadOut(values / values.shape[1], last.source.cpu())


def _pair_norms(read_out: _LinearReadOut, rowptr: Tensor, states: Tensor, pairs: Tensor, norm: str) -> Tensor:
    """Return a [L] of the first end of each pair: norms of its edges' products with the other end's state."""
    degree = rowptr.diff()[pairs[0]]
    pointers = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    pair = row_index(pointers, int(pointers[-1]))
    edges = torch.arange(len(pair))
    edge = edges - pointers[pair] + rowptr[pairs[0]][pair]
    along = torch.einsum("ehd,ed->eh", read_out.values[read_out.index[edge]], states[pairs[1]][pair])
    return channel_norms(pointers, edges, along[:, :, None], norm)[:, :, 0].sum(1)
