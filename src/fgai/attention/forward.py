"""One way to call fgai's models and a user's PyG models on a `Graph`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fgai.attention.layer import LayerAttention
from fgai.attention.map import AttentionMap
from fgai.attention.perturb import PerturbLike
from fgai.attention.record import find_layers, record
from fgai.errors import InputError
from fgai.graph import Graph
from fgai.sparse import Adjacency
from fgai.tasks import link_logits


def call_model(model: nn.Module, graph: Graph) -> Tensor:
    """Return the model's logits on a graph.

    fgai's models are called as `model(graph)` and read sparse features as they are. Any other model is
    called as `model(x, edge_index)` with dense features [N, F]; it adds self-loops itself if it wants them.
    On a graph with links it must return embeddings [N, D], whose dot products are the scores; on a batch of
    small graphs it is called as `model(x, edge_index, batch)` and must return a row per small graph.
    A model that needs more (`edge_attr`, positional encodings) is wrapped in a module that takes these.
    Gradients flow to injected features and feature deltas of the graph in both cases.

    Args:
        model: fgai's or the user's.
        graph: with features, on the model's device.

    Returns:
        Logits: a row per node [N, C], per link [L, 2] or per small graph [G, C].

    Raises:
        InputError: the graph has no features, it has edge weights and the model is not fgai's, or the model
            returned something else than one tensor.
    """
    if getattr(model, "is_fgai_model", False):
        return _tensor(model(graph), model)
    if graph.edge_weight is not None:
        raise InputError(
            f"{graph.name!r} has edge weights, which {type(model).__name__} called as model(x, edge_index)"
            " would not see; use one of fgai's models"
        )
    if graph.features is None:
        raise InputError(
            f"{graph.name!r} has no node features, which {type(model).__name__} needs; give it some"
        )
    inputs = (graph.features.to_dense(), graph.edge_index)
    if graph.batch is not None:
        return _tensor(model(*inputs, graph.batch), model)
    outputs = _tensor(model(*inputs), model)
    return outputs if graph.links is None else link_logits(outputs, graph.links.pairs)


def logits_and_attention(
    model: nn.Module, graph: Graph, perturb: PerturbLike | None = None
) -> tuple[Tensor, AttentionMap]:
    """Return logits [N, C] and the attention of every layer, perturbed if asked.

    The model runs in the mode it is in; see `evaluating` for evaluation mode. Neither is detached.

    Args:
        model: fgai's or the user's.
        graph: with features, on the model's device.
        perturb: what to change in the attention before dropout, see `record`.

    Raises:
        AttentionError: see `record`.
        InputError: see `call_model`.
    """
    with record(model, perturb=perturb) as tape:
        logits = call_model(model, graph)
    return logits, tape.attention


def observe(model: nn.Module, graph: Graph) -> tuple[Tensor, AttentionMap]:
    """Return logits and the attention averaged over heads, from the fused kernels where they serve.

    The same numbers as `logits_and_attention`, layers with values [E, 1]. Gradients of both reach the
    parameters and the features, but the attention does not lie on the way to the logits:
    `torch.autograd.grad(logits, attention)` finds no path. This is all a training step needs, and several
    times faster. Models other than fgai's, edge weights and taps take the usual way.

    Args:
        model: fgai's or the user's.
        graph: with features, on the model's device.
    """
    layers = find_layers(model)
    plain = graph.edge_weight is None and getattr(model, "guard", None) is None
    if not plain or any(getattr(layer, "tap", "none") is not None for layer in layers.values()):
        return _averaged(*logits_and_attention(model, graph))
    if not all(hasattr(layer, "watch") for layer in layers.values()):
        return _averaged(*logits_and_attention(model, graph))
    seen: list[LayerAttention] = []

    def watch(name: str) -> Callable[[Tensor, Adjacency], None]:
        return lambda values, adjacency: seen.append(LayerAttention.on(adjacency, values, name))

    try:
        for name, layer in layers.items():
            layer.watch = watch(name)  # type: ignore[assignment]
        logits = call_model(model, graph)
    finally:
        for layer in layers.values():
            layer.watch = None  # type: ignore[assignment]
    if not seen:
        return _averaged(*logits_and_attention(model, graph))
    return logits, AttentionMap(tuple(seen))


def _averaged(logits: Tensor, attention: AttentionMap) -> tuple[Tensor, AttentionMap]:
    return logits, AttentionMap(tuple(w.with_values(w.heads()[:, None]) for w in attention))


def _tensor(output: object, model: nn.Module) -> Tensor:
    if isinstance(output, Tensor):
        return output
    raise InputError(
        f"{type(model).__name__} must return one tensor of logits, got {type(output).__name__};"
        " wrap it in a module that returns the logits only"
    )
