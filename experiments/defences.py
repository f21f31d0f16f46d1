"""GNNGuard, GNN-SVD, Pro-GNN, Soft-Median and RUNG: defences that are part of the forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from experiments.low_rank import once_for_edges, reconstruct
from fgai import Graph
from fgai.attention import TappedLayer, call_model
from fgai.checks import at_least, memory, one_of, whole
from fgai.errors import InputError
from fgai.models import MODELS, AttentionModel, Capabilities, GCNLayer, as_graph
from fgai.ops import aggregate, row_sum, score_dot, weighted_softmax
from fgai.sparse import Adjacency, Features, match_edges
from fgai.training import VanillaRecipe


def edge_cosine(x: Tensor | Features, adjacency: Adjacency) -> Tensor:
    """Cosine of the rows of `x` [N, D] at both ends of every edge → [E]; 0 beside a row of zeros."""
    dense = x.to_dense() if isinstance(x, Features) else x
    unit = normalize(dense, dim=1, eps=1e-6)[:, None].contiguous()
    scale: float = dense.shape[1] ** 0.5
    return score_dot(unit, unit, adjacency).squeeze(1) * scale


class Defended(AttentionModel):
    """Base of the defences: a model whose edges are re-weighted before, or while, it reads the graph.

    The defence is part of the forward pass, done again on every graph the model is given, so whoever attacks
    the model attacks the defence. Weights enter GCN as edge weights, attention as log-weights on the score.

    Args:
        in_channels: features per node.
        out_channels: classes.
        base: name of the model behind, see `fgai.models.MODELS`.
        **arguments: of that model.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    own: ClassVar[tuple[str, ...]] = ()
    """Names of the settings of the defence itself."""

    def __init__(self, in_channels: int, out_channels: int, *, base: str = "GAT", **arguments: Any) -> None:
        kind: Any = MODELS[one_of(base, "base", tuple(MODELS))]
        model: AttentionModel = kind(in_channels, out_channels, **arguments)
        super().__init__(task=model.task, pooling=model.pooling, decoder=model.decoder)
        self.model = model
        self.config = {"base": base, **model.config}

    @classmethod
    def for_data(cls, data: Any, **overrides: Any) -> Self:
        """Build a defended model whose sizes fit `data`; `overrides` are its own settings or the model's."""
        graph = as_graph(data)
        mine = {name: overrides.pop(name) for name in list(overrides) if name in cls.own}
        base = overrides.pop("base", "GAT")
        model = MODELS[one_of(base, "base", tuple(MODELS))].for_data(graph, **overrides)
        made = cls(**{**model.config, "base": base, **mine})
        made.see(made.prepare(graph))
        return made

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the defence's own settings where none are given."""
        found = inspect.signature(cls.__init__).parameters
        return {name: found[name].default for name in cls.own}

    def see(self, graph: Graph) -> None:
        """Store what the defence needs of the graph it will be trained on."""

    def terms(self, graph: Graph) -> dict[str, Tensor]:
        """Return the scalars the defence adds to the loss; none by default."""
        return {}

    def weights(self, graph: Graph) -> Tensor:
        """Return the weights [E] the defence gives the edges of a prepared graph before the first layer."""
        raise NotImplementedError(f"{type(self).__name__} must define `weights` or `embed`")

    def prepare(self, graph: Graph) -> Graph:
        """Return `graph` as the model behind reads it."""
        return self.model.prepare(graph)

    def embed(self, graph: Graph) -> Tensor:
        """Return the embeddings [N, out] of the re-weighted graph."""
        return self.model.embed(graph.replace(edge_weight=self.weights(graph)))

    def read_out(self, nodes: Tensor, graph: Graph, links: Tensor | None = None) -> Tensor:
        """Turn node embeddings into the task's logits."""
        return self.model.read_out(nodes, graph, links)


class GNNGuard(Defended):
    """A model whose every layer trusts an edge as far as its two ends resemble each other there.

    With `s_ij` the cosine of the inputs of the layer at i and j, set to 0 below the threshold, and `n_i` the
    neighbours of i that are left, the weights into node i are

        α_ij = s_ij / Σ_j s_ij · n_i / (n_i + 1)   for neighbours,   α_ii = 1 / (n_i + 1)

    and the layer uses `ω = β ω_before + (1 − β) α`, the memory of the layer before, with a learned β (the
    first layer has none before it). A node without neighbours left keeps its self-loop.

    Gradients reach the weights in evaluation mode, so attacks see the defence: exactly where an edge is kept;
    where it is pruned the threshold is passed straight through, or nothing would show how to get past it.
    While training the weights are constants of each step, and β alone is learned, as in the original.

    Args:
        in_channels: features per node.
        out_channels: classes.
        threshold: cosine below which an edge is pruned, at least 0.
        base: the model behind.
        **arguments: of that model.

    Reference: Zhang, Zitnik, GNNGuard, NeurIPS 2020. We differ: similarities on edges instead of dense
    matrices, sparse features as they are; pruning by the threshold of its code instead of the learned one of
    its text; weights as they are instead of their exponentials; any of fgai's models behind.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()
    own: ClassVar[tuple[str, ...]] = ("threshold",)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        threshold: float = 0.1,
        base: str = "GAT",
        **arguments: Any,
    ) -> None:
        if not 0.0 <= threshold <= 1.0:
            raise InputError(f"`threshold` must be a cosine between 0 and 1, got {threshold}")
        super().__init__(in_channels, out_channels, base=base, **arguments)
        self.config |= {"threshold": threshold}
        self.threshold = threshold
        layers = sum(isinstance(module, TappedLayer) for module in self.model.modules())
        if not layers:
            raise InputError(f"{type(self.model).__name__} has no attention layer to guard")
        self.gates = nn.Parameter(torch.zeros(layers - 1))

    def weights(self, graph: Graph) -> Tensor:
        """Return the weights of the first layer."""
        return self.trust(_features(graph), graph.adjacency)

    def trust(self, x: Tensor | Features, adjacency: Adjacency) -> Tensor:
        """Return α [E] for the input of a layer."""
        if self.training and isinstance(x, Tensor):
            x = x.detach()
        similar = edge_cosine(x, adjacency)
        loops = adjacency.source == adjacency.destination
        kept = torch.where((similar >= self.threshold) & (similar > 0) & ~loops, similar, 0.0)
        if not self.training:
            kept = similar + (kept - similar).detach()
        kept = kept.masked_fill(loops, 0.0)
        left = row_sum((kept.detach() > 0).to(kept.dtype), adjacency.rowptr)
        # A node without neighbours left gives its pruned edges the gradient of a first neighbour.
        total = torch.where(left > 0, row_sum(kept, adjacency.rowptr), 1.0)
        crowd = left.clamp(min=1)
        share = kept / total[adjacency.destination] * (crowd / (crowd + 1))[adjacency.destination]
        return torch.where(loops, (1 / (left + 1))[adjacency.destination], share)

    def embed(self, graph: Graph) -> Tensor:
        """Return the embeddings [N, out], the weights of each layer made on the way."""
        earlier: list[Tensor] = []

        def guard(x: Tensor | Features, given: Graph) -> Tensor:
            now = self.trust(x, given.adjacency)
            if earlier:
                gate = torch.sigmoid(self.gates[len(earlier) - 1])
                now = gate * earlier[-1] + (1 - gate) * now
            earlier.append(now)
            return now if given.edge_weight is None else now * given.edge_weight

        self.model.guard = guard
        try:
            return self.model.embed(graph)
        finally:
            self.model.guard = None


class GNNSVD(Defended):
    """A model that reads the graph through its best approximation of low rank.

    The weight of an edge is its entry in the rank-r truncated singular value decomposition of the adjacency
    (without self-loops), cut to [0, 1]; self-loops keep weight 1. The decomposition is kept in factors and
    evaluated on existing edges only, and made anew on every graph, an attacked one included.

    Features do not enter the weights, so the gradient an attack sees in them is exact. In edge weights, which
    edge-flipping attacks move, the decomposition is passed straight through: d weight / d edge = 1.

    Args:
        in_channels: features per node.
        out_channels: classes.
        rank: r.
        base: the model behind.
        **arguments: of that model.

    Reference: Entezari et al., All You Need Is Low (Rank), WSDM 2020. We differ: the original reads the whole
    dense approximation, pairs without an edge included, which needs N² numbers.
    """

    can_capture = False  # the decomposition is computed on the host
    capabilities: ClassVar[Capabilities] = Capabilities()
    own: ClassVar[tuple[str, ...]] = ("rank",)

    def __init__(
        self, in_channels: int, out_channels: int, *, rank: int = 50, base: str = "GAT", **arguments: Any
    ) -> None:
        at_least(rank, "rank", 1)
        super().__init__(in_channels, out_channels, base=base, **arguments)
        self.config |= {"rank": rank}
        self.rank = rank

    def weights(self, graph: Graph) -> Tensor:
        """Return the weights [E] of the edges."""
        given, adjacency = graph.edge_weight, graph.adjacency
        found = reconstruct(adjacency, self.rank, given).clamp(0.0, 1.0)
        loops = adjacency.source == adjacency.destination
        if given is None:
            return found.masked_fill(loops, 1.0)
        return torch.where(loops, given, found + (given - given.detach()))


class ProGNN(Defended):
    """A model that learns how much of each edge to believe.

    With `a` the given edges, `w` the learned ones, x̂ the features scaled to length 1 and L the best rank-r
    approximation of the adjacency, all on existing edges without self-loops, the structure should make

        Σ (w − a)²  +  sparsity Σ |w|  +  smoothness ½ Σ w ‖x̂_i − x̂_j‖²  +  low_rank Σ (w − L)²

    small, together with the cross-entropy of the model that reads it. Without the cross-entropy the best is

        w* = (a + low_rank · L − (sparsity + smoothness · (1 − cos(x_i, x_j))) / 2) / (1 + low_rank)

    cut to [0, 1]. The model uses `w = w* + c` with a correction c for each edge it was trained on, learned by
    gradient; an edge it has not seen, such as an attacker's, gets w* alone. So the structure is learned anew
    on every graph, in one step. In evaluation mode gradients pass straight through the cut and through the
    decomposition (which depends on the edges only); in the features they are exact otherwise.

    Args:
        in_channels: features per node.
        out_channels: classes.
        sparsity: weight of the l1 norm.
        smoothness: weight of the feature smoothness.
        low_rank: weight of the distance to the low-rank approximation.
        rank: r.
        num_edges: corrections to keep, set by `for_data`.
        base: the model behind.
        **arguments: of that model.

    Reference: Jin et al., Graph Structure Learning for Robust Graph Neural Networks, KDD 2020. We differ: the
    original learns a dense N × N matrix and shrinks all its singular values every epoch; here the structure
    lives on existing edges, the nuclear norm is replaced by the distance to rank r, features are compared by
    angle, and the terms are divided by the number of nodes, like the cross-entropy.
    """

    can_capture = False  # the decomposition is computed on the host
    capabilities: ClassVar[Capabilities] = Capabilities()
    own: ClassVar[tuple[str, ...]] = ("sparsity", "smoothness", "low_rank", "rank")
    keys: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        sparsity: float = 0.1,
        smoothness: float = 1.0,
        low_rank: float = 1.0,
        rank: int = 50,
        num_edges: int = 0,
        base: str = "GAT",
        **arguments: Any,
    ) -> None:
        own = {"sparsity": sparsity, "smoothness": smoothness, "low_rank": low_rank}
        for name, value in own.items():
            at_least(value, name, 0.0)
        at_least(rank, "rank", 1)
        memory(whole(num_edges, "num_edges", 0), 12, "num_edges")
        super().__init__(in_channels, out_channels, base=base, **arguments)
        self.sparsity, self.smoothness, self.low_rank, self.rank = sparsity, smoothness, low_rank, rank
        self.config |= {**own, "rank": rank, "num_edges": num_edges}
        self.register_buffer("keys", torch.zeros(num_edges, dtype=torch.long))
        self.correction = nn.Parameter(torch.zeros(num_edges))

    def see(self, graph: Graph) -> None:
        """Keep a correction for each edge of this graph, all 0."""
        self.config["num_edges"] = graph.num_edges
        self.keys = graph.keys.clone()
        self.correction = nn.Parameter(torch.zeros(graph.num_edges, device=graph.device))

    def weights(self, graph: Graph) -> Tensor:
        """Return the learned weights [E]."""
        given = graph.edge_weight
        loops = graph.adjacency.source == graph.adjacency.destination
        learned = self.settled(graph) + self._corrections(graph)
        cut = learned.clamp(0.0, 1.0)
        learned = cut if self.training else learned + (cut - learned).detach()
        return torch.where(loops, torch.ones_like(learned) if given is None else given, learned)

    def settled(self, graph: Graph) -> Tensor:
        """Return w* [E] before the cut: the structure that fits graph and features best without labels."""
        cost = self.sparsity + self.smoothness * (1 - edge_cosine(_features(graph), graph.adjacency))
        given = 1.0 if graph.edge_weight is None else graph.edge_weight
        return (given + self.low_rank * self._approximation(graph) - cost / 2) / (1 + self.low_rank)

    def terms(self, graph: Graph) -> dict[str, Tensor]:
        """Return the four terms of the structure at the learned weights, divided by the number of nodes."""
        keep = graph.adjacency.source != graph.adjacency.destination
        w = self.weights(graph)[keep]
        given = torch.ones_like(w) if graph.edge_weight is None else graph.edge_weight[keep]
        apart = 1 - edge_cosine(_features(graph), graph.adjacency)[keep]
        nodes = graph.num_nodes
        return {
            "fidelity": (w - given).square().sum() / nodes,
            "sparsity": self.sparsity * w.abs().sum() / nodes,
            "smoothness": self.smoothness * (w * apart).sum() / nodes,
            "low_rank": self.low_rank * (w - self._approximation(graph)[keep]).square().sum() / nodes,
        }

    def _approximation(self, graph: Graph) -> Tensor:
        found, given = reconstruct(graph.adjacency, self.rank, graph.edge_weight), graph.edge_weight
        return found if given is None else found + (given - given.detach())

    def _corrections(self, graph: Graph) -> Tensor:
        """Return the correction of each edge, 0 for those not seen in training."""
        keys = graph.keys
        if keys.shape == self.keys.shape and torch.equal(keys, self.keys):
            return self.correction
        here, there = match_edges(keys, self.keys)
        out = self.correction.new_zeros(keys.numel())
        return out.index_copy(0, here, self.correction[there])


class SoftMedianLayer(GCNLayer):
    """Graph convolution whose neighbours count less the farther they are from their median.

    With `n` the normalised weights, z the values, C their number and m_i the dimension-wise median of the
    neighbours of node i weighted by `n`,

        output_i = Σ_j n_ji · Σ_j a_ji z_j + b,   a_ji ∝ n_ji exp(−‖z_j − m_i‖ / (T √C)).
    """

    temperature = 1.0

    def attend(
        self, x: Tensor | Features, adjacency: Adjacency, edge_weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the shares a [E, 1], the values [N, 1, C] and the sizes of the sums [N]."""
        shares, values, sizes = super().attend(x, adjacency, edge_weight)
        z, weight = values.squeeze(1), shares.squeeze(1)
        middle = z.gather(0, weighted_median(z, weight, adjacency))
        apart = _differences(z, middle, adjacency).norm(dim=1, keepdim=True)
        scores = -apart / (self.temperature * self.channels**0.5)
        return weighted_softmax(scores, weight, adjacency), values, sizes


@torch.no_grad()
def weighted_median(values: Tensor, weight: Tensor, adjacency: Adjacency) -> Tensor:
    """The node [N, C] whose value is the median of each node's neighbours, dimension by dimension.

    That is the smallest of `values` [N, C] such that half of the neighbours' `weight` [E] is not above it:
    found by bisection of the ranks, which needs no sort of edges and does not wait for the device.
    """
    order = values.argsort(0)
    places = torch.arange(len(order), device=order.device)[:, None].expand_as(order)
    held = torch.empty_like(order).scatter_(0, order, places)[adjacency.source]
    low, high = torch.zeros_like(order), torch.full_like(order, len(order) - 1)
    half = (0.5 - 1e-6) * row_sum(weight, adjacency.rowptr)[:, None]
    for _ in range(len(order).bit_length()):
        middle = (low + high) // 2
        below = torch.where(held <= middle[adjacency.destination], weight[:, None], 0.0)
        reached = torch.zeros_like(values).index_add_(0, adjacency.destination, below) >= half
        low, high = torch.where(reached, low, middle + 1), torch.where(reached, middle, high)
    return order.gather(0, low)


class SoftMedian(Defended):
    """A GCN with robust sums: see `SoftMedianLayer`. Gradients reach distances and medians.

    Args:
        in_channels: features per node.
        out_channels: classes.
        temperature: T; the larger, the closer to a GCN.
        base: `GCN`.
        **arguments: of that model.

    Reference: Geisler et al., Robustness of Graph Neural Networks at Scale, NeurIPS 2021. We differ: without
    its diffusion of the graph, which would have to be made anew on every attacked graph.
    """

    own: ClassVar[tuple[str, ...]] = ("temperature",)

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        temperature: float = 0.5,
        base: str = "GCN",
        **arguments: Any,
    ) -> None:
        at_least(temperature, "temperature", 1e-6)
        super().__init__(in_channels, out_channels, base=one_of(base, "base", ("GCN",)), **arguments)
        self.config |= {"temperature": temperature}
        layers = self.model.convs
        assert isinstance(layers, nn.ModuleList)
        conv: Any
        for place, conv in enumerate(layers):
            layer = SoftMedianLayer(*conv.value.weight.shape, input_norm=conv.input_norm is not None)
            layer.temperature = temperature
            layers[place] = layer

    def embed(self, graph: Graph) -> Tensor:
        """Return the embeddings [N, out]."""
        return self.model.embed(graph)


class RUNG(Defended):
    """A network of features alone, whose predictions are smoothed over the graph without far neighbours.

    With A the adjacency (self-loops included in the degrees d only), F⁰ the outputs of the model behind on
    the graph without edges, and y_ij = ‖f_i/√d_i − f_j/√d_j‖, each step is a quasi-Newton one on an objective
    with the minimax concave penalty:

        w_ij = max(0, 1/(2 y_ij) − 1/(2 γ)),   q_i = Σ_j w_ij A_ij / d_i,
        f_i ← (Σ_j w_ij A_ij f_j / √(d_i d_j) + λ f⁰_i) / (q_i + λ).

    While training the weights w are constants of each step, as in the original. In evaluation mode gradients
    reach them, and pass straight through the maximum, or nothing would show how a neighbour that is left out
    gets in.

    Args:
        in_channels: features per node.
        out_channels: classes.
        gamma: γ, the distance from which a neighbour is left out.
        anchor: λ, the weight of a node's own prediction.
        steps: of the smoothing.
        base: the model behind.
        **arguments: of that model.

    Reference: Hou et al., Robust Graph Neural Networks via Unbiased Aggregation, NeurIPS 2024.
    """

    own: ClassVar[tuple[str, ...]] = ("gamma", "anchor", "steps")

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        gamma: float = 3.0,
        anchor: float = 1 / 9,
        steps: int = 10,
        base: str = "GCN",
        **arguments: Any,
    ) -> None:
        for name, value in {"gamma": gamma, "anchor": anchor}.items():
            at_least(value, name, 1e-6)
        super().__init__(in_channels, out_channels, base=base, **arguments)
        self.gamma, self.anchor, self.steps = gamma, anchor, whole(steps, "steps", 1)
        self.config |= {"gamma": gamma, "anchor": anchor, "steps": steps}

    def embed(self, graph: Graph) -> Tensor:
        """Return the embeddings [N, out]."""
        adjacency, given = graph.adjacency, graph.edge_weight
        alone = once_for_edges(adjacency, "loops", lambda: _loops(adjacency))
        first = self.model.embed(graph.replace(adjacency=alone, edge_weight=None))
        weight = first.new_ones(adjacency.num_edges) if given is None else given
        degree = row_sum(weight, adjacency.rowptr).clamp(min=1e-12)[:, None]
        weight = weight.masked_fill(adjacency.source == adjacency.destination, 0.0)
        out, ones = first, torch.ones_like(first[:, :1])
        for _ in range(self.steps):
            scaled = out * degree.rsqrt()
            apart = _differences(scaled, scaled, adjacency).norm(dim=1).clamp(min=NEAREST)
            trust = 0.5 / (apart.detach() if self.training else apart) - 0.5 / self.gamma
            kept = trust.clamp(min=0.0)
            kept = weight * (kept if self.training else trust + (kept - trust).detach())
            values = torch.cat([scaled, ones], dim=1)  # the last column sums the weights
            sums = aggregate(kept[:, None], values[:, None], adjacency).squeeze(1)
            near, pull = sums[:, :-1] * degree.rsqrt(), sums[:, -1:] / degree
            out = (near + self.anchor * first) / (pull + self.anchor)
        return out


def _differences(source: Tensor, destination: Tensor, adjacency: Adjacency) -> Tensor:
    """Return [E, C] by `index_select`: the gradient of indexing sorts all edges first on a GPU."""
    return source.index_select(0, adjacency.source) - destination.index_select(0, adjacency.destination)


NEAREST = 1e-6
"""Distance of two nodes below which RUNG takes them for equal."""


def _loops(adjacency: Adjacency) -> Adjacency:
    nodes = torch.arange(adjacency.num_nodes, device=adjacency.device)
    return Adjacency.from_sorted(nodes, nodes, adjacency.num_nodes)


DEFENCES: dict[str, type[Defended]] = {
    "gnnguard": GNNGuard,
    "gnn-svd": GNNSVD,
    "pro-gnn": ProGNN,
    "soft-median": SoftMedian,
    "rung": RUNG,
}
"""Defences by the name of the training method."""


class Regularised(VanillaRecipe):
    """The recipe of defences: cross-entropy plus `Defended.terms`; scored like plain training.

    Args:
        graph: prepared for the model, as the task views it in training, with labels and masks.
    """

    name = "defence"

    def losses(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield the cross-entropy and the terms in one part."""
        graph, rows, labels = self.batch(epoch)
        terms = {"cross_entropy": cross_entropy(call_model(model, graph).index_select(0, rows), labels)}
        if isinstance(model, Defended):
            terms |= model.terms(graph)
        yield {**terms, "total": torch.stack(list(terms.values())).sum()}


def _features(graph: Graph) -> Features:
    if graph.features is None:
        raise InputError(f"{graph.name!r} has no node features")
    return graph.features
