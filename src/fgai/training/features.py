"""What features alone would give: a network that sees no edge, beside which certificates stand."""

from __future__ import annotations

from typing import Any

import torch

from fgai.attention import call_model, evaluating, prepared
from fgai.checks import one_of
from fgai.errors import InputError
from fgai.models import as_graph
from fgai.tasks import task_of
from fgai.training.train import train
from fgai.typed import typed


@typed
def features_alone(data: Any, *, seed: int = 0, targets: str = "test", **settings: Any) -> float:
    """Return the share of nodes that a network classifies right by their features, without any edge.

    Two layers on the graph without its edges, trained like any other model; no injected node can change it.
    A certified share of a graph network below this number protects nothing.

    Args:
        data: a `Graph` or PyG `Data` with labels and masks.
        seed: of the training.
        targets: the nodes that are scored, `test` or `val`.
        **settings: of the training, e.g. `epochs=100`, see `fgai.train`.

    Raises:
        InputError: another task than nodes, no labels, or other targets.

    Example:
        >>> import fgai
        >>> 0.2 < features_alone(fgai.load_dataset("planted"), epochs=20, progress=False) < 0.9
        True
    """
    one_of(targets, "targets", ("test", "val"))
    graph = as_graph(data)
    if not task_of(graph).row_per_node or graph.y is None:
        raise InputError(f"features alone are scored by the classes of nodes, {graph.name!r} has none")
    bare = graph.remove(torch.arange(graph.num_edges, device=graph.device))[0]
    model = train("GCN", bare, seed=seed, **settings)
    with evaluating(model), torch.no_grad():
        found = call_model(model, prepared(model, bare)).argmax(1).cpu()
    rows = task_of(graph).rows(graph, targets).cpu()
    return float((found[rows] == graph.y.cpu()[rows]).double().mean())
