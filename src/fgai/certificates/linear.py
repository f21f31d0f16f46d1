"""Read-outs of the last layer's attention: linear ones, detected and certified, and those through ReLUs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from fgai.attention import LayerAttention, LayerRun, Observation, evaluating, observe
from fgai.bounds.steps import batch_norm_map
from fgai.certificates.integrity import _layer_values, find_alteration
from fgai.certificates.kernels import _channel_norms, _class_norms
from fgai.certificates.linearity import _changed_constant, _track_linearity
from fgai.certificates.record import BOUND, EXACT, Prediction
from fgai.models import AttentionLayer, body_of
from fgai.ops import use_backend
from fgai.ops.segments import row_index
from fgai.tasks import get_task, link_logits, pool, task_of

_HINTS = {
    "softmax": "; let the model return logits",
    "log_softmax": "; let the model return logits",
    "local_scalar_dense": ": a number is read out, as for a branch",
}
PROBES = (1.0, 1 / 64, 1024.0)  # sizes of random perturbations; attentions are at most 2 apart
_ROUNDING = {torch.float32: (1e-4, 1e-5), torch.float64: (1e-9, 1e-12)}
"""Type → rounding of a change of the logits: relative to what was summed, and to the logits."""
SMALLEST = 5e-324  # radius of a node that is certified at radius 0 and no further
_BOUNDS = (BOUND,) * 3
_AGAIN = 1e-3  # difference between float32 and float64 logits, relative to what is summed
_BLOCK = 1 << 15  # edges per block: about 100 MB
_HALVINGS = 12  # of the interval of the class radius
_FARTHEST = 2.0  # largest distance of two attention vectors, in any of the norms


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
    """Bound the change of probabilities [N] if logits differences move by `spread` [N], as the docs prove."""
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


@dataclass(frozen=True, eq=False)
class _LinearReadOut:
    """Logits `b_i + Σ_e Σ_h w_eh z_eh` over the edges e into i."""

    values: Tensor  # z [M, H, C], weighted as in the read-out: 1/H for an average
    index: Tensor  # rows of the values [E]


def _node_prediction(
    read_out: _LinearReadOut,
    rowptr: Tensor,
    logits: Tensor,
    radius: float,
    norm: str,
    batch: Tensor | None = None,
) -> Prediction:
    """Certify every node of a linear read-out, or the mean over each graph of `batch`; see `_class_norms`."""
    top, lead = _top_and_margins(logits)
    tops = top if batch is None else top[batch]
    rates = _class_norms(rowptr, read_out.index, read_out.values, tops, norm)
    exact, rows = norm == "l1" and read_out.values.shape[1] == 1, "nodes"
    reason = "the logits are linear in this layer's attention"
    if batch is not None:
        rates = pool(rates, batch, len(top), "mean")
        exact, rows = False, "graphs"
        reason = "the logits are means over nodes of numbers that are linear in this layer's attention"
    rate, spread, total = rates[:, :-2], rates[:, -2], rates[:, -1]
    change, statuses = _probability_change(logits, radius * spread), (EXACT, EXACT if exact else BOUND, BOUND)
    return Prediction(_crossing_radius(lead, rate), radius / 2 * total, change, *statuses, reason, rows)


def _last_prediction(model: nn.Module, observation: Observation, radius: float, norm: str) -> Prediction:
    """Certify predictions when the last layer's attention of every node moves by `radius`."""
    task = task_of(observation.graph)
    if getattr(model, "task", task.name) != task.name:
        return Prediction(reason=f"the model is made for task {model.task!r}, the data for {task.name!r}")
    if not task.row_per_node:
        return _link_or_graph_prediction(model, observation, radius, norm)
    through_relu = _relu_read_out(model, observation)
    if through_relu is not None:
        return _relu_prediction(through_relu, observation, radius, norm)
    read_out, rowptr = linear_read_out(model, observation), observation.attention.last.rowptr.cpu()
    if isinstance(read_out, str):
        return Prediction(reason=read_out)
    return _node_prediction(read_out, rowptr, observation.logits, radius, norm)


def linear_read_out(model: nn.Module, observation: Observation) -> _LinearReadOut | str:
    """Return the linear read-out of the last attention layer, or the reason why there is none.

    The output layer of an unaltered model must have returned the logits. Any other model runs with random
    perturbations: every operation from the last attention to the logits must be linear, with the same
    constants in all runs. Then the gradients are the values, if every backward step is PyTorch's own, and
    node by node the logits must move as they predict.
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
    """Return the logits with this attention [E, H] in the last layer; `start` is called with it."""
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
    """Certify links or graphs; the output must be, bit by bit, products or means of the last layer's."""
    run = observation.runs[-1] if observation.runs else None
    graph, logits = observation.graph, observation.logits
    task, last = task_of(graph), observation.attention.last
    pairs = graph.links.pairs if graph.links is not None and task.linear_read_out == "product" else None
    if (alteration := find_alteration(model)) is not None:
        reason = f"{alteration}; links and graphs are certified for fgai's models as they are"
    elif run is None or run.output is None:
        reason = "which layer ran last cannot be determined"
    elif isinstance(run.layer, AttentionLayer) and run.layer.heads > 1 and run.layer.concat:
        reason = "the last attention layer concatenates its heads"
    elif pairs is None and task.linear_read_out != "mean":
        reason = f"how {task.rows_are} follow from the last attention layer is not known"
    else:
        states = run.output
        plain = (
            pool(states, graph.batch, len(logits), "mean") if pairs is None else link_logits(states, pairs)
        )
        read_out = _output_read_out(run, last)
        if plain.shape != logits.shape or not torch.equal(plain, logits):
            reason = "something other than a dot product or a mean follows the last attention layer"
        elif isinstance(read_out, str):
            reason = read_out
        elif pairs is not None:
            states = states.detach().cpu().double()
            return _link_prediction(read_out, last.rowptr.cpu(), states, pairs.cpu(), logits, radius, norm)
        else:
            assert graph.batch is not None
            return _node_prediction(read_out, last.rowptr.cpu(), logits, radius, norm, graph.batch.cpu())
    return Prediction(reason=reason)


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

        |Δs| ≤ R (a_u + a_v) + R² A_u A_v,   a_u = Σ_h ‖(⟨z_eh, h_v⟩)_e‖_dual,   A_u = Σ_h ‖(‖z_eh‖₂)_e‖_dual

    over the edges e into u. `states` [N, D] are h, `pairs` [2, L] u and v.
    """
    score = logits.detach().cpu().double().diff(dim=1).squeeze(1)
    sizes = read_out.values.norm(dim=2, keepdim=True)
    size = _channel_norms(rowptr, read_out.index, sizes, norm)[:, :, 0].sum(1)
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
    return _channel_norms(pointers, edges, along[:, :, None], norm)[:, :, 0].sum(1)


class _ReluReadOut(NamedTuple):
    """`p1 = G m + g`, `p2 = P m + B relu(p1) + q`, logits `A relu(p2) + a`; float64 on the CPU."""

    values: Tensor  # v [N, H, C]; `m` is `Σ_e w_eh v_eh` of all heads side by side
    source: Tensor  # rows of the values [E]
    G: Tensor
    P: Tensor
    B: Tensor
    A: Tensor
    p1: Tensor
    p2: Tensor


class _Rates(NamedTuple):
    """Effect of one unit of radius to first order on p1, p2, class margins, differences and all logits."""

    first: Tensor
    second: Tensor
    margin: Tensor
    spread: Tensor
    total: Tensor


def _relu_prediction(
    read_out: _ReluReadOut, observation: Observation, radius: float, norm: str
) -> Prediction:
    """Bound nodes of a graph transformer by its last layer's attention."""
    rowptr, logits = observation.attention.last.rowptr.cpu(), observation.logits
    top, margins = _top_and_margins(logits)
    rates = _first_order(read_out, rowptr, top, norm)
    size = torch.full((rowptr.numel() - 1,), radius, dtype=torch.float64)
    low, high = _remainder(read_out, rates, size)
    positive, negative = read_out.A.clamp(min=0).T, (-read_out.A).clamp(min=0).T
    rise, fall = high @ positive + low @ negative, low @ positive + high @ negative
    spread = radius * rates.spread + rise.amax(1) + fall.amax(1)
    class_radius = _class_radius(read_out, rates, top, margins, rowptr)
    moved = (radius * rates.total + torch.maximum(rise, fall).sum(1)) / 2
    reason = "linear part of the read-out, plus what ReLUs within reach can add"
    return Prediction(class_radius, moved, _probability_change(logits, spread), *_BOUNDS, reason)


def _relu_read_out(model: Any, observation: Observation) -> _ReluReadOut | None:
    """Return the read-out of a graph transformer's last attention layer; None for other models."""
    if body_of(model) != "blocks" or not get_task(model.task).row_per_node or not observation.runs:
        return None
    if find_alteration(model) is not None:
        return None
    run = observation.runs[-1]
    parts: Any = copy.deepcopy(nn.ModuleList([model.blocks[-1], model.head]))
    block, head = parts.requires_grad_(False).cpu().double()
    norms, maps = (block.norm_attention, block.norm_feed), (block.output, block.wide, block.narrow)
    if not all(isinstance(norm, nn.BatchNorm1d) and norm.running_var is not None for norm in norms):
        return None  # layer normalisation is not piecewise linear
    if [type(part) for part in (*maps, *head)] != [nn.Linear] * 4 + [nn.ReLU, nn.Linear]:
        return None
    layer, values = run.layer, _layer_values(run, observation.attention.last)
    assert isinstance(layer, AttentionLayer) and run.output is not None
    if isinstance(values, str):
        return None
    scales, shifts = zip(*(batch_norm_map(norm) for norm in norms), strict=True)
    out_w, wide_w, narrow_w, head_w, last_w = (one.weight for one in (*maps, head[0], head[2]))
    out_b, wide_b, narrow_b, head_b, last_b = (_bias(one) for one in (*maps, head[0], head[2]))
    state = run.inputs[0].cpu().double() + run.output.cpu().double() @ out_w.T + out_b
    state = state * scales[0] + shifts[0]
    p1 = state @ wide_w.T + wide_b
    fed = (state + p1.relu() @ narrow_w.T + narrow_b) * scales[1] + shifts[1]
    p2 = fed @ head_w.T + head_b
    size = p2.relu() @ last_w.abs().T + last_b.abs()
    apart = (p2.relu() @ last_w.T + last_b - observation.logits.cpu().double()).abs()
    if not bool((apart <= _AGAIN * size.amax(1, keepdim=True)).all()):
        return None
    mix = scales[0][:, None] * out_w
    shape = (-1, layer.heads, layer.channels)
    return _ReluReadOut(
        values=values,
        source=observation.attention.last.source.cpu(),
        G=(wide_w @ mix).view(shape),
        P=(head_w @ (scales[1][:, None] * mix)).view(shape),
        B=head_w @ (scales[1][:, None] * narrow_w),
        A=last_w,
        p1=p1,
        p2=p2,
    )


def _first_order(read_out: _ReluReadOut, rowptr: Tensor, top: Tensor, norm: str) -> _Rates:
    """The read-out linearised at every node: effective values per edge, then dual norms."""
    ahead = torch.einsum("nhc,khc->nhk", read_out.values, read_out.G)
    skip = torch.einsum("nhc,khc->nhk", read_out.values, read_out.P)
    on1, on2 = (read_out.p1 > 0).double(), (read_out.p2 > 0).double()
    nodes = rowptr.numel() - 1
    second = torch.zeros_like(read_out.p2)
    rates = second.new_zeros(nodes, len(read_out.A) + 2)
    for start, stop in _blocks(rowptr):
        edges = slice(int(rowptr[start]), int(rowptr[stop]))
        pointers, source = rowptr[start : stop + 1] - rowptr[start], read_out.source[edges]
        rows = torch.repeat_interleave(torch.arange(start, stop), pointers.diff())
        own = torch.arange(source.numel())
        moved = skip[source] + (ahead[source] * on1[rows][:, None]) @ read_out.B.T
        second[start:stop] = _channel_norms(pointers, own, moved, norm).sum(1)
        effective = (moved * on2[rows][:, None]) @ read_out.A.T
        rates[start:stop] = _class_norms(pointers, own, effective, top[start:stop], norm)
    first = _channel_norms(rowptr, read_out.source, ahead, norm).sum(1)
    return _Rates(first, second, rates[:, :-2], rates[:, -2], rates[:, -1])


def _remainder(read_out: _ReluReadOut, rates: _Rates, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Return low and high [N, K2]: relu(p2) lies in [−low, high] around its linear part, at radii [N]."""
    # relu(p + Δ) = relu(p) + M Δ + ε with 0 <= ε <= (|Δ| - |p|)_+ and M the unit's slope.
    size = radius[:, None]
    excess1 = (size * rates.first - read_out.p1.abs()).clamp(min=0)
    up, down = excess1 @ read_out.B.clamp(min=0).T, excess1 @ (-read_out.B).clamp(min=0).T
    on = read_out.p2 > 0
    reach = size * rates.second + torch.where(on, down, up)
    excess2 = (reach - read_out.p2.abs()).clamp(min=0)
    return torch.where(on, down, 0.0), torch.where(on, up, 0.0) + excess2


def _class_radius(
    read_out: _ReluReadOut, rates: _Rates, top: Tensor, margins: Tensor, rowptr: Tensor
) -> Tensor:
    """Return the largest radius, up to bisection, at which no class reaches the top one."""
    limit = _crossing_radius(margins, rates.margin).clamp(max=_FARTHEST)
    low, high = torch.zeros_like(limit), limit.clone()
    tried = high
    for _ in range(_HALVINGS + 1):
        lost = tried[:, None] * rates.margin + _margin_remainder(read_out, rates, top, tried)
        safe = (margins - lost).amin(1) > 0
        low, high = torch.where(safe, tried, low), torch.where(safe, high, tried)
        tried = (low + high) / 2
    ahead = margins.amin(1) > 0
    low = torch.where(ahead, low.clamp(min=SMALLEST), 0.0)  # at radius 0 nothing moves
    return torch.where(rowptr.diff() > 0, low, torch.where(ahead, torch.inf, 0.0))


def _margin_remainder(read_out: _ReluReadOut, rates: _Rates, top: Tensor, radius: Tensor) -> Tensor:
    """Bound how much class c can gain on the top class beyond first order [N, C], at radii [N]."""
    low, high = _remainder(read_out, rates, radius)
    out = torch.zeros_like(rates.margin)
    for winner in torch.unique(top).tolist():
        rows, ahead = top == winner, read_out.A[winner] - read_out.A
        out[rows] = low[rows] @ ahead.clamp(min=0).T + high[rows] @ (-ahead).clamp(min=0).T
    return out


def _blocks(rowptr: Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows with about `_BLOCK` edges each."""
    start, nodes = 0, rowptr.numel() - 1
    while start < nodes:
        stop = int(torch.searchsorted(rowptr, rowptr[start] + _BLOCK, right=True)) - 1
        stop = min(max(stop, start + 1), nodes)
        yield start, stop
        start = stop


def _bias(linear: nn.Linear) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
