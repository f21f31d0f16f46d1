"""`evaluate_store`: what can be said of models on a stored graph exactly, without loading it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from fgai import checks, metrics
from fgai.attention import model_name
from fgai.divergence import tvd
from fgai.errors import InputError
from fgai.large.observation import StoredObservation
from fgai.large.sort import _row_blocks
from fgai.large.source import _StoredSource
from fgai.large.stored import StoredGraph
from fgai.large.streaming import check_streamed
from fgai.large.training import stored_source
from fgai.processes import SINGLE, ProcessGroup, current
from fgai.records import plain
from fgai.tasks import task_of
from fgai.typed import typed

BLOCK = 1 << 18  # edges and nodes that are in memory together


@typed
@dataclass(frozen=True)
class StoredEvaluation:
    """A model on a stored graph, beside the vanilla one where that was given; all nodes, all neighbours.

    Attributes:
        model: class of the model.
        graph: fingerprint of the graph.
        k: neighbours in an explanation.
        f1: by part of the split, where there are labels; so the next two.
        balanced_accuracy: see `fgai.metrics.balanced_accuracy`.
        macro_f1: see `fgai.metrics.macro_f1`.
        sharpness: by layer, see `fgai.metrics.sharpness`.
        agreement: share of the nodes in the vanilla model's class; None without one, as all that follow.
        g_tvd: distance of the logits, see `fgai.metrics.g_tvd`.
        g_tvd_prob: distance of the probabilities.
        overlap: by layer, of the explanations, see `fgai.metrics.overlap`.
    """

    model: str
    graph: str
    k: int
    f1: dict[str, float] = field(default_factory=dict)
    balanced_accuracy: dict[str, float] = field(default_factory=dict)
    macro_f1: dict[str, float] = field(default_factory=dict)
    sharpness: list[float] = field(default_factory=list)
    agreement: float | None = None
    g_tvd: float | None = None
    g_tvd_prob: float | None = None
    overlap: list[float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; a mean over no nodes is None."""
        values: dict[str, Any] = plain(asdict(self))
        return values

    def show(self, console: Console) -> None:
        """Print what was found, a line each."""
        for name, value in self.to_dict().items():
            if value not in (None, [], {}):
                console.print(f"{name}: {_text(value)}", markup=False, soft_wrap=True)


class _Rows(NamedTuple):
    """A block of nodes: logits, where their edges begin, and per layer attention and ranks."""

    logits: Tensor
    rowptr: Tensor
    attention: list[Tensor]
    ranks: list[Tensor]


_Sums = dict[str, tuple[float, int]]
"""Sums over the nodes of a block and how many they are, by name; NaN counts nowhere."""


@typed
def evaluate_store(
    model: nn.Module,
    stored: StoredGraph | Path | str,
    *,
    vanilla: nn.Module | None = None,
    k: int = 5,
    seed: int = 0,
    together: bool = False,
) -> StoredEvaluation:
    """Measure a model on a stored graph, by exact passes block by block.

    F1, sharpness, and beside a vanilla model agreement, g-TVD and overlap. Attacks, F-slopes and certificates
    read whole graphs and need `fgai.evaluate(model, stored.load())`.

    Args:
        model: GAT, GATv2, GT without encodings, or a PyG model, see `observe_store`.
        stored: the graph or its folder.
        vanilla: the model it was made from.
        k: neighbours in an explanation.
        seed: of the split, where there are labels and no masks; as in `fgai.train`.
        together: inside `fgai.large.joined` let the ranks share the blocks, through a temporary folder that
            all of them must see; all must call it, and all get the numbers of one process, bit by bit.

    Raises:
        InputError: a model that does not fit the graph or `vanilla`, or cannot be computed row by row.
        DataError: the stored graph is damaged.
        RanksError: ranks disagree, do not see one folder, or one failed.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> stored, model = fgai.large.write_store(data, "planted"), fgai.train("GAT", data, epochs=3)
        >>> evaluate_store(model, stored, vanilla=model).overlap
        [1.0, 1.0]
    """
    checks.whole(k, "k", 1)
    ranks = current() if together else SINGLE
    with stored_source(stored, seed) as whole:
        for each in (model, vanilla):
            if each is not None:
                check_streamed(each, whole.stored)
                if together:
                    whole.agree(each, "evaluation", k, seed)
        found = whole.observe(model, ranked=True, ranks=ranks)
        whole.check_classes(found.logits.shape[1])
        other = None if vanilla is None else whole.observe(vanilla, ranked=True, ranks=ranks)
        seen = [each for each in (found, other) if each is not None]
        sizes = {(each.logits.shape, len(each.layers), len(each.rows.source)) for each in seen}
        if other is not None and len(sizes) > 1:
            raise InputError(
                "`vanilla` must have the model's layers, edges and classes, to be compared with it; got"
                f" {model_name(model)} and {other.model}"
            )
        means = _measured(found, other, k, ranks)
        layers = range(len(found.layers))
        beside: dict[str, Any] = dict(_scores(found, whole))
        if other is not None:
            beside |= {name: means[name] for name in ("agreement", "g_tvd", "g_tvd_prob")}
            beside["overlap"] = [means[f"overlap {layer}"] for layer in layers]
        sharpness = [means[f"sharpness {layer}"] for layer in layers]
        ranks.wait()  # until nobody reads what goes now
        return StoredEvaluation(found.model, found.graph, k, sharpness=sharpness, **beside)


def _measured(
    found: StoredObservation, other: StoredObservation | None, k: int, ranks: ProcessGroup
) -> dict[str, float]:
    """Means over all nodes; ranks share the blocks, whose sums are added in one order whoever found them."""
    others: Iterable[_Rows | None] = repeat(None) if other is None else _blocks(other, ranks)
    own = [_block_sums(*pair, k) for pair in zip(_blocks(found, ranks), others, strict=False)]
    sums: _Sums = {}
    for block in chain.from_iterable(ranks.gather(own)):
        for name, (more, nodes) in block.items():
            total, count = sums.get(name, (0.0, 0))
            sums[name] = total + more, count + nodes
    return {name: total / count if count else float("nan") for name, (total, count) in sums.items()}


def _block_sums(rows: _Rows, beside: _Rows | None, k: int) -> _Sums:
    values: dict[str, Tensor] = {}
    for layer, w in enumerate(rows.attention):
        values[f"sharpness {layer}"] = metrics.sharpness_per_node(w, rows.rowptr)
    if beside is not None:
        values["agreement"] = (rows.logits.argmax(1) == beside.logits.argmax(1)).double()
        before, after = beside.logits.double(), rows.logits.double()
        values["g_tvd"] = tvd(before, after)
        values["g_tvd_prob"] = tvd(before, after, "probabilities")
        for layer, (one, two) in enumerate(zip(beside.ranks, rows.ranks, strict=True)):
            values[f"overlap {layer}"] = metrics.overlap_per_node(one, two, rows.rowptr, k)
    known = {name: value[~value.isnan()].double() for name, value in values.items()}
    return {name: (float(value.sum()), value.numel()) for name, value in known.items()}


def _blocks(found: StoredObservation, ranks: ProcessGroup) -> Iterator[_Rows]:
    rowptr, layers = found.rows.rowptr, range(len(found.layers))
    for first, last in ranks.share(list(_row_blocks(rowptr, BLOCK, BLOCK))):
        edges = slice(int(rowptr[first]), int(rowptr[last]))
        scores = [found.scores(layer) for layer in layers]
        yield _Rows(
            torch.from_numpy(np.array(found.logits[first:last])),
            torch.from_numpy(np.array(rowptr[first : last + 1]) - rowptr[first]),
            [torch.from_numpy(np.array(found.attention(layer)[edges, 0])) for layer in layers],
            [torch.from_numpy(np.array(each[edges])) for each in scores if each is not None],
        )


def _scores(found: StoredObservation, whole: _StoredSource) -> dict[str, dict[str, float]]:
    """The scores of the task by name, each on the parts of the split."""
    nodes, task = whole.nodes, task_of(whole.nodes)
    if nodes.y is None:
        return {}
    scores: dict[str, dict[str, float]] = {}
    for part in ("train", "val", "test"):
        rows = task.rows(nodes, part)
        if task.has_part(nodes, part) and rows.numel():
            logits = torch.from_numpy(found.logits[rows.numpy()])
            for name, value in metrics.task_scores(task.name, logits, nodes.y[rows]).items():
                scores.setdefault(name, {})[part] = value
    return scores


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(_text(each) for each in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)
