"""How far every class stays behind a node's own under injection, as a bound that training can raise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fgai.attention.limits import SAMPLE
from fgai.bounds.ranges import Range, Ranges
from fgai.bounds.reading import Reading
from fgai.bounds.scores import Scores, first_layer, scores_of
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.models import GAT, AttentionLayer, GATv2
from fgai.ops import node_scores
from fgai.sparse import Adjacency, Features


def check_followed(model: Any) -> None:
    """Raise unless bounds of a model can be trained.

    Raises:
        InputError: it is not GAT or GATv2 with two attention layers, the last of one head.
    """
    if type(model) not in (GAT, GATv2):
        raise InputError(f"`certified` needs a GAT or GATv2 of fgai, got {type(model).__name__}; use 0")
    layers = list(model.convs)
    if (
        len(layers) != 2
        or layers[-1].heads != 1
        or model.guard is not None
        or layers[0].input_norm is not None
    ):
        raise InputError(
            "`certified` needs two attention layers, the last of one head, without norm or guard; use 0"
        )


def worst_leads(
    model: Any,
    graph: Graph,
    classes: Tensor,
    *,
    neighbours: int,
    cut: float,
    soften: float,
    heard: Tensor | float = 1.0,
) -> Tensor:
    """Least lead of a node's class over every other one when all nodes gain new neighbours.

        Σ_j min e^{s_j} (z_top − z_other)_j  /  Σ_j e^{s_j}

    over old neighbours j and new ones, scores and values anywhere in their intervals; positive for all others
    means that the class stays. It is what `fgai.certify` bounds, with the destination's score at the middle
    of its interval and the limits of this very pass: gradients reach the nodes that stand at their ends.

    Args:
        model: GAT or GATv2, see `check_followed`; its limits are not read.
        graph: prepared for it.
        classes: [N] that shall stay.
        neighbours: new ones of every node.
        cut: see `fgai.limit`.
        soften: see `fgai.limit`.
        heard: share of the new neighbours' mass that counts, for trainings that begin with little of it.

    Returns:
        [N, C], infinite at the class itself.
    """
    assert graph.features is not None
    adjacency = graph.adjacency
    first, last = model.convs
    assert isinstance(first, AttentionLayer) and isinstance(last, AttentionLayer)
    read, ranges = _read(first, graph.features, cut, soften)
    (scores,) = scores_of(first, ranges, read, read, adjacency)
    state = first_layer(first, ranges["value"], scores, read.low, adjacency, neighbours, heard)
    assert state.clean is not None
    _, ranges = _read(last, state.clean, cut, soften)
    around = Reading.around(last, ranges, state).centred()
    (scores,) = scores_of(last, ranges, around, around, adjacency)
    return _leads(adjacency, scores, around.lead(last), classes, heard * neighbours)


def _read(layer: AttentionLayer, x: Tensor | Features, cut: float, soften: float) -> tuple[Reading, Ranges]:
    """What a layer reads behind limits of its own input, and those limits."""

    def behind(name: str, raw: Tensor, *, whole: bool = True) -> Tensor:
        every = max(1, raw.shape[0] // SAMPLE)
        ranges[name] = Range.measured(raw, cut, soften, every=every, whole=whole)
        return ranges[name].heard(raw)

    ranges: dict[str, Range] = {}
    shape = (-1, layer.heads, layer.channels)
    values = behind("value", layer.value(x).view(shape))
    if layer.score == "dynamic":
        right = behind("right", layer.right(x).view(shape))
        return Reading(values, values, (values, values), (right, right)), ranges
    sides = node_scores(values, layer.source_weight, layer.destination_weight)
    source, destination = (
        behind(name, side, whole=False) for name, side in zip(("source", "destination"), sides, strict=True)
    )
    return Reading(values, values, (source, source), (destination, destination)), ranges


def _leads(
    adjacency: Adjacency, scores: Scores, lead: Tensor, classes: Tensor, neighbours: Tensor | float
) -> Tensor:
    """The worst weighted mean of leads [N, C], see `worst_leads`."""
    source, destination = adjacency.source, adjacency.destination
    low, high, new = scores.low[:, 0], scores.high[:, 0], scores.new[:, 0]
    peak = new.detach().amax(1).scatter_reduce(0, destination, high.detach(), "amax")
    width = lead.shape[1]
    # `index_select` rather than brackets: its backward pass does not sort.
    told = lead.flatten(0, 1).index_select(0, source * width + classes[destination])
    least, most = (torch.exp(end - peak[destination])[:, None] for end in (low, high))
    zeros = told.new_zeros(adjacency.num_nodes, told.shape[1])
    total = zeros.index_add(0, destination, torch.where(told < 0, most, least) * told)
    words = scores.words[:, classes].transpose(0, 1)  # [N, S, C]
    worst = (torch.exp(new - peak[:, None])[:, :, None] * words).clamp(max=0).amin(1)
    size = zeros[:, 0].index_add(0, destination, torch.exp((low + high) / 2 - peak[destination]))
    found = (total + neighbours * worst) / size.clamp(min=torch.finfo(size.dtype).tiny)[:, None]
    return found.scatter(1, classes[:, None], torch.inf)
