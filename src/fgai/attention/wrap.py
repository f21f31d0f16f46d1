"""`wrap`: say how a model is called."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fgai.attention.adapter import GraphModel, prepared
from fgai.attention.calls import call_with, fields_of
from fgai.attention.contact import differ
from fgai.attention.state import evaluating
from fgai.attention.wrapped import Call, Wrapped, model_name, uncompiled
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.typed import typed


@typed
def wrap(model: nn.Module, call: Call, data: Any = None) -> Wrapped:
    """Return a model that fgai calls the way you do; taken wherever fgai takes a model.

    A model whose `forward` takes `x`, `edge_index` and, by these names, what else the data has (`edge_attr`,
    `edge_weight`, `batch`) needs no wrapping. For any other, `call` says how logits are had from a PyG `Data`
    that holds these fields, and no others. Attacks show it graphs with more nodes and edges.

    On the first graph it meets, outputs must not depend on the order of the edges. With `data` it is tried at
    once, and must say of fgai's copy of the graph what it says of `data` itself.

    Args:
        model: trained or not; kept as it is inside, as `.model`.
        call: `(model, data) → logits`, a row per node or per small graph. It must use the model it is given:
            copies of it are trained and attacked.
        data: a PyG `Data` or a `Graph` to try it on; optional.

    Returns:
        The wrapped model, called on a PyG `Data` or a `Graph`. What `make_faithful` and others make of it is
        wrapped likewise.

    Raises:
        InputError: nothing to call, one of fgai's own models, or, with `data`, a call that fails, returns
            another shape or says something else of fgai's copy.

    Example:
        >>> import fgai, torch
        >>> from torch_geometric.nn import GATv2Conv
        >>> data = fgai.load_dataset("planted").to_data()
        >>> data.edge_attr = torch.rand(data.num_edges, 2)
        >>> conv = GATv2Conv(data.num_features, 5, edge_dim=2).eval()
        >>> mine = fgai.wrap(conv, lambda m, g: m(g.x, g.edge_index, g.edge_attr), data)
        >>> mine(data).shape
        torch.Size([2000, 5])
    """
    if not callable(call):
        raise InputError(f"`call` must be a function (model, data) → logits, got {type(call).__name__}")
    if isinstance(uncompiled(model), GraphModel | Wrapped):
        raise InputError(f"{type(model).__name__} needs no wrapping: fgai knows how to call it")
    wrapped = Wrapped(model, call)
    if data is not None:
        _try(wrapped, data)
    return wrapped


def _try(wrapped: Wrapped, data: Any) -> None:
    """Make sure that the model says the same of fgai's copy of `data` as of `data` itself."""
    graph = prepared(wrapped, data if isinstance(data, Graph) else Graph.from_data(data))
    fields = fields_of(graph)
    with evaluating(wrapped), torch.no_grad():
        ours = call_with(wrapped, fields)
        try:
            given = graph if isinstance(data, Graph) else data.clone().to(graph.device)
            theirs = wrapped(given)
        except Exception as error:
            raise InputError(f"`call` failed on `data` itself: {error}") from error
        if differ(ours, theirs) and not differ(ours, call_with(wrapped, fields)):
            raise InputError(
                f"{model_name(wrapped)} says something else of `data` than of what fgai keeps of it"
                f" ({', '.join(fields)}); put what else `call` reads into `x` or `edge_attr`"
            )
