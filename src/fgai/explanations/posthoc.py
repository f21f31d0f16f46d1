"""`edge_explainer`: explainers by name, each behind the same call and on a model of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from torch_geometric.explain import (
    AttentionExplainer,
    CaptumExplainer,
    ExplainerAlgorithm,
    GNNExplainer,
    GraphMaskExplainer,
    PGExplainer,
)

from fgai import checks
from fgai.attention import observe, prepared
from fgai.errors import InputError, extra
from fgai.explanations.scores import AttentionScores, EdgeExplainer, RandomScores, hops_of
from fgai.explanations.searched import FittedScores, SearchedScores
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.tasks import task_of
from fgai.typed import typed


class Order(NamedTuple):
    """What an explainer is made from."""

    model: nn.Module
    graph: Graph
    hops: int
    seed: int
    epochs: int


@dataclass(frozen=True)
class Known:
    """An explainer by name.

    Attributes:
        title: in tables.
        make: from an order.
        epochs: of its search, where none are asked for; 0 where it does not search.
        draws: whether the seed has a say.
        needs: a package that fgai does not install by itself.
    """

    title: str
    make: Callable[[Order], EdgeExplainer]
    epochs: int = 0
    draws: bool = False
    needs: str = ""

    def check(self) -> None:
        """Raise unless what it needs is installed.

        Raises:
            MissingExtraError: it is not; the message holds the install line.
        """
        if self.needs:
            extra(self.needs)


def _attention(heads: str, **options: Any) -> Callable[[Order], EdgeExplainer]:
    return lambda order: AttentionScores(order.model, heads, **options)


def _searched(
    algorithm: Callable[[int, int], ExplainerAlgorithm], **options: Any
) -> Callable[[Order], EdgeExplainer]:
    """From an algorithm that is made of the number of layers and of epochs."""

    def made(order: Order) -> EdgeExplainer:
        return SearchedScores(
            order.model, order.hops, order.seed, make=lambda n: algorithm(n, order.epochs), **options
        )

    return made


def _fitted(order: Order) -> EdgeExplainer:
    return FittedScores(
        order.model,
        order.hops,
        order.seed,
        make=lambda layers: PGExplainer(epochs=order.epochs),
        graph=order.graph,
        epochs=order.epochs,
    )


EDGE_EXPLAINERS: dict[str, Known] = {
    "random": Known("random", lambda order: RandomScores(order.model, order.hops, order.seed), draws=True),
    "gnn-explainer": Known("GNNExplainer", _searched(lambda n, epochs: GNNExplainer(epochs)), 100, True),
    "pg-explainer": Known("PGExplainer", _fitted, 20, True),
    "graph-mask": Known(
        "GraphMask",
        _searched(lambda n, epochs: GraphMaskExplainer(n, epochs, log=False), split_heads=True),
        10,
        True,
    ),
    "saliency": Known("saliency", _searched(lambda n, epochs: CaptumExplainer("Saliency")), needs="captum"),
    "integrated-gradients": Known(
        "integrated gradients",
        _searched(lambda n, epochs: CaptumExplainer("IntegratedGradients", n_steps=epochs)),
        50,
        needs="captum",
    ),
    "pyg-attention": Known("PyG's AttentionExplainer", _searched(lambda n, epochs: AttentionExplainer())),
    "propagated-attention": Known("attention along paths", _attention("mean", paths=True)),
    "attention-mean": Known("attention, mean", _attention("mean")),
    "attention-log": Known("attention, log", _attention("log")),
}
"""Explainers by name: their titles, the epochs of a search, and whether the seed has a say."""


@typed
def edge_explainer(
    name: str, model: nn.Module, data: Any, *, seed: int = 0, epochs: int | None = None
) -> EdgeExplainer:
    """Return an explainer of a model's nodes by its name, behind one call for all of them.

        random                  scores drawn anew at every call
        gnn-explainer           a mask found by gradients, node by node (Ying et al., 2019)
        pg-explainer            a network that was taught to give masks, on `data` (Luo et al., 2020)
        graph-mask              gates on the messages of every head (Schlichtkrull et al., 2021)
        saliency                gradient of the class with respect to the mask (Captum)
        integrated-gradients    its mean on the way from no edges to all (Captum)
        pyg-attention           PyG's `AttentionExplainer`, the largest over heads and layers
        propagated-attention    attention along paths, see `PropagatedAttention`
        attention-mean          attention, mean over heads and layers
        attention-log           the same with the heads' geometric mean, see `FaithfulAttention`

    The masks of PyG and Captum are found on a copy of the model. Nodes are searched on their receptive
    fields, where the model's output is the same. What is random in a search is drawn from the seed, and from
    the same one for every node and graph: two explanations differ by what changed between the graphs.

    Args:
        name: one of the above.
        model: a node classifier with attention, fgai's or one of PyG layers; left as it was.
        data: a `Graph` or PyG `Data`: the clean graph.
        seed: of searches and draws.
        epochs: of a search, or steps of the integral; None for 100, 20, 10 and 50 in this order, and without
            meaning for explainers that do not search.

    Returns:
        An explainer; called with a graph and nodes, it returns one `EdgeScores` for each.

    Raises:
        MissingExtraError: Captum is not installed.
        InputError: an unknown name, no task of nodes, or an explainer that does not run on the model.
        AttentionError: the model has no attention that can be recorded.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train(fgai.GAT.for_data(data), data, epochs=3, progress=False)
        >>> (found,) = edge_explainer("saliency", model, data)(data, [24])
        >>> found.node, found.on(data.keys[data.adjacency.destination == 24]).shape[0]
        (24, 8)
    """
    known = EDGE_EXPLAINERS[checks.one_of(name, "name", tuple(EDGE_EXPLAINERS))]
    checks.seed(seed)
    if epochs is not None:
        checks.whole(epochs, "epochs", 1, 100_000)
    known.check()
    graph = as_graph(data)
    if not task_of(graph).row_per_node:
        raise InputError("`data` must be one graph whose nodes are classified; explain links by their ends")
    seen = observe(model, prepared(model, graph), heads="mean")
    hops = hops_of(model, len(seen.attention))
    return known.make(Order(model, graph, hops, seed, known.epochs if epochs is None else epochs))
