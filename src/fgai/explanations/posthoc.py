"""`edge_explainer`: explainers by name behind one call: attention, random scores, PyG's own explainers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric import explain as pyg

from fgai import checks
from fgai.attention import call_model, duplicate, evaluating, observe, prepared
from fgai.errors import FgaiError, InputError, extra
from fgai.explanations.attention_explainers import _along_paths, _on_edges
from fgai.explanations.contributions import SignedMargins
from fgai.explanations.pyg_models import _pyg_model
from fgai.graph import Graph
from fgai.models import as_graph
from fgai.sparse import edge_keys, edge_name
from fgai.tasks import task_of
from fgai.threads import seeded, with_gradients
from fgai.typed import typed

TRAINING_NODES = 30  # number of nodes that PGExplainer learns from
_CONFIG = {"mode": "multiclass_classification", "task_level": "node", "return_type": "raw"}
_TOLERANCE = 1e-3  # relative and absolute, between logits of the whole graph and of a receptive field


@dataclass(frozen=True, eq=False)
class _ReceptiveField:
    """The receptive field of a node as a graph, without self-loops."""

    x: Tensor  # [n, F], features of its nodes
    edge_index: Tensor  # [2, K], between positions in `x`
    keys: Tensor  # [K] of the same edges in the whole graph, sorted
    reached: Tensor  # bool [K]; False for edges outside, when `x` is the whole graph
    index: int  # position of the node in `x`


class _ReceptiveFields:
    """The receptive fields of a graph's nodes through `hops` layers that pass messages."""

    def __init__(self, graph: Graph, hops: int) -> None:
        if graph.features is None:
            raise InputError(f"{graph.name!r} has no node features; add some, e.g. node degrees")
        kept = graph.adjacency.source != graph.adjacency.destination
        self.edge_index = graph.edge_index[:, kept]
        self.keys, self.x, self.hops = graph.adjacency.keys[kept], graph.features.to_dense(), hops

    def edges(self, node: int) -> Tensor:
        """Bool [E]: True for the edges of a node's field, into nodes at most `hops - 1` steps away."""
        reached = torch.zeros(self.x.shape[0], dtype=torch.bool, device=self.x.device)
        reached[node] = True
        source, destination = self.edge_index
        for _ in range(self.hops):
            used = reached[destination]
            reached[source[used]] = True
        return used

    def around(self, node: int) -> _ReceptiveField:
        """The field of a node as a graph of its own, on which its output is the same."""
        used = self.edges(node)
        ends = self.edge_index[:, used].flatten()
        nodes, index = torch.unique(torch.cat([ends, ends.new_tensor([node])]), return_inverse=True)
        return _ReceptiveField(
            self.x[nodes], index[:-1].view(2, -1), self.keys[used], used[used], int(index[-1])
        )

    def whole(self, node: int) -> _ReceptiveField:
        """The whole graph, for models whose outputs depend on more than the messages in the field."""
        return _ReceptiveField(self.x, self.edge_index, self.keys, self.edges(node), node)


@dataclass(frozen=True, eq=False)
class EdgeScores:
    """The scores of one node: one for every edge of its receptive field, without self-loops.

    The `keys` [K] are sorted, see `fgai.sparse.edge_keys`. The `values` [K] are larger for edges that matter
    more; only their order within a node is comparable.

    Example:
        >>> from fgai.sparse import edge_keys
        >>> keys = edge_keys(torch.tensor([0, 3]), torch.tensor([2, 2]))
        >>> EdgeScores(2, keys, torch.tensor([0.5, 0.75])).on(keys[1:]).tolist()
        [0.75]
    """

    node: int
    keys: Tensor
    values: Tensor

    def on(self, keys: Tensor) -> Tensor:
        """Return the scores of edges [E] by their keys; `InputError` for one that is not in the field."""
        if keys.dtype != torch.int64 or keys.dim() != 1:
            raise InputError(f"`keys` must hold int64 keys of edges, got {keys.dtype} {tuple(keys.shape)}")
        present = torch.isin(keys, self.keys)
        if not bool(present.all()):
            missing = edge_name(int(keys[~present][0]))
            raise InputError(f"edge {missing} is not in the receptive field of node {self.node}")
        return self.values[torch.searchsorted(self.keys, keys)]


@typed
class EdgeExplainer(ABC):
    """One explainer of one model, called with a graph and nodes; a subclass defines `explain`."""

    def __init__(self, model: nn.Module, seed: int = 0) -> None:
        self.model, self.seed = model, checks.seed(seed)

    def __call__(self, data: Any, nodes: Sequence[int] | Tensor) -> list[EdgeScores]:
        """Return the scores of nodes of a `Graph` or PyG `Data`, in order; `InputError` for unknown ones."""
        graph = prepared(self.model, as_graph(data))
        try:
            numbers = torch.as_tensor(nodes)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(f"`nodes` must hold the numbers of nodes, got {nodes!r:.100}") from error
        if numbers.dim() != 1 or numbers.dtype == torch.bool:
            raise InputError("`nodes` must hold the numbers of nodes in one dimension")
        if numbers.numel():
            numbers = checks.positions(numbers, graph.num_nodes, "nodes")
        return self.explain(graph, numbers.tolist())

    @abstractmethod
    def explain(self, graph: Graph, nodes: list[int]) -> list[EdgeScores]:
        """Return the scores of nodes of a graph that is prepared for the model."""


class _Setup(NamedTuple):
    """The arguments of an explainer; `hops` counts the layers that pass messages."""

    model: nn.Module
    graph: Graph
    hops: int
    seed: int
    epochs: int


_Score = Callable[[int, Tensor], Tensor]  # from a node and the edges of its field, bool [E], to scores [K]


class _FieldScores(EdgeExplainer):
    """Scores edges by a function that is made once for a graph, from the graph and its receptive fields."""

    def __init__(
        self, setup: _Setup, make_score: Callable[[_FieldScores, Graph, _ReceptiveFields], _Score]
    ) -> None:
        super().__init__(setup.model, setup.seed)
        self.hops, self.make_score = setup.hops, make_score
        self.generator = torch.Generator().manual_seed(setup.seed)

    @with_gradients
    def explain(self, graph: Graph, nodes: list[int]) -> list[EdgeScores]:
        fields = _ReceptiveFields(graph, self.hops)
        score, scores = self.make_score(self, graph, fields), list[EdgeScores]()
        for node in nodes:
            edges = fields.edges(node)
            scores.append(EdgeScores(node, fields.keys[edges], score(node, edges)))
        return scores


def _random(explainer: _FieldScores, graph: Graph, fields: _ReceptiveFields) -> _Score:
    """New scores at every call: the baseline of an explanation without information."""

    def score(node: int, edges: Tensor) -> Tensor:
        count = int(edges.sum())
        return torch.rand(count, generator=explainer.generator, dtype=torch.float64).to(edges.device)

    return score


def _attention(explainer: _FieldScores, graph: Graph, fields: _ReceptiveFields, heads: str) -> _Score:
    scores = _on_edges(observe(explainer.model, graph).attention.detach(), fields.keys, "mean", heads)
    return lambda node, edges: scores[edges]


def _paths(explainer: _FieldScores, graph: Graph, fields: _ReceptiveFields) -> _Score:
    attention = observe(explainer.model, graph).attention.detach()

    def score(node: int, edges: Tensor) -> Tensor:
        ends = attention.last.values.new_zeros(graph.num_nodes)
        ends[node] = 1.0
        return _along_paths(attention, ends, fields.keys[edges])

    return score


def _signed(explainer: _FieldScores, graph: Graph, fields: _ReceptiveFields) -> _Score:
    """Signed contributions of the edges into a node, see `SignedMargin`; 0 on the rest of its field."""
    margins = SignedMargins(explainer.model, observe(explainer.model, graph, inputs=True))
    if margins.reason is not None:
        raise InputError(f"`model` has no signed contributions: {margins.reason}")

    def score(node: int, edges: Tensor) -> Tensor:
        keys, signed = fields.keys[edges], margins.of(node)
        into = edge_keys(signed.sources, torch.full_like(signed.sources, node)).to(keys.device)
        scores = torch.zeros(keys.numel(), dtype=torch.float64, device=keys.device)
        present = torch.isin(into, keys)
        scores[torch.searchsorted(keys, into[present])] = signed.contributions.to(keys.device)[present]
        return scores

    return score


class _PyGScores(EdgeExplainer):
    """One of PyG's explainers, node by node from one seed; with `trains` it learns once, on its graph."""

    def __init__(
        self,
        setup: _Setup,
        make: Callable[[int, int], pyg.ExplainerAlgorithm],
        *,
        split_heads: bool = False,
        trains: bool = False,
    ) -> None:
        super().__init__(setup.model, setup.seed)
        self.hops, self.epochs, self.make, self.name = setup.hops, setup.epochs, make, "PyG's explainer"
        self.copy = _pyg_model(setup.model, split_heads=split_heads)
        self.layers = pyg.ExplainerAlgorithm._num_hops(self.copy) if split_heads else setup.hops
        self.trained: pyg.Explainer | None = None
        if trains:
            with seeded(setup.seed, setup.graph.device), _pyg_errors(self):
                self.trained = self._train(prepared(setup.model, setup.graph))

    @with_gradients
    def explain(self, graph: Graph, nodes: list[int]) -> list[EdgeScores]:
        field_of, scores = self.fields(graph), list[EdgeScores]()
        for node in nodes:
            with _pyg_errors(self), seeded(self.seed, graph.device):
                field, target = field_of(node)
                mask = field.x.new_zeros(len(field.keys))
                if bool(field.reached.any()):
                    call = {"index": field.index} | ({} if self.trained is None else {"target": target})
                    explanation = (self.trained or self.explainer())(field.x, field.edge_index, **call)
                    mask = explanation.edge_mask.detach()
                scores.append(EdgeScores(node, field.keys[field.reached], mask[field.reached]))
        return scores

    def explainer(self, explanation_type: str = "model") -> pyg.Explainer:
        """Return a new explainer on a new copy of the model: some leave hooks and masks in it."""
        algorithm = self.make(self.layers, self.epochs)
        self.name = type(algorithm).__name__
        options = {"edge_mask_type": "object", "model_config": _CONFIG}
        return pyg.Explainer(duplicate(self.copy), algorithm, explanation_type=explanation_type, **options)

    def fields(self, graph: Graph) -> Callable[[int], tuple[_ReceptiveField, Tensor]]:
        """Return node → (its field, or the whole graph if the output differs there; class [n])."""
        fields = _ReceptiveFields(graph, self.hops)
        with evaluating(self.model), torch.no_grad():
            logits = call_model(self.model, graph).detach()

        def field_of(node: int) -> tuple[_ReceptiveField, Tensor]:
            for field in (fields.around(node), fields.whole(node)):
                with evaluating(self.copy), torch.no_grad():
                    again = self.copy(field.x, field.edge_index)[field.index]
                if torch.allclose(again, logits[node], rtol=_TOLERANCE, atol=_TOLERANCE):
                    return field, logits[node].argmax().expand(field.x.shape[0])
            raise InputError(
                "`model(x, edge_index)` returns other logits than on the graph; use attention explainers"
            )

        return field_of

    @with_gradients
    def _train(self, graph: Graph) -> pyg.Explainer:
        explainer, field_of = self.explainer("phenomenon"), self.fields(graph)
        among = torch.arange(graph.num_nodes) if graph.train_mask is None else graph.train_mask.nonzero()
        nodes = among.flatten().cpu()[torch.randperm(among.numel())[:TRAINING_NODES]].tolist()
        fields = [pair for pair in map(field_of, nodes) if bool(pair[0].reached.any())]
        for epoch in range(self.epochs):
            for field, target in fields:
                explainer.algorithm.train(
                    epoch, explainer.model, field.x, field.edge_index, target=target, index=field.index
                )
        return explainer


@contextmanager
def _pyg_errors(explainer: _PyGScores) -> Iterator[None]:
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
    make: Callable[[_Setup], EdgeExplainer]
    epochs: int = 0  # default for `epochs`; 0 for explainers without a search
    draws: bool = False  # whether the seed changes the result
    needs: str = ""  # name of an optional package, or empty

    def check(self) -> None:
        """Raise unless the optional package is installed."""
        if self.needs:
            extra(self.needs)


def _by_pyg(make: Callable[[int, int], pyg.ExplainerAlgorithm], **options: Any) -> partial[_PyGScores]:
    return partial(_PyGScores, make=make, **options)


def _by_score(make_score: Callable[..., _Score], **options: str) -> partial[_FieldScores]:
    return partial(_FieldScores, make_score=partial(make_score, **options))


_gnn = _by_pyg(lambda layers, epochs: pyg.GNNExplainer(epochs))
_pg = _by_pyg(lambda layers, epochs: pyg.PGExplainer(epochs=epochs), trains=True)
_mask = _by_pyg(lambda layers, epochs: pyg.GraphMaskExplainer(layers, epochs, log=False), split_heads=True)
_saliency = _by_pyg(lambda layers, epochs: pyg.CaptumExplainer("Saliency"))
_integrated = _by_pyg(lambda layers, epochs: pyg.CaptumExplainer("IntegratedGradients", n_steps=epochs))
_pyg_attention = _by_pyg(lambda layers, epochs: pyg.AttentionExplainer())

EDGE_EXPLAINERS: dict[str, _Entry] = {
    "random": _Entry("random", _by_score(_random), draws=True),
    "gnn-explainer": _Entry("GNNExplainer", _gnn, 100, draws=True),
    "pg-explainer": _Entry("PGExplainer", _pg, 20, draws=True),
    "graph-mask": _Entry("GraphMask", _mask, 10, draws=True),
    "saliency": _Entry("saliency", _saliency, needs="captum"),
    "integrated-gradients": _Entry("integrated gradients", _integrated, 50, needs="captum"),
    "pyg-attention": _Entry("PyG's AttentionExplainer", _pyg_attention),
    "propagated-attention": _Entry("attention along paths", _by_score(_paths)),
    "attention-mean": _Entry("attention, mean", _by_score(_attention, heads="mean")),
    "attention-log": _Entry("attention, log", _by_score(_attention, heads="log")),
    "signed-contributions": _Entry("signed contributions", _by_score(_signed)),
}
"""Explainers by name: their titles, the epochs of a search, and whether the seed changes the result."""


@typed
def edge_explainer(
    name: str, model: nn.Module, data: Any, *, seed: int = 0, epochs: int | None = None
) -> EdgeExplainer:
    """Return an explainer of a model's nodes by its name, behind one call for all of them.

        random                  scores drawn anew at every call
        gnn-explainer           a mask found by gradients, node by node, in 100 epochs (Ying et al., 2019)
        pg-explainer            a network trained on `data` for 20 epochs to give masks (Luo et al., 2020)
        graph-mask              gates on the messages of every head, in 10 epochs (Schlichtkrull et al., 2021)
        saliency                gradient of the class with respect to the mask (Captum)
        integrated-gradients    mean of that gradient over 50 masks from no edges to all (Captum)
        pyg-attention           PyG's `AttentionExplainer`, the largest over heads and layers
        propagated-attention    attention along paths, see `PropagatedAttention`
        attention-mean          attention, mean over heads and layers
        attention-log           the same with the heads' geometric mean, see `FaithfulAttention`
        signed-contributions    w · (z_top − z_second), the supporting neighbours first, see `fgai.explain`

    Masks of PyG and Captum are found on a copy of the model and on the receptive field of each node, if the
    model's output is the same there, else on the whole graph. Every search starts from the same seed, so that
    explanations of two graphs differ only because the graphs do. `epochs` replaces the numbers above. The
    `model` is a node classifier, left as it was; PGExplainer learns from `data`, others are only checked on
    it. The explainer, called with a graph, perhaps another one, and nodes, returns one `EdgeScores` for each.

    Raises:
        MissingExtraError: Captum is not installed.
        InputError: an unknown name, data for links or graphs, or an explainer that does not run on the model.
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
        raise InputError(
            "`data` must be a graph whose nodes are classified; of a link, `fgai.explain` each end"
        )
    observation = observe(model, prepared(model, graph), heads="mean")
    hops = max(len(observation.attention), int(pyg.ExplainerAlgorithm._num_hops(model)))
    return entry.make(_Setup(model, graph, hops, seed, entry.epochs if epochs is None else epochs))
