"""The public operations: each checks its arguments and runs the kernel for the device."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fgai import checks
from fgai.errors import InputError
from fgai.ops.backend import _kernels_for
from fgai.ops.reference import ADDITIVE, DOT, DYNAMIC, Options, Score
from fgai.ops.segments import row_max, row_sum
from fgai.sparse import Adjacency, Features, SparseRows
from fgai.typed import typed

_WIDE = "heads", "channels"


def _check_edges(adjacency: Adjacency, like: Tensor) -> None:
    adjacency.check_incoming()
    if adjacency.device != like.device:
        _kernels_for(like)  # raises where a backend was forced that does not fit
        raise InputError(
            f"the edges are on {adjacency.device} and the numbers on {like.device}; move one of them"
        )


def _check(values: Tensor, name: str, shape: tuple[int | str, ...], like: Tensor | None = None) -> None:
    """Raise unless `values` is floating-point of this shape (a word: any size) and of the type of `like`."""
    same = values.dim() == len(shape)
    if not same or any(a != b for a, b in zip(values.shape, shape, strict=True) if isinstance(b, int)):
        text = ", ".join(str(size) for size in shape)
        raise InputError(f"`{name}` must have shape [{text}], got {list(values.shape)}")
    if not values.is_floating_point():
        raise InputError(f"`{name}` must be floating-point, got {values.dtype}")
    if like is None:
        return
    types = like.dtype, torch.promote_types(like.dtype, torch.float32)
    if values.dtype not in types or values.device != like.device:
        got = f"{values.dtype} on {values.device}"
        raise InputError(f"`{name}` must be {like.dtype} on {like.device}, as the others are, got {got}")


def _check_score(score: Score, adjacency: Adjacency, like: Tensor, name: str, *axes: str) -> None:
    _check_edges(adjacency, like)
    _check(like, name, (adjacency.num_nodes, *axes))
    checks.real_number(score.slope, "slope")
    shape = tuple(like.shape[: 2 if score.kind == ADDITIVE else 3])
    sides = {"source": score.far, "destination": score.near}
    for side, values in ({"query": score.near, "key": score.far} if score.kind == DOT else sides).items():
        _check(values, side, shape, like)
    if score.weight is not None:
        _check(score.weight, "weight", shape[1:], like)


# mypy: disable-error-code="no-untyped-call, no-any-return"

X = TypeVar("X", Tensor, Features, Tensor | Features)


@typed
def edge_softmax(scores: Tensor, adjacency: Adjacency) -> Tensor:
    """Softmax of `scores` [E, H] over the incoming edges of each node → [E, H]."""
    _check_edges(adjacency, scores)
    _check(scores, "scores", (adjacency.num_edges, "heads"))
    return _kernels_for(scores).edge_softmax(scores, adjacency)


@typed
def aggregate(attention: Tensor, values: Tensor, adjacency: Adjacency) -> Tensor:
    """`out[i] = Σ_{j→i} attention[j→i] · values[j]`: [E, H] and [N, H, C] → [N, H, C]."""
    _check_edges(adjacency, values)
    _check(values, "values", (adjacency.num_nodes, *_WIDE))
    _check(attention, "attention", (adjacency.num_edges, values.shape[1]), values)
    return _kernels_for(values).aggregate(attention, values, adjacency)


@typed
def score_additive(source: Tensor, destination: Tensor, adjacency: Adjacency, slope: float = 0.2) -> Tensor:
    """GAT's score, `leaky_relu(source[j] + destination[i])`: [N, H] twice → [E, H]."""
    return _score(Score(ADDITIVE, destination, source, None, slope), adjacency, "source", "heads")


@typed
def score_dynamic(
    source: Tensor, destination: Tensor, weight: Tensor, adjacency: Adjacency, slope: float = 0.2
) -> Tensor:
    """GATv2's score, `Σ_c weight · leaky_relu(source[j] + destination[i])`: [N, H, C] → [E, H]."""
    return _score(Score(DYNAMIC, destination, source, weight, slope), adjacency, "source", *_WIDE)


@typed
def score_dot(query: Tensor, key: Tensor, adjacency: Adjacency) -> Tensor:
    """The transformer's score, `⟨query[destination], key[source]⟩ / √C`: [N, H, C] → [E, H]."""
    return _score(Score(DOT, query, key, None, 0.0), adjacency, "query", *_WIDE)


def _score(score: Score, adjacency: Adjacency, name: str, *axes: str) -> Tensor:
    like = score.near if name == "query" else score.far
    _check_score(score, adjacency, like, name, *axes)
    return _kernels_for(like).score(score, adjacency)


@typed
def node_scores(values: Tensor, source_weight: Tensor, destination_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Products `⟨weight, values⟩` with both weights: [N, H, C] and [H, C] twice → [N, H] twice."""
    _check(values, "values", ("nodes", *_WIDE))
    _check(source_weight, "source_weight", tuple(values.shape[1:]), values)
    _check(destination_weight, "destination_weight", tuple(values.shape[1:]), values)
    return _kernels_for(values).node_scores(values, source_weight, destination_weight)


@typed
def attend_additive(
    source: Tensor,
    destination: Tensor,
    values: Tensor,
    adjacency: Adjacency,
    slope: float = 0.2,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Fused `score_additive` → `edge_softmax` → dropout → `aggregate`.

    The same numbers as the four operations, several times faster: no array of edges other than the attention
    is made. A node without incoming edges gets zeros. Not differentiable twice.

    `source` and `destination` [N, H] are both parts of the score, `values` are [N, H, C]. `options`: rate
    `dropout` on the attention, 0 by default, random by position (`fgai.ops.reference`), with a `seed` from
    torch's global generator by default; `written=False` if the attention is not needed, which the GPU then
    returns empty; `averaged` to return its mean over the heads; `bias` [H, C], added to the values of nodes.

    Returns the aggregated values [N, H, C] and the attention [E, H] (or [E, 1], averaged) before dropout.
    `InputError` if shapes, types or devices do not fit, or the rate is not in [0, 1).
    """
    return _attend(Score(ADDITIVE, destination, source, None, slope), values, adjacency, **options)


@typed
def attend_dynamic(
    source: Tensor,
    destination: Tensor,
    weight: Tensor,
    values: Tensor,
    adjacency: Adjacency,
    slope: float = 0.2,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Fused `score_dynamic` → `edge_softmax` → dropout → `aggregate`; `options` as in `attend_additive`."""
    return _attend(Score(DYNAMIC, destination, source, weight, slope), values, adjacency, **options)


@typed
def attend_dot(
    query: Tensor, key: Tensor, values: Tensor, adjacency: Adjacency, **options: Any
) -> tuple[Tensor, Tensor]:
    """Fused `score_dot` → `edge_softmax` → dropout → `aggregate`; `options` as in `attend_additive`."""
    return _attend(Score(DOT, query, key, None, 0.0), values, adjacency, **options)


@typed
def _attend(
    score: Score,
    values: Tensor,
    adjacency: Adjacency,
    *,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    written: bool = True,
    averaged: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check_score(score, adjacency, values, "values", *_WIDE)
    if bias is not None:
        _check(bias, "bias", tuple(values.shape[1:]), values)
    options = Options(dropout, _seed(values, dropout, seed), written, averaged, bias)
    return _kernels_for(values, narrow=True).attend(score, values, adjacency, options)


def dropout(numbers: X, p: float, training: bool = True, *, seed: int | Tensor | None = None) -> X:
    """Set each number to 0 with probability `p` and scale the rest by 1 / (1 - p), while training.

    Random by position (see `fgai.ops.reference`), with a `seed` from torch's global generator by default. Of
    sparse `Features` only the stored values are visited.
    """
    if not isinstance(training, bool):
        raise TypeError(f"`training` of `dropout` must be True or False, got {type(training).__name__}")
    if not isinstance(p, int | float) or p != 1:
        checks.rate(p, "p")
    if p == 0.0 or not training:
        return numbers
    if isinstance(numbers, Features):
        return numbers.map(lambda values: dropout(values, p, seed=seed))
    if not isinstance(numbers, Tensor):
        raise TypeError(f"`numbers` of `dropout` must be Tensor or Features, got {type(numbers).__name__}")
    return numbers * 0 if p >= 1.0 else _kernels_for(numbers).dropout(numbers, p, _seed(numbers, p, seed))


def _seed(values: Tensor, p: float, seed: int | Tensor | None) -> int | Tensor:
    if p == 0.0:
        return 0
    checks.rate(p, "dropout")
    if seed is None and values.device.type == "cuda":
        # A tensor: nothing waits for it, and a CUDA graph draws a new seed in every replay.
        return torch.randint(1 << 62, (1,), device=values.device)
    if seed is None:
        return int(torch.randint(1 << 62, ()))
    if not isinstance(seed, Tensor):
        return checks.whole(seed, "seed", 0, 2**62 - 1)
    if seed.numel() != 1 or seed.dtype != torch.int64:
        raise InputError(f"`seed` must be one whole number, got {seed.dtype} {tuple(seed.shape)}")
    return seed


@typed
def project(features: Features, weight: Tensor) -> Tensor:
    """Node features times `weight` [F, D] → [N, D]; sparse rows stay sparse, gradients reach dense parts."""
    features.check()
    _check(weight, "weight", (features.num_columns, "outputs"))
    base, kernels = features.base, _kernels_for(weight)
    out = kernels.project_sparse(base, weight) if isinstance(base, SparseRows) else base @ weight
    if features.rows is not None and features.delta is not None:
        out = out.index_add(0, features.rows, features.delta @ weight)
    if features.appended is not None:
        out = torch.cat([out, features.appended @ weight])
    return out


_LOWEST = -1e30  # score of an edge of weight 0: finite, so that a node with only such edges gives no NaN
_LARGEST_EXPONENT = 60.0  # in a gradient; reached only by edges of weight 0 with a score far above the others


class _WeightedSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, weight: Tensor, adjacency: Adjacency) -> Tensor:
        positive = (weight > 0)[:, None]
        weighted = torch.where(positive, scores + weight.log()[:, None], _LOWEST)
        attention = edge_softmax(weighted, adjacency) * positive
        ctx.save_for_backward(scores, weighted, attention)
        ctx.adjacency = adjacency
        return attention

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scores, weighted, attention = ctx.saved_tensors
        rowptr, destination = ctx.adjacency.rowptr, ctx.adjacency.destination
        centred = gradients[0] - row_sum(attention * gradients[0], rowptr)[destination]
        d_scores = attention * centred if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return d_scores, None, None
        # exp(score) / normaliser of the row: attention / weight, and the limit of that for weight 0.
        normaliser = row_max(weighted, rowptr) - row_max(attention, rowptr).log()
        ratio = torch.exp((scores - normaliser[destination]).clamp(max=_LARGEST_EXPONENT))
        return d_scores, (ratio * centred).sum(1), None


@typed
def weighted_softmax(scores: Tensor, weight: Tensor, adjacency: Adjacency) -> Tensor:
    """Softmax over the incoming edges of each node, every edge counted `weight` times.

        out_e = weight_e exp(score_e) / Σ_{e' into the same node} weight_e' exp(score_e')

    `scores` are [E, H], `weight` is [E] (negative counts as 0). An edge of weight 0 gets exactly 0 and still
    passes a gradient to its weight; a node whose edges all have weight 0 gets zeros. Not differentiable
    twice.

    Example:
        >>> adjacency, _ = Adjacency.build(torch.tensor([[0, 1, 2], [3, 3, 3]]), 4)
        >>> weighted_softmax(torch.zeros(3, 1), torch.tensor([3.0, 1.0, 0.0]), adjacency).flatten().tolist()
        [0.75, 0.25, 0.0]
    """
    if not weight.is_floating_point() or weight.shape != (adjacency.num_edges,):
        shape = f"[{adjacency.num_edges}], one per edge, got {tuple(weight.shape)}"
        raise InputError(f"edge weights must have shape {shape}")
    return _WeightedSoftmax.apply(scores, weight.to(scores.dtype), adjacency)
