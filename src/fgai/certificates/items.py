"""Certified predictions of links and of whole graphs, where the last attention layer feeds them linearly."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fgai.attention import Observation
from fgai.certificates.familiar import layer_values, unfamiliar
from fgai.certificates.kernels import class_norms
from fgai.certificates.linear import LinearReadOut
from fgai.certificates.prediction import BOUND, EXACT, Prediction, gaps, probability_change, radius_of
from fgai.graph import Graph
from fgai.models import AttentionLayer
from fgai.ops.segments import row_index
from fgai.tasks import link_logits, pool, task_of


def item_prediction(model: nn.Module, seen: Observation, radius: float, norm: str) -> Prediction:
    """Certify every link or small graph, the last layer's attention of every node moved by at most `radius`.

    Recognised is a familiar model (see `unfamiliar`) whose last layer's output, put through the dot-product
    decoder or the mean over each graph, is the model's output bit by bit. Anything else (cosine, maximum, an
    MLP head, a hook) is unknown.

    Args:
        model: fgai's.
        seen: its forward pass.
        radius: R.
        norm: of the balls.
    """
    found = _last_layer(model, seen)
    if isinstance(found, str):
        return Prediction(reason=found)
    read_out, states = found
    rows = READ_OUTS[task_of(seen.graph).linear_read_out]
    return rows.certified(seen, read_out, states, radius, norm)


def _products(
    seen: Observation, read_out: LinearReadOut, states: Tensor, radius: float, norm: str
) -> Prediction:
    assert seen.graph.links is not None
    rowptr, pairs = seen.attention.last.rowptr.cpu(), seen.graph.links.pairs.cpu()
    return link_prediction(read_out, rowptr, states, pairs, seen.logits, radius, norm)


def _plain_products(output: Tensor, graph: Graph, count: int) -> Tensor:
    assert graph.links is not None
    return link_logits(output, graph.links.pairs)


def _means(
    seen: Observation, read_out: LinearReadOut, states: Tensor, radius: float, norm: str
) -> Prediction:
    assert seen.graph.batch is not None
    rowptr, batch = seen.attention.last.rowptr.cpu(), seen.graph.batch.cpu()
    return graph_prediction(read_out, rowptr, batch, seen.logits, radius, norm)


def _plain_means(output: Tensor, graph: Graph, count: int) -> Tensor:
    return pool(output, graph.batch, count, "mean")


class _ReadOut(NamedTuple):
    """How the rows of a task are certified, and what they must be for that.

    Attributes:
        certified: (observation, read-out, states, radius, norm) → what is certified.
        plain: (output of the last layer, graph, number of rows) → the logits.
    """

    certified: Callable[[Observation, LinearReadOut, Tensor, float, str], Prediction]
    plain: Callable[[Tensor, Graph, int], Tensor]


READ_OUTS = {"product": _ReadOut(_products, _plain_products), "mean": _ReadOut(_means, _plain_means)}
"""What certifies the rows of a task, by its `linear_read_out`."""


def link_prediction(
    read_out: LinearReadOut,
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

    the first two terms linear in one perturbation each, the last one Cauchy-Schwarz on their product. The
    class is safe below the positive root of `R² A_u A_v + R (a_u + a_v) = |s|`.

    Args:
        read_out: z, [M, H, D].
        rowptr: [N+1].
        states: [N, D], h.
        pairs: [2, L], u ≠ v.
        logits: [L, 2].
        radius: R.
        norm: of the balls.
    """
    score = logits.detach().cpu().double().diff(dim=1).squeeze(1)
    size = _dual(read_out.values[read_out.index].norm(dim=2), rowptr, norm).sum(1)
    first = _towards(read_out, rowptr, states, pairs, norm)
    first = first + _towards(read_out, rowptr, states, pairs.flip(0), norm)
    second = size[pairs[0]] * size[pairs[1]]
    # 2c / (b + √(b² + 4ac)) is the root without cancellation, and without a division by a = 0.
    below = first + (first.square() + 4 * second * score.abs()).sqrt()
    safe = torch.where(below > 0, 2 * score.abs() / torch.where(below > 0, below, 1.0), torch.inf)
    safe = torch.where(score == 0, 0.0, safe)
    moved = radius * first + radius**2 * second
    return Prediction(
        class_radius=safe,
        alpha2_logits=moved / 2,
        alpha2_probabilities=probability_change(logits, moved),
        class_status=BOUND,
        logits_status=BOUND,
        probabilities_status=BOUND,
        reason="the score is a product of two embeddings, each linear in this layer's attention",
        rows_are="links",
    )


def graph_prediction(
    read_out: LinearReadOut, rowptr: Tensor, batch: Tensor, logits: Tensor, radius: float, norm: str
) -> Prediction:
    """Certify means of linear node logits: what every node of a graph can do at once adds up.

    Class radius, exact: `min_c (y_top - y_c) / mean_i margin[i, c]` with `margin` of `class_norms`, top being
    the graph's class; each node attains its margin on its own. Logits and probabilities are bounds.

    Args:
        read_out: z, [M, H, C].
        rowptr: [N+1].
        batch: [N] graph of each node.
        logits: [G, C].
        radius: R.
        norm: of the balls.
    """
    top, lead = gaps(logits)
    margin, spread, total = class_norms(rowptr, read_out.index, read_out.values, top[batch], norm)
    rates = pool(torch.cat([margin, spread[:, None], total[:, None]], dim=1), batch, len(top), "mean")
    return Prediction(
        class_radius=radius_of(lead, rates[:, :-2]),
        alpha2_logits=radius / 2 * rates[:, -1],
        alpha2_probabilities=probability_change(logits, radius * rates[:, -2]),
        class_status=EXACT,
        logits_status=BOUND,
        probabilities_status=BOUND,
        reason="the logits are means over nodes of what is linear in this layer's attention",
        rows_are="graphs",
    )


def _last_layer(model: nn.Module, seen: Observation) -> tuple[LinearReadOut, Tensor] | str:
    """The last layer's values and output, if the model's output is their plain read-out."""
    change = unfamiliar(model)
    if change is not None:
        return f"{change}; links and graphs are certified for fgai's models as they are"
    run = seen.runs[-1] if seen.runs else None
    if run is None or run.output is None:
        return "the last attention layer ran in a way that cannot be told from others"
    layer, graph, output = run.layer, seen.graph, run.output
    assert isinstance(layer, AttentionLayer)
    if layer.heads > 1 and layer.concat:
        return "the last attention layer concatenates its heads"
    task = task_of(graph)
    if task.linear_read_out not in READ_OUTS:
        return f"how {task.rows_are} follow from the last attention layer is not known"
    plain = READ_OUTS[task.linear_read_out].plain(output, graph, seen.logits.shape[0])
    if plain.shape != seen.logits.shape or not torch.equal(plain, seen.logits):
        return "something other than a dot product or a mean follows the last attention layer"
    values = layer_values(run, seen.attention.last)
    if isinstance(values, str):
        return values
    read_out = LinearReadOut(values / layer.heads, seen.attention.last.source.cpu())
    return read_out, output.detach().cpu().double()


def _towards(read_out: LinearReadOut, rowptr: Tensor, states: Tensor, pairs: Tensor, norm: str) -> Tensor:
    """[L]: a of the first end of each pair, its edges' values read along the other end's state."""
    degree = rowptr.diff()[pairs[0]]
    pointers = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    pair = row_index(pointers, int(pointers[-1]))
    edge = torch.arange(int(pointers[-1])) - pointers[pair] + rowptr[pairs[0]][pair]
    along = torch.einsum("ehd,ed->eh", read_out.values[read_out.index[edge]], states[pairs[1]][pair])
    return _dual(along.abs(), pointers, norm).sum(1)


def _dual(values: Tensor, rowptr: Tensor, norm: str) -> Tensor:
    """[N, H]: the dual norm of the non-negative values [E, H] of each row; 0 for an empty one."""
    rows = row_index(rowptr, values.shape[0])[:, None].expand_as(values)
    out = values.new_zeros(rowptr.numel() - 1, values.shape[1])
    if norm == "l1":
        return out.scatter_reduce(0, rows, values, "amax")
    if norm == "l2":
        return out.scatter_add(0, rows, values.square()).sqrt()
    return out.scatter_add(0, rows, values)
