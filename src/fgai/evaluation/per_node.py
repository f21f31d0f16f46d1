"""Values of every node, for those who want to look behind a mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fgai import divergence, metrics
from fgai.attention import Observation
from fgai.evaluation.measures import paired
from fgai.graph import Graph
from fgai.records import pack_array
from fgai.tasks import task_of


def node_arrays(
    views: dict[str, Observation],
    graph: Graph,
    nodes: Tensor,
    touched: Sequence[Tensor],
    overlaps: dict[str, Tensor],
) -> dict[str, Any]:
    """Pack per-node values for a record.

    Names: `degree`, `scored`, `label`, `predicted_clean`, `predicted_attacked`, `correct_clean`,
    `correct_attacked`, `tvd` (probabilities), all [N]; `touched`, `sharpness`, `sharpness_attacked` and
    `overlap_*`, all [L, N], NaN where undefined. For links and graphs, what is about predictions has one
    entry per link or graph instead, and `item_` before its name.

    Args:
        views: `clean` and `attacked`.
        graph: the original one.
        nodes: [T] the scored rows of the logits.
        touched: per layer bool [N].
        overlaps: [L, N] by what the attention was compared under.
    """
    clean, attacked, task = views["clean"], views["attacked"], task_of(graph)
    count, labels = task.count(graph), task.labels(graph)
    before, after = clean.logits, attacked.logits[:count]
    scored = torch.zeros(count, dtype=torch.bool, device=before.device)
    scored[nodes] = True
    pairs = paired(clean.attention, attacked.attention)
    predicted: dict[str, tuple[Tensor, type]] = {
        "scored": (scored, np.bool_),
        "predicted_clean": (before.argmax(1), np.int16),
        "predicted_attacked": (after.argmax(1), np.int16),
        "tvd": (divergence.tvd(before.double(), after.double(), "probabilities"), np.float32),
    }
    if labels is not None:
        predicted["label"] = (labels, np.int16)
        predicted["correct_clean"] = (before.argmax(1) == labels, np.bool_)
        predicted["correct_attacked"] = (after.argmax(1) == labels, np.bool_)
    prefix = "" if task.row_per_node else "item_"
    values: dict[str, tuple[Tensor, type]] = {
        "degree": (graph.adjacency.degree, np.int32),
        **{f"{prefix}{name}": value for name, value in predicted.items()},
        "touched": (torch.stack(list(touched)), np.bool_),
        "sharpness": (_stacked([metrics.sharpness_per_node(p.before, p.rowptr) for p in pairs]), np.float32),
        "sharpness_attacked": (
            _stacked([metrics.sharpness_per_node(p.after, p.rowptr) for p in pairs]),
            np.float32,
        ),
    }
    for name, overlap in overlaps.items():
        values[f"overlap_{name}"] = (overlap, np.float32)
    return {name: pack_array(tensor.cpu().numpy().astype(kind)) for name, (tensor, kind) in values.items()}


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(rows))
