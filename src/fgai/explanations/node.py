"""`explain`: the attention and the class of one node, under attack too, and what is proved about both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fgai.attacks import AttackResult, Threat, make_attack, threat_of
from fgai.attention import (
    LayerAttention,
    Observation,
    limits_of,
    observe,
    prepared,
    warn_coupled,
    warn_unread,
)
from fgai.attention.interface import originals
from fgai.certificates import (
    POSITIONAL_CONDITION,
    PROMISE,
    CertificateRecord,
    certify_attention,
    certify_injection,
    invariant_layers,
)
from fgai.checks import one_of, whole
from fgai.checks import seed as check_seed
from fgai.errors import InputError
from fgai.explanations.contributions import SignedMargins
from fgai.explanations.counterfactual import Counterfactual, injected_neighbours, removed_neighbours
from fgai.explanations.record import NodeExplanation, _class_name
from fgai.graph import Graph
from fgai.metrics.removal import combined
from fgai.models import as_graph
from fgai.tasks import task_of
from fgai.threads import with_gradients
from fgai.typed import typed

Names = Sequence[str] | Mapping[int, str]
RADIUS = 0.01
"""Radius of the l1 ball in which the properties of Definition 1 are certified."""


@dataclass(frozen=True)
class NodeView:
    """A model's attention and prediction at one node; classes are as in `GraphView`."""

    node: int
    neighbours: tuple[int, ...]  # sources of its edges by falling weight (ties by number), perhaps itself
    weights: tuple[float, ...]  # of the explanation, summing to one (not with `max` over layers)
    predicted: int
    confidence: float
    label: int  # true class of what `predicted` is about; -1 if unknown
    informative: tuple[bool, ...] | None  # whether the edges belong to the true explanation, if known
    num_original: int  # nodes from this number on were injected
    class_names: tuple[str, ...] | None = None

    def class_name(self, number: int) -> str:
        """The name of a class, its number where there is no name."""
        return _class_name(number, self.class_names)

    def name(self, neighbour: int) -> str:
        """The number of a neighbour, `itself`, or `new` and a number for an injected one."""
        if neighbour == self.node:
            return "itself"
        return str(neighbour) if neighbour < self.num_original else f"new {neighbour - self.num_original}"


@dataclass(frozen=True, eq=False)
class GraphView:
    """A model's attention on every edge of a graph, and its predictions."""

    graph: Graph  # prepared for the model
    attention: LayerAttention  # [E, 1], `LayerAttention.explanation` of a layer, or layers reduced
    predicted: NDArray[np.int64]  # [N] class of the node, its graph or one of its pairs; 0 if none
    confidence: NDArray[np.float64]  # [N] probability of that class; 0 for a node in no pair
    num_original: int  # nodes from this number on were injected

    @classmethod
    def of(cls, observation: Observation, *, layer: str | int = "mean", original: int | None = None) -> Self:
        """Reduce an observation to `mean`, `last`, `max` or one layer; nodes from `original` on are new."""
        graph, explanations = observation.graph, observation.attention.explanations()
        if layer == "mean":
            attention = combined(explanations)
        elif isinstance(layer, int):
            attention = explanations[layer]
        else:
            attention = explanations.over_layers(one_of(layer, "layer", ("mean", "last", "max")))
        confidence, predicted = observation.logits.double().softmax(1).max(1)
        row = task_of(graph).row_of(graph)
        return cls(
            graph=graph,
            attention=attention.to("cpu"),
            predicted=torch.where(row >= 0, predicted[row], 0).cpu().numpy(),
            confidence=torch.where(row >= 0, confidence[row], 0.0).cpu().numpy(),
            num_original=graph.num_nodes if original is None else original,
        )

    def weights(self, node: int) -> dict[int, float]:
        """Return the attention of a node's neighbours; nothing for a node that is not in this graph."""
        if node >= self.attention.num_nodes:
            return {}
        row = slice(*self.attention.rowptr[node : node + 2].tolist())
        return dict(
            zip(self.attention.source[row].tolist(), self.attention.values[row, 0].tolist(), strict=True)
        )

    def node(self, node: int) -> NodeView:
        """Return the part of the view that concerns one node; `InputError` if there is no such node."""
        check_node(node, self.num_original)
        row = slice(*self.attention.rowptr[node : node + 2].tolist())
        order = torch.argsort(self.attention.ranking()[row], descending=True, stable=True)
        truth = self.graph.edge_truth if self.attention.num_edges == self.graph.num_edges else None
        task = task_of(self.graph)
        labels = task.node_labels(self.graph)
        return NodeView(
            node=node,
            neighbours=tuple(self.attention.source[row][order].tolist()),
            weights=tuple(self.attention.values[row, 0][order].tolist()),
            predicted=int(self.predicted[node]),
            confidence=float(self.confidence[node]),
            label=-1 if labels is None else int(labels[node]),
            informative=None if truth is None else tuple(truth[row][order].tolist()),
            num_original=self.num_original,
            class_names=task.class_names or self.graph.class_names,
        )


@typed
@with_gradients
def explain(
    model: nn.Module,
    data: Any,
    node: int,
    *,
    k: int = 5,
    layer: str | int = "mean",
    threat: str | Threat | None = "",
    nodes: int | None = None,
    edges: int | None = None,
    seed: int = 0,
    certificate: bool = True,
    vanilla: nn.Module | None = None,
    attack: AttackResult | None = None,
    names: Names | None = None,
    counterfactual: bool = False,
) -> NodeExplanation:
    """Return the neighbours a node attends to, whether they stay under attack, and what is proved about them.

    The `attention` of a neighbour is its entry in the explanation vector (`LayerAttention.explanation`), by
    default the mean over layers. Under attack, ranks are taken among the node's original neighbours; new ones
    are counted apart. `certified` says for each layer which properties of Definition 1 the node has.

    Args:
        model: for nodes, links or graphs, fgai's or any PyG model whose attention can be recorded; left as it
            was. Contributions and counterfactuals are of node classification only.
        data: a `Graph` or PyG `Data`.
        node: its number.
        k: neighbours in the explanation.
        layer: `mean`, `last` or `max` over layers, or one layer by number.
        threat: a name from `fgai.attacks.THREATS` (default: `standard`) or a `Threat`; None for no attack.
        nodes: how many nodes the attack injects, for small graphs; the threat's number by default.
        edges: how many edges each of them gets, likewise.
        seed: of the attack.
        certificate: also certify (a pass over the whole graph), see `certify_attention`.
        vanilla: the model that `model` was made from, for two of the four properties of Definition 1.
        attack: a result to use instead of running one; the record calls it `given` unless `threat` names it.
        names: of the nodes, by number; those of the data by default.
        counterfactual: also search for few neighbours whose removal, or injection, changes the class.

    Raises:
        InputError: no such node, an argument out of range, or a counterfactual of links or graphs.
        AttentionError: the model has no attention that can be recorded.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train(fgai.GAT.for_data(data), data, epochs=3, progress=False)
        >>> record = fgai.explain(model, data, 24, threat="random")
        >>> round(sum(entry["attention"] for entry in record.neighbours), 3), len(record.certified["layers"])
        (1.0, 2)
    """
    whole(k, "k", 1)
    check_seed(seed)
    model, vanilla = originals(model, vanilla)
    original = as_graph(data)
    graph = prepared(model, original)
    names = original.node_names if names is None else names
    check_counterfactual(graph, counterfactual)
    if threat == "" and attack is None:
        threat = "standard"
    threat_name = threat if isinstance(threat, str) else getattr(threat, "name", "")
    warn_unread(model)
    observation = observe(model, graph, inputs=True)
    clean = GraphView.of(observation, layer=layer).node(node)
    attacked = None
    if attack is None and threat is not None:
        task = task_of(graph)
        # Every small graph of a batch is attacked, so that nodes keep their numbers.
        everywhere = graph.replace(train_mask=None, val_mask=None, test_mask=None)
        search = make_attack(threat_of(threat).sized(nodes, edges), k=k, task=task.name)
        attack = search.run(model, everywhere if task.row_per_graph else graph, seed=seed)
    if attack is not None:
        attacked_pass = observe(model, prepared(model, attack.graph))
        warn_coupled(model, observation, attacked_pass, attack.change.rows)
        attacked = GraphView.of(attacked_pass, layer=layer, original=graph.num_nodes).node(node)
    certified = None
    if certificate:
        proof = certify_attention(model, original, vanilla=vanilla, radius=RADIUS, k1=k, k2=k)
        certified = _certified(model, observation, clean, layer, proof)
    return NodeExplanation(
        dataset=graph.name,
        node=node,
        name=name_of(node, names),
        layer=str(layer),
        k=k,
        predicted=clean.predicted,
        confidence=clean.confidence,
        label=clean.label,
        neighbours=_neighbours(clean, attacked, names),
        attacked=None if attacked is None else _under_attack(clean, attacked, k, threat_name or "given"),
        certified=certified,
        class_names=None if clean.class_names is None else list(clean.class_names),
        contributions=_contributions(SignedMargins(model, observation), node, names),
        counterfactual=_counterfactuals(model, original, node, names, seed) if counterfactual else None,
    )


def check_node(node: int | None, count: int) -> None:
    """Raise `InputError` if a graph of `count` nodes has no node of this number; None is no node."""
    if node is None:
        return
    if isinstance(node, bool) or not isinstance(node, int | np.integer) or not 0 <= node < count:
        raise InputError(f"`node` must be in 0..{count - 1}, got {node}")


def check_counterfactual(graph: Graph, counterfactual: bool) -> None:
    """Raise `InputError` if counterfactuals are searched for links or graphs, `TypeError` for no switch."""
    if not isinstance(counterfactual, bool | int | np.bool_ | None):
        raise TypeError(f"`counterfactual` must be True or False, got {type(counterfactual).__name__}")
    if counterfactual and not task_of(graph).row_per_node:
        raise InputError("`counterfactual` is searched for the class of a node; leave it out for other tasks")


def _contributions(margins: SignedMargins, node: int, names: Names | None) -> dict[str, Any]:
    if margins.reason is not None:
        return {"reason": margins.reason}
    signed = margins.of(node)
    edge_parts = signed.edge_contributions
    entries = [
        {
            "node": neighbour,
            "name": name_of(neighbour, names),
            "itself": neighbour == node,
            "contribution": float(signed.contributions[index]),
            "of_edge": None if edge_parts is None else float(edge_parts[index]),
            "radius": _number(signed.radii[index]),
        }
        for index, neighbour in enumerate(signed.sources.tolist())
    ]
    return {
        "reason": None,
        **{name: getattr(signed, name) for name in ("top", "second", "margin", "rest")},
        "pair_radius": _number(signed.pair_radius),
        "neighbours": sorted(entries, key=lambda entry: -entry["contribution"]),
    }


def _counterfactuals(
    model: nn.Module, graph: Graph, node: int, names: Names | None, seed: int
) -> dict[str, Any]:
    injected = injected_neighbours(model, graph, node, seed)
    return {
        "removed": _counterfactual(removed_neighbours(model, graph, node), graph, names),
        "injected": None if injected is None else _counterfactual(injected, graph, names),
    }


def _counterfactual(searched: Counterfactual, graph: Graph, names: Names | None) -> dict[str, Any]:
    items, change = list[str](), searched.change
    if change is not None:
        items += [name_of(other, names) for _, other in change.removed_edges]
        for new in change.injected:
            if "copy" in new:
                items.append(f"a copy of {name_of(new['copy'], names)}")
            elif "typical" in new:
                items.append(f"the mean of class {_class_name(new['typical'], graph.class_names)}")
            else:
                items.append("features found by an attack")
    return {**vars(searched), "change": None if change is None else change.to_dict(), "items": items}


def name_of(node: int, names: Names | None) -> str:
    """Return the name of a node, its number without `names`; raise if a sequence of names is too short."""
    if isinstance(names, Mapping):
        return str(names.get(node, node))
    if names is None:
        return str(node)
    if node >= len(names):
        raise InputError(f"`names` must name every node, got {len(names)} names and node {node}")
    return str(names[node])


def _neighbours(clean: NodeView, attacked: NodeView | None, names: Names | None) -> list[dict[str, Any]]:
    after = {} if attacked is None else dict(zip(attacked.neighbours, attacked.weights, strict=True))
    return [
        {
            "node": neighbour,
            "name": name_of(neighbour, names),
            "attention": weight,
            "itself": neighbour == clean.node,
            "injected": False,
            "informative": None if clean.informative is None else clean.informative[rank],
            "attacked": after.get(neighbour),
        }
        for rank, (neighbour, weight) in enumerate(zip(clean.neighbours, clean.weights, strict=True))
    ]


def _under_attack(clean: NodeView, attacked: NodeView, k: int, threat: str) -> dict[str, Any]:
    neighbours, top = set(clean.neighbours), clean.neighbours[:k]
    kept = set(top) & set([n for n in attacked.neighbours if n in neighbours][:k])
    new = [w for n, w in zip(attacked.neighbours, attacked.weights, strict=True) if n not in neighbours]
    return {
        "threat": threat,
        "predicted": attacked.predicted,
        "confidence": attacked.confidence,
        "kept": sorted(kept),
        "overlap": len(kept) / len(top) if top else None,
        "chance": len(top) / len(clean.neighbours) if top else None,
        "new_neighbours": len(new),
        "new_attention": sum(new),
    }


def _certified(
    model: nn.Module, observation: Observation, clean: NodeView, layer: str | int, record: CertificateRecord
) -> dict[str, Any]:
    """Radii of one node, of the shown layer and of each; None where unknown or where nothing can change."""
    node, k = clean.node, record.k2
    assert k is not None
    layers = [
        {
            "layer": proof.name,
            "topk": list(GraphView.of(observation, layer=index).node(node).neighbours[:k]),
            "topk_radius": _at(proof.topk_radius, node),
            "class_radius": _at(proof.prediction.class_radius, node),
            "class_status": proof.prediction.class_status,
            "properties": {
                name: None if values is None else bool(values[node])
                for name, values in record.properties(index).items()
            },
        }
        for index, proof in enumerate(record.layers)
    ]
    radius, typed_edges = None, any(part.edge_type is not None for part in observation.attention)
    if layer != "max" and not typed_edges and len(clean.weights) > k:
        # The least l1 change of the weights that lets another neighbour into the top-k. If no layer's vector
        # moves by more than R, their mean does not, either.
        radius = max(0.0, clean.weights[k - 1] - clean.weights[k])
    return {
        **{name: getattr(record, name) for name in ("norm", "radius", "alpha", "beta", "compared")},
        "k": k,
        "shown_radius": radius,
        "layers": layers,
        "promise": PROMISE,
        "injection": _against_injection(model, observation.graph, node),
    }


def _against_injection(model: nn.Module, graph: Graph, node: int) -> dict[str, Any]:
    """Layers no injected node can reorder, and whether the class holds against one injected neighbour."""
    invariant = [name for name, reason in invariant_layers(model, graph).items() if reason is not None]
    holds: dict[str, bool | None] = {"any": None, "direct": None}  # every node gains one, or this one alone
    if limits_of(model):
        direct = certify_injection(model, graph, where="direct")
        if direct.known:
            holds = dict.fromkeys(holds, bool(direct.certified[node]))
        if holds["direct"]:  # otherwise it does not hold against new neighbours of all nodes, either
            holds["any"] = bool(certify_injection(model, graph).certified[node])
    condition = None if graph.positional is None else POSITIONAL_CONDITION
    return {"invariant": invariant, "condition": condition, "class_holds": holds}


def _at(values: Tensor | None, node: int) -> float | None:
    return None if values is None else _number(values[node])


def _number(value: Tensor | float) -> float | None:
    return float(value) if math.isfinite(value) else None
