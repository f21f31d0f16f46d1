"""How a model that is not fgai's is called: with the fields its arguments name, or as it was wrapped.

Every model gets `x` and `edge_index` by position. What else the graph has (`edge_attr`, `edge_weight`,
`batch`) goes to the argument of that name; `batch` is the third argument where none has its name. Values on
edges that no argument takes are refused: the model would not see them. Any other call is a function of the
user's, see `fgai.wrap`.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from fgai.attention.wrapped import Wrapped, model_name, uncompiled
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.graph.edge_values import VALUES

ALWAYS = ("x", "edge_index")
EXAMPLE = "`fgai.wrap(model, call=lambda m, g: m(g.x, g.edge_index))`, where g is a PyG `Data`"


def fields_of(graph: Graph, order: Tensor | None = None) -> dict[str, Tensor]:
    """Return what a model may read of a graph, by the names PyG has for it.

    Args:
        graph: with features, which are made dense.
        order: [K] positions of edges, to show them in another order or some twice; None leaves them.

    Raises:
        InputError: the graph has no features.
    """
    if graph.features is None:
        raise InputError(f"{graph.name!r} has no node features, which models need; give it some")
    on_edges = {name: value for name in VALUES if (value := getattr(graph, name)) is not None}
    edges = graph.edge_index
    if order is not None:
        edges = edges[:, order]
        on_edges = {name: value[order] for name, value in on_edges.items()}
    found = {"x": graph.features.to_dense(), "edge_index": edges, **on_edges}
    return found if graph.batch is None else {**found, "batch": graph.batch}


def call_with(model: nn.Module, fields: dict[str, Tensor]) -> Any:
    """Return what the model says of the fields of a graph."""
    if isinstance(uncompiled(model), Wrapped):
        from torch_geometric.data import Data

        return model(Data(**fields, num_nodes=len(fields["x"])))
    if len(fields) == len(ALWAYS):
        return model(fields["x"], fields["edge_index"])
    position, name = _places(model, fields)
    return model(*(fields[one] for one in position), **{one: fields[one] for one in name})


def check_arguments(model: nn.Module, graph: Graph, fields: dict[str, Tensor]) -> None:
    """Raise if `model.forward` cannot be called with what the graph has.

    Raises:
        InputError: it takes fewer arguments, or needs more, or would not see values on edges; says what to
            do.
    """
    if isinstance(uncompiled(model), Wrapped):
        return
    position, name = _places(model, fields)
    signature = _signature(model)
    if signature is None:
        return
    try:
        signature.bind(*position, **dict.fromkeys(name))
    except TypeError:
        missing = [one for one in VALUES if one in signature.parameters and one not in fields]
        lack = f"; {graph.name!r} has no `{missing[0]}`, give `data.{missing[0]}`" if missing else ""
        raise InputError(
            f"{model_name(model)}.forward takes {signature}, fgai calls it as {_shown(position, name)}{lack};"
            f" say how it is called: {EXAMPLE}"
        ) from None


def check_rows(outputs: Tensor, graph: Graph, model: nn.Module) -> None:
    """Raise unless there is a row for every node, or for every small graph of a batch.

    Raises:
        InputError: of another shape; names both.
    """
    rows = graph.num_nodes if graph.batch is None or graph.links is not None else graph.num_graphs
    if outputs.dim() != 2 or outputs.shape[0] != rows:
        what = "node" if rows == graph.num_nodes else "graph"
        raise InputError(
            f"`call` must return logits [{rows}, classes] on {graph.name!r}, a row per {what}, got"
            f" {tuple(outputs.shape)} from {model_name(model)}"
        )


def _places(model: nn.Module, fields: dict[str, Tensor]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which fields go by position and which by name.

    Raises:
        InputError: values on edges that no argument takes.
    """
    signature = _signature(model)
    parameters = {} if signature is None else signature.parameters
    anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    others = [name for name in fields if name not in ALWAYS]
    named = tuple(name for name in others if anything or name in parameters)
    unseen = [name for name in others if name not in named]
    if unseen == ["batch"] and not named:
        return (*ALWAYS, "batch"), ()
    if unseen:
        takes = "" if signature is None else str(signature)
        raise InputError(
            f"`{unseen[0]}` of the graph would not be seen by {model_name(model)}.forward{takes}; name an"
            f" argument so, say how it is called ({EXAMPLE}), or set `data.{unseen[0]} = None`"
        )
    return ALWAYS, named


def _signature(model: nn.Module) -> inspect.Signature | None:
    """Of the model's `forward`; None where it is scripted and says nothing of its arguments."""
    try:
        return inspect.signature(uncompiled(model).forward)
    except (TypeError, ValueError):
        return None


def _shown(position: tuple[str, ...], name: tuple[str, ...]) -> str:
    return f"model({', '.join((*position, *(f'{one}={one}' for one in name)))})"
