"""`evaluate_store`: exact metrics of models on a stored graph, without loading it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import chain, repeat
from math import nan
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from fgai import checks, metrics
from fgai.attention import model_name
from fgai.divergence import tvd
from fgai.errors import InputError, collect_warnings, warn
from fgai.evaluation.reliability import check_sharpness, warning_entries
from fgai.graph import Graph
from fgai.graph.fields import PARTS
from fgai.large.observation import StoredObservation, _NodeBlock
from fgai.large.stored import StoredGraph
from fgai.large.streaming import _exact_pass
from fgai.large.training import stored_source
from fgai.processes import SINGLE, ProcessGroup
from fgai.records import plain
from fgai.tasks import task_of
from fgai.typed import typed

_Sums = dict[str, tuple[float, int]]  # by name: sum over the nodes whose value is defined, their number


@typed
@dataclass(frozen=True)
class StoredEvaluation:
    """Metrics (see `fgai.metrics`) of a model on a stored graph, from all nodes and all neighbours.

    F1, balanced accuracy and macro-F1 are given by part of the split, sharpness and overlap by layer.
    `agreement` is the share of the nodes with the vanilla model's class; without a vanilla model it is None,
    as are `g_tvd`, `g_tvd_prob` and `overlap`. `graph` is a fingerprint.
    """

    model: str
    graph: str
    k: int
    name: str = ""
    f1: dict[str, float] = field(default_factory=dict)
    balanced_accuracy: dict[str, float] = field(default_factory=dict)
    macro_f1: dict[str, float] = field(default_factory=dict)
    sharpness: list[float] = field(default_factory=list)
    agreement: float | None = None
    g_tvd: float | None = None
    g_tvd_prob: float | None = None
    overlap: list[float] | None = None
    warnings: list[dict[str, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; a mean over no nodes is None."""
        return dict(plain(asdict(self)))

    def show(self, console: Console) -> None:
        """Print every metric on a line of its own."""
        for name, value in self.to_dict().items():
            if name != "warnings" and value not in (None, "", [], {}):
                console.print(f"{name}: {_text(value)}", markup=False, soft_wrap=True)


@typed
def evaluate_store(
    model: nn.Module,
    stored: StoredGraph | Path | str,
    *,
    vanilla: nn.Module | None = None,
    k: int = 5,
    seed: int = 0,
    group: ProcessGroup = SINGLE,
) -> StoredEvaluation:
    """Measure a model on a stored graph or its folder, by exact passes block by block, see `observe_store`.

    F1 and sharpness, with the `vanilla` model it was trained from also agreement, g-TVD and overlap of the
    top `k`. Attacks, F-slopes and certificates need whole graphs: `fgai.evaluate(model, stored.load())`.
    Warns if attention is close to uniform. The seed is that of the split, if there are labels and no masks.
    All processes of a `group` must call this, and all get the numbers of one process.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> stored, model = fgai.large.write_store(data, "planted"), fgai.train("GAT", data, epochs=3)
        >>> evaluate_store(model, stored, vanilla=model).overlap
        [1.0, 1.0]
    """
    checks.whole(k, "k", 1)
    with stored_source(stored, seed) as source, collect_warnings() as notes:
        for each in (model, vanilla):
            if each is not None:
                _exact_pass(each, source.stored)
                if group.is_distributed:
                    source.check_processes(each, "evaluation", k, seed)
        own = source.observe(model, ranked=True, group=group)
        source.check_classes(own.logits.shape[1])
        other = None if vanilla is None else source.observe(vanilla, ranked=True, group=group)
        sizes = [
            (each.logits.shape, len(each.layers), len(each.rows().source)) for each in (own, other or own)
        ]
        if other is not None and sizes[0] != sizes[1]:
            models = f"{model_name(model)} and {other.model}"
            raise InputError(f"`vanilla` must have the model's layers, edges and classes, got {models}")
        means = _means(own, other, k, group)
        layers = range(len(own.layers))
        results: dict[str, Any] = dict(_scores(own, source.node_graph))
        if other is not None:
            results |= {name: means[name] for name in ("agreement", "g_tvd", "g_tvd_prob")}
            results["overlap"] = [means[f"overlap {layer}"] for layer in layers]
        sharpness = [means[f"sharpness {layer}"] for layer in layers]
        tops = [means.get(f"top {layer}", nan) for layer in layers]
        check_sharpness(sharpness, tops, [means.get("uniform", nan)] * len(layers))
        name = source.stored.name
        group.barrier()  # the files are removed after this block
    for note in notes if group.is_main else ():
        warn(note)
    results |= {"name": name, "sharpness": sharpness, "warnings": warning_entries(notes)}
    return StoredEvaluation(own.model, own.graph, k, **results)


def _means(
    own: StoredObservation, other: StoredObservation | None, k: int, group: ProcessGroup
) -> dict[str, float]:
    """Return means over all nodes; sums of blocks, shared by processes, are added in the order of nodes."""
    others: Iterable[_NodeBlock | None] = repeat(None) if other is None else other._node_blocks(group)
    sums = [_block_sums(*pair, k) for pair in zip(own._node_blocks(group), others, strict=False)]
    totals: _Sums = {}
    for block in chain.from_iterable(group.gather(sums)):
        for name, (value, nodes) in block.items():
            total, count = totals.get(name, (0.0, 0))
            totals[name] = total + value, count + nodes
    return {name: total / count if count else nan for name, (total, count) in totals.items()}


def _block_sums(own: _NodeBlock, other: _NodeBlock | None, k: int) -> _Sums:
    values: dict[str, Tensor] = {}
    for layer, w in enumerate(own.attention):
        values[f"sharpness {layer}"] = metrics.sharpness_per_node(w, own.rowptr)
    if other is not None:
        values["agreement"] = (own.logits.argmax(1) == other.logits.argmax(1)).double()
        before, after = other.logits.double(), own.logits.double()
        values["g_tvd"] = tvd(before, after)
        values["g_tvd_prob"] = tvd(before, after, "probabilities")
        for layer, (one, two) in enumerate(zip(other.scores, own.scores, strict=True)):
            values[f"overlap {layer}"] = metrics.overlap_per_node(one, two, own.rowptr, k)
    defined = {name: value[~value.isnan()].double() for name, value in values.items()}
    sums = {name: (float(value.sum()), value.numel()) for name, value in defined.items()}
    if several := int((own.rowptr.diff() >= 2).sum()):
        tops = {f"top {layer}": metrics.top_share(w, own.rowptr) for layer, w in enumerate(own.attention)}
        shares = {**tops, "uniform": metrics.uniform_share(own.rowptr)}
        sums |= {name: (several * share, several) for name, share in shares.items()}
    return sums


def _scores(own: StoredObservation, nodes: Graph) -> dict[str, dict[str, float]]:
    """Return the scores of the task by name, each by part of the split; none without labels."""
    scores: dict[str, dict[str, float]] = {}
    task = task_of(nodes)
    for part in PARTS if nodes.y is not None else ():
        rows = task.rows(nodes, part)
        if nodes.y is not None and task.has_part(nodes, part) and rows.numel():
            logits = torch.from_numpy(own.logits[rows.numpy()])
            for name, value in metrics.task_scores(task.name, logits, nodes.y[rows]).items():
                scores.setdefault(name, {})[part] = value
    return scores


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(_text(each) for each in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)
