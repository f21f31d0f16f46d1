"""`SearchedScores`: PyG's own explainers, which search node by node, behind the call of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch_geometric.explain import Explainer, ExplainerAlgorithm

from fgai.alone import seeded, with_gradients
from fgai.attention import call_model, duplicate, evaluating, prepared
from fgai.errors import FgaiError, InputError
from fgai.explanations.convs import GATConvs, can_be_told
from fgai.explanations.field import Field, Fields
from fgai.explanations.pyg import AsPyG
from fgai.explanations.scores import EdgeExplainer, EdgeScores
from fgai.graph import Graph
from fgai.models import AttentionModel

CONFIG = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
FITTED_ON = 30
"""Training nodes that an explainer learns from, where it learns."""
TOLERANCE = 1e-3
"""Relative and absolute, between logits of the whole graph and of a receptive field."""

Make = Callable[[int], ExplainerAlgorithm]
"""From the number of layers that pass messages to the algorithm."""


class SearchedScores(EdgeExplainer):
    """One of PyG's explainers, node by node, each on its receptive field and on a model of its own.

    The model's output for a node is the same on its field as on the whole graph, which is tried; where it is
    another one, the whole graph is searched. Every search starts from the same seed, on whatever graph.

    Args:
        model: to explain; left as it is.
        hops: layers that pass messages.
        seed: of the searches.
        make: the algorithm.
        split_heads: see `GATConvs`.
    """

    def __init__(
        self, model: nn.Module, hops: int, seed: int, *, make: Make, split_heads: bool = False
    ) -> None:
        super().__init__(model, seed)
        self.hops, self.make, self.name = hops, make, "PyG's explainer"
        self.called = as_pyg(model, split_heads=split_heads)
        self.layers = ExplainerAlgorithm._num_hops(self.called) if split_heads else hops

    @with_gradients
    def explain(self, graph: Graph, nodes: list[int]) -> list[EdgeScores]:
        """Search node by node."""
        view = _View(self, graph)
        return [EdgeScores(node, *self._scores(view, node)) for node in nodes]

    def explainer(self, explanation_type: str = "model") -> Explainer:
        """A new explainer on a new copy of the model: some leave traces in it."""
        algorithm = self.make(self.layers)
        self.name = type(algorithm).__name__
        return Explainer(
            duplicate(self.called),
            algorithm,
            explanation_type=explanation_type,
            edge_mask_type="object",
            model_config=CONFIG,
        )

    def search(self, field: Field, target: Tensor) -> Tensor:
        """Return the mask [K] of a field.

        Args:
            field: with at least one edge.
            target: [n] classes; the predicted one at the node.
        """
        mask: Tensor = self.explainer()(field.x, field.edge_index, index=field.index).edge_mask
        return mask

    def _scores(self, view: _View, node: int) -> tuple[Tensor, Tensor]:
        with running(self), seeded(self.seed, view.logits.device):
            field, target = view.field(node)
            if not bool(field.heard.any()):
                return field.keys[:0], field.x.new_zeros(0)
            return field.keys[field.heard], self.search(field, target).detach()[field.heard]


class FittedScores(SearchedScores):
    """PGExplainer: learns on the graph it is made with, and explains any other with what it learnt.

    Args:
        model: to explain; left as it is.
        hops: layers that pass messages.
        seed: of the nodes it learns from, of its weights and its draws.
        make: the algorithm.
        graph: to learn on, as given.
        epochs: of the learning.
    """

    def __init__(
        self, model: nn.Module, hops: int, seed: int, *, make: Make, graph: Graph, epochs: int
    ) -> None:
        super().__init__(model, hops, seed, make=make)
        with seeded(seed, graph.device), running(self):
            self.fitted = self._fit(prepared(model, graph), epochs)

    def search(self, field: Field, target: Tensor) -> Tensor:
        """Return what the trained network says, without a search."""
        mask: Tensor = self.fitted(field.x, field.edge_index, target=target, index=field.index).edge_mask
        return mask

    @with_gradients
    def _fit(self, graph: Graph, epochs: int) -> Explainer:
        made, view = self.explainer("phenomenon"), _View(self, graph)
        among = graph.train_mask.nonzero().flatten() if graph.train_mask is not None else None
        among = torch.arange(graph.num_nodes) if among is None else among.cpu()
        chosen = among[torch.randperm(among.numel())[:FITTED_ON]].tolist()
        fields = [found for found in map(view.field, chosen) if bool(found[0].heard.any())]
        for epoch in range(epochs):
            for field, target in fields:
                made.algorithm.train(
                    epoch, made.model, field.x, field.edge_index, target=target, index=field.index
                )
        return made


class _View:
    """A graph as an explainer reads it: predictions, and the receptive fields on which they are the same.

    Args:
        explainer: whose model is asked.
        graph: prepared for the model.
    """

    def __init__(self, explainer: SearchedScores, graph: Graph) -> None:
        self.called, self.fields = explainer.called, Fields(graph, explainer.hops)
        with evaluating(explainer.model), torch.no_grad():
            self.logits = call_model(explainer.model, graph).detach()

    def field(self, node: int) -> tuple[Field, Tensor]:
        """The field of a node, and [n] the class to explain.

        Raises:
            InputError: the model's output is another one on the field, and also on the whole graph.
        """
        for field in (self.fields.around(node), self.fields.whole(node)):
            with evaluating(self.called), torch.no_grad():
                again = self.called(field.x, field.edge_index)[field.index]
            if torch.allclose(again, self.logits[node], rtol=TOLERANCE, atol=TOLERANCE):
                return field, self.logits[node].argmax().expand(field.x.shape[0])
        raise InputError(
            "`model` gives other logits when it is called as `model(x, edge_index)`: it reads more of the"
            " graph than PyG's explainers hand on; use one of the explainers that read attention"
        )


@contextmanager
def running(explainer: SearchedScores) -> Iterator[None]:
    """Say which explainer does not run on a model, and why.

    Raises:
        InputError: whatever PyG or Captum raised, in its words.
    """
    try:
        yield
    except FgaiError:
        raise
    except Exception as error:
        kind = type(explainer.model).__name__
        raise InputError(f"{explainer.name} does not run on this {kind}: {error}") from error


def as_pyg(model: nn.Module, *, split_heads: bool = False) -> nn.Module:
    """A model as PyG calls them, made of PyG's own layers where that can be."""
    if can_be_told(model):
        return GATConvs(model, split_heads=split_heads)
    return AsPyG(model) if isinstance(model, AttentionModel) else duplicate(model).eval()
