"""`edge_explainer`: explainers by name behind one call: attention, random scores, PyG's own explainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.explain import (
    AttentionExplainer,
    CaptumExplainer,
    Explainer,
    ExplainerAlgorithm,
    GNNExplainer,
    GraphMaskExplainer,
    PGExplainer,
)

from fgai import checks
from fgai.alone import seeded, with_gradients
from fgai.attention import call_model, duplicate, evaluating, observe, prepared
from fgai.errors import FgaiError, InputError, extra
from fgai.explanations.as_pyg import _as_pyg
from fgai.explanations.contributions import SignedMargins
from fgai.explanations.pyg import _along_paths, _on_edges
from fgai.explanations.scores import EdgeExplainer, EdgeScores, _Field, _Fields
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.sparse import edge_keys
from fgai.tasks import task_of
from fgai.typed import typed

FITTED_ON = 30  # training nodes that PGExplainer learns from
_CONFIG = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
_TOLERANCE = 1e-3  # relative and absolute, between logits of the whole graph and of a receptive field


class _Order(NamedTuple):
    """The arguments of an explainer; `hops` counts the layers that pass messages."""

    model: nn.Module
    graph: Graph
    hops: int
    seed: int
    epochs: int


class _RandomScores(EdgeExplainer):
    """Draws new scores at every call: the baseline of an explanation without information."""

    def __init__(self, order: _Order) -> None:
        super().__init__(order.model, order.seed)
        self.hops, self.generator = order.hops, torch.Generator().manual_seed(order.seed)

    def explain(self, graph: Graph, nodes: list[int]) -> list[EdgeScores]:
        fields = _Fields(graph, self.hops)
        scores = []
        for node in nodes:
            keys = fields.keys[fields.edges(node)]
            drawn = torch.rand(keys.numel(), generator=self.generator, dtype=torch.float64)
            scores.append(EdgeScores(node, keys, drawn.to(keys.device)))
        return scores


class _AttentionScores(EdgeExplainer):
    """The model's attention, reduced as `FaithfulAttention` or, with `paths`, `PropagatedAttention` does."""

    def __init__(self, order: _Order, heads: str, *, paths: bool = False) -> None:
        super().__init__(order.model)
        self.heads, self.paths = heads, paths

    def explain(self, graph: Graph, nodes: list[int]) -> list[EdgeScores]:
        attention = observe(self.model, graph).attention.detach()
        fields = _Fields(graph, _hops_of(self.model, len(attention)))
        shown = _on_edges(attention, fields.keys, "mean", self.heads)
        scores = []
        for node in nodes:
            used = fields.edges(node)
            values = shown[used]
            if self.paths:
                ends = values.new_zeros(graph.num_nodes)
                ends[node] = 1.0
                values = _along_paths(attention, ends, fields.keys[used], self.heads)
            scores.append(EdgeScores(node, fields.keys[used], values))
        return scores


class _SignedScores(EdgeExplainer):
    """Signed contributions of the edges into a node, see `SignedMargin`; 0 on the rest of its field."""

    def __init__(self, order: _Order) -> None:
        super().__init__(order.model)
        self.hops = order.hops

    @with_gradients
    def explain(self, graph: Graph, nodes: list[int]) -> list[EdgeScores]:
        margins, fields = (
            SignedMargins(self.model, observe(self.model, graph, inputs=True)),
            _Fields(graph, self.hops),
        )
        if margins.reason is not None:
            raise InputError(f"`model` has no signed contributions: {margins.reason}")
        scores = []
        for node in nodes:
            keys, signed = fields.keys[fields.edges(node)], margins.of(node)
            into = edge_keys(signed.sources, torch.full_like(signed.sources, node)).to(keys.device)
            values = torch.zeros(keys.numel(), dtype=torch.float64, device=keys.device)
            there = torch.isin(into, keys)
            values[torch.searchsorted(keys, into[there])] = signed.parts.to(keys.device)[there]
            scores.append(EdgeScores(node, keys, values))
        return scores


def _hops_of(model: nn.Module, attentions: int) -> int:
    """Return how many layers pass messages, given the number of those with recorded attention."""
    return max(attentions, int(ExplainerAlgorithm._num_hops(model)))


class _SearchedScores(EdgeExplainer):
    """One of PyG's explainers, node by node from the same seed, on receptive fields and a model copy."""

    def __init__(
        self, order: _Order, make: Callable[[int, int], ExplainerAlgorithm], *, split_heads: bool = False
    ) -> None:
        super().__init__(order.model, order.seed)
        self.hops, self.epochs, self.make, self.name = order.hops, order.epochs, make, "PyG's explainer"
        self.called = _as_pyg(order.model, split_heads=split_heads)
        self.layers = ExplainerAlgorithm._num_hops(self.called) if split_heads else order.hops

    @with_gradients
    def explain(self, graph: Graph, nodes: list[int]) -> list[EdgeScores]:
        predictions = _Predictions(self, graph)
        return [EdgeScores(node, *self._scores(predictions, node)) for node in nodes]

    def explainer(self, explanation_type: str = "model") -> Explainer:
        """Return a new explainer on a new copy of the model: some leave hooks and masks in it."""
        algorithm = self.make(self.layers, self.epochs)
        self.name = type(algorithm).__name__
        options = {"edge_mask_type": "object", "model_config": _CONFIG}
        return Explainer(duplicate(self.called), algorithm, explanation_type=explanation_type, **options)

    def search(self, field: _Field, target: Tensor) -> Tensor:
        """Return the mask [K] of a field with at least one edge; `target` [n] holds the predicted class."""
        mask: Tensor = self.explainer()(field.x, field.edge_index, index=field.index).edge_mask
        return mask

    def _scores(self, predictions: _Predictions, node: int) -> tuple[Tensor, Tensor]:
        with _running(self), seeded(self.seed, predictions.logits.device):
            field, target = predictions.field(node)
            if not bool(field.reached.any()):
                return field.keys[:0], field.x.new_zeros(0)
            return field.keys[field.reached], self.search(field, target).detach()[field.reached]


class _FittedScores(_SearchedScores):
    """PGExplainer: learns on the graph it is made with, and explains any other with the learned network."""

    def __init__(self, order: _Order) -> None:
        super().__init__(order, lambda layers, epochs: PGExplainer(epochs=epochs))
        with seeded(order.seed, order.graph.device), _running(self):
            self.fitted = self._fit(prepared(order.model, order.graph))

    def search(self, field: _Field, target: Tensor) -> Tensor:
        """Return the mask of the trained network, without a search."""
        mask: Tensor = self.fitted(field.x, field.edge_index, target=target, index=field.index).edge_mask
        return mask

    @with_gradients
    def _fit(self, graph: Graph) -> Explainer:
        explainer, predictions = self.explainer("phenomenon"), _Predictions(self, graph)
        among = graph.train_mask.nonzero().flatten() if graph.train_mask is not None else None
        among = torch.arange(graph.num_nodes) if among is None else among.cpu()
        chosen = among[torch.randperm(among.numel())[:FITTED_ON]].tolist()
        fields = [pair for pair in map(predictions.field, chosen) if bool(pair[0].reached.any())]
        for epoch in range(self.epochs):
            for field, target in fields:
                explainer.algorithm.train(
                    epoch, explainer.model, field.x, field.edge_index, target=target, index=field.index
                )
        return explainer


class _Predictions:
    """The predictions of an explainer's model on a graph, and the receptive fields that give the same."""

    def __init__(self, explainer: _SearchedScores, graph: Graph) -> None:
        self.called, self.fields = explainer.called, _Fields(graph, explainer.hops)
        with evaluating(explainer.model), torch.no_grad():
            self.logits = call_model(explainer.model, graph).detach()

    def field(self, node: int) -> tuple[_Field, Tensor]:
        """The field of a node (the whole graph if its output differs there), and [n] the class to explain."""
        for field in (self.fields.around(node), self.fields.whole(node)):
            with evaluating(self.called), torch.no_grad():
                again = self.called(field.x, field.edge_index)[field.index]
            if torch.allclose(again, self.logits[node], rtol=_TOLERANCE, atol=_TOLERANCE):
                return field, self.logits[node].argmax().expand(field.x.shape[0])
        raise InputError(
            "`model` returns other logits if called as `model(x, edge_index)`, as PyG's explainers do; use"
            " an explainer that reads attention"
        )


@contextmanager
def _running(explainer: _SearchedScores) -> Iterator[None]:
    """Turn errors of PyG and Captum into `InputError`s that name the explainer and the model."""
    try:
        yield
    except FgaiError:
        raise
    except Exception as error:
        kind = type(explainer.model).__name__
        raise InputError(f"{explainer.name} does not run on this {kind}: {error}") from error


@dataclass(frozen=True)
class _Entry:
    title: str
    make: Callable[[_Order], EdgeExplainer]
    epochs: int = 0  # of its search by default; 0 if it does not search
    draws: bool = False  # whether the seed changes the result
    needs: str = ""  # an optional package

    def check(self) -> None:
        if self.needs:
            extra(self.needs)


def _searched(make: Callable[[int, int], ExplainerAlgorithm], **options: Any) -> partial[_SearchedScores]:
    return partial(_SearchedScores, make=make, **options)


EDGE_EXPLAINERS: dict[str, _Entry] = {
    "random": _Entry("random", _RandomScores, draws=True),
    "gnn-explainer": _Entry("GNNExplainer", _searched(lambda n, epochs: GNNExplainer(epochs)), 100, True),
    "pg-explainer": _Entry("PGExplainer", _FittedScores, 20, True),
    "graph-mask": _Entry(
        "GraphMask",
        _searched(lambda n, epochs: GraphMaskExplainer(n, epochs, log=False), split_heads=True),
        10,
        True,
    ),
    "saliency": _Entry("saliency", _searched(lambda n, epochs: CaptumExplainer("Saliency")), needs="captum"),
    "integrated-gradients": _Entry(
        "integrated gradients",
        _searched(lambda n, epochs: CaptumExplainer("IntegratedGradients", n_steps=epochs)),
        50,
        needs="captum",
    ),
    "pyg-attention": _Entry("PyG's AttentionExplainer", _searched(lambda n, epochs: AttentionExplainer())),
    "propagated-attention": _Entry(
        "attention along paths", partial(_AttentionScores, heads="mean", paths=True)
    ),
    "attention-mean": _Entry("attention, mean", partial(_AttentionScores, heads="mean")),
    "attention-log": _Entry("attention, log", partial(_AttentionScores, heads="log")),
    "signed-contributions": _Entry("signed contributions", _SignedScores),
}
"""Explainers by name: their titles, the epochs of a search, and whether the seed changes the result."""


@typed
def edge_explainer(
    name: str, model: nn.Module, data: Any, *, seed: int = 0, epochs: int | None = None
) -> EdgeExplainer:
    """Return an explainer of a model's nodes by its name, behind one call for all of them.

        random                  scores drawn anew at every call
        gnn-explainer           a mask found by gradients, node by node (Ying et al., 2019)
        pg-explainer            a network trained to give masks, on `data` (Luo et al., 2020)
        graph-mask              gates on the messages of every head (Schlichtkrull et al., 2021)
        saliency                gradient of the class with respect to the mask (Captum)
        integrated-gradients    its mean on the way from no edges to all (Captum)
        pyg-attention           PyG's `AttentionExplainer`, the largest over heads and layers
        propagated-attention    attention along paths, see `PropagatedAttention`
        attention-mean          attention, mean over heads and layers
        attention-log           the same with the heads' geometric mean, see `FaithfulAttention`
        signed-contributions    w · (z_top − z_second), the supporting neighbours first, see `fgai.explain`

    Masks of PyG and Captum are found on a copy of the model and on receptive fields, where its output is the
    same. Every search starts from the same seed, so that explanations of two graphs differ only because the
    graphs do. The explainer, called with a graph and nodes, returns one `EdgeScores` for each.

    Args:
        name: one of the above.
        model: a node classifier with attention, fgai's or one of PyG layers; left as it was.
        data: a `Graph` or PyG `Data`: the clean graph.
        seed: of searches and draws.
        epochs: of a search, or steps of the integral; by default 100, 20, 10 and 50 in this order.

    Raises:
        MissingExtraError: Captum is not installed.
        InputError: an unknown name, no task of nodes, or an explainer that does not run on the model.
        AttentionError: the model has no attention that can be recorded.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train(fgai.GAT.for_data(data), data, epochs=3, progress=False)
        >>> (scores,) = edge_explainer("saliency", model, data)(data, [24])
        >>> scores.node, scores.on(data.keys[data.adjacency.destination == 24]).shape[0]
        (24, 8)
    """
    entry = EDGE_EXPLAINERS[checks.one_of(name, "name", tuple(EDGE_EXPLAINERS))]
    checks.seed(seed)
    if epochs is not None:
        checks.whole(epochs, "epochs", 1, 100_000)
    entry.check()
    graph = as_graph(data)
    if not task_of(graph).row_per_node:
        raise InputError("`data` must be one graph whose nodes are classified; explain links by their ends")
    observation = observe(model, prepared(model, graph), heads="mean")
    hops = _hops_of(model, len(observation.attention))
    return entry.make(_Order(model, graph, hops, seed, entry.epochs if epochs is None else epochs))
