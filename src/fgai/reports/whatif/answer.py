"""`WhatIf`: how a change of the graph changes the attention and the class of one node in several models."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fgai.attacks import Budget, Objective, PGDInjection
from fgai.attention import (
    AttentionMap,
    Layerwise,
    Limits,
    limits_of,
    model_name,
    observe,
    prepared,
    stages_of,
)
from fgai.attention.interface import originals
from fgai.certificates import InjectionCertificate, certify_injection
from fgai.checks import whole
from fgai.errors import InputError, collect_warnings
from fgai.explanations.node import check_node
from fgai.graph import ChangeRecord, Graph
from fgai.graph.fingerprint import fingerprint
from fgai.graph.saved import typical_features
from fgai.models import as_graph
from fgai.models.base import AttentionModel, body_of
from fgai.models.layer import AttentionLayer
from fgai.objectives import Clean
from fgai.records import weights_hash
from fgai.sparse import Adjacency, SparseRows
from fgai.sparse.adjacency import pointers
from fgai.tasks import task_of
from fgai.threads import with_gradients
from fgai.typed import typed

NEIGHBOURS = (1, 2, 5)  # numbers of injected neighbours that classes are certified against
LARGEST = 4_000_000  # characters of packed numbers on a page
STEPS = 40  # of the search for the worst node


class NodeAnswer(NamedTuple):
    """A model at one node: `logits`, and per layer `neighbours` and their `explanation`."""

    logits: list[float]
    layers: list[dict[str, Any]]

    def summary(self) -> dict[str, Any]:
        """Return class, probability, margin, and [neighbour, mean explanation] by falling share."""
        logits = torch.tensor(self.logits, dtype=torch.float64)
        first, second = logits.sort(descending=True).values[:2].tolist()
        total: dict[int, float] = {}
        for layer in self.layers:
            for node, share in zip(layer["neighbours"], layer["explanation"], strict=True):
                total[node] = total.get(node, 0.0) + share / len(self.layers)
        return {
            "class": int(logits.argmax()),
            "probability": float(logits.softmax(0).max()),
            "margin": first - second,
            "attention": [[n, total[n]] for n in sorted(total, key=lambda n: (-total[n], n))],
        }


@typed
class WhatIf:
    """Node classifiers by name, or one, on a graph: their attention and class at a node under a change.

    `InputError` for no models, or another task.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> answers = WhatIf(fgai.GAT.for_data(data), data)
        >>> new = {"copy": 3, "strength": 1.0, "edges": [24]}
        >>> change = ChangeRecord.of(answers.models["GAT"], data, 24, injected=[new])
        >>> before, after = answers.view("GAT", change)
        >>> len(after.layers[0]["neighbours"]) - len(before.layers[0]["neighbours"])
        1
    """

    def __init__(self, models: Mapping[str, nn.Module] | nn.Module, data: Any, *, k: int = 5) -> None:
        named = {model_name(models): models} if isinstance(models, nn.Module) else dict(models)
        if not named:
            raise InputError("`models` must hold at least one model, got none")
        self.models: dict[str, nn.Module] = dict(zip(named, originals(*named.values()), strict=True))
        self.graph = as_graph(data)
        self.k = whole(k, "k", 1)
        if task_of(self.graph).name != "node" or self.graph.features is None:
            raise InputError(f"{self.graph.name!r} must be a graph with features whose nodes are classified")

    def facts(
        self, *, node: int | None = None, certified: Mapping[str, Sequence[int]] | None = None
    ) -> dict[str, Any]:
        """Return the values of a page, with edges, features and weights if the page can compute by itself.

        It opens with `node`, by default the first test node; `certified` is the result of `certify`.
        """
        graph = self.graph
        first = 0 if graph.test_mask is None else int(graph.test_mask.nonzero()[0])
        start = first if node is None else node
        check_node(start, graph.num_nodes)
        values, layers = None, dict[str, Any]()
        if all(in_browser(model, graph) for model in self.models.values()):
            values = graph_values(graph)
            layers = {name: model_values(model) for name, model in self.models.items()}
        if len(str(values)) + len(str(layers)) > LARGEST:
            values, layers = None, {}
        other = graph.y is not None and (graph.y != graph.y[start]).nonzero().flatten()
        return {
            "data": graph.name,
            "nodes": graph.num_nodes,
            "k": self.k,
            "start": start,
            "copy": int(other[0]) if isinstance(other, Tensor) and len(other) else 0,
            "names": None if graph.node_names is None else list(graph.node_names),
            "classes": None if graph.class_names is None else list(graph.class_names),
            "labels": None if graph.y is None else graph.y.tolist(),
            "typical": typical_classes(graph),
            "hash": fingerprint(graph),
            "graph": values,
            "models": [
                {
                    "name": name,
                    "hash": weights_hash(model),
                    "proven": list(certified[name]) if certified and name in certified else None,
                    "layers": layers.get(name),
                }
                for name, model in self.models.items()
            ],
        }

    def certify(self) -> dict[str, list[int]]:
        """Return `certified_neighbours` of each model with limits, for the sizes `NEIGHBOURS`."""
        counts = {}
        for name, model in self.models.items():
            if limits_of(model):
                certify = partial(certify_injection, model, self.graph, where="direct")
                counts[name] = certified_neighbours([certify(neighbours=count) for count in NEIGHBOURS])
        return {name: most for name, most in counts.items() if most}

    @property
    def questions(self) -> dict[str, Callable[[dict[str, Any]], Any]]:
        """What a page may ask for by name, called with a change: `views`, and `worst` of each model."""
        worst = {f"worst-{at}": partial(self.worst, model=name) for at, name in enumerate(self.models)}
        return {"view": self.views, **worst}

    def change(self, name: str, values: Mapping[str, Any]) -> ChangeRecord:
        """Return the record of a change that a page sent, for one of the models."""
        own = {"model": weights_hash(self.models[name]), "graph": fingerprint(self.graph)}
        return ChangeRecord.from_dict({**values, "kind": ChangeRecord.KIND, "schema": 1, **own})

    def view(self, name: str, change: ChangeRecord) -> tuple[NodeAnswer, NodeAnswer]:
        """Return a model's answer at the node of a change, before and after it.

        `CheckpointError` if the change is for another model or graph, or cannot be applied.
        """
        model = self.models[name]
        base = self._base(model)
        changed = change.apply(model, base)
        return _answer(model, base, change.node), _answer(model, changed, change.node)

    def views(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return `view` of every model as plain values."""
        pairs = [self.view(name, self.change(name, values)) for name in self.models]
        return [{"before": before._asdict(), "after": after._asdict()} for before, after in pairs]

    @with_gradients
    def worst(self, values: Mapping[str, Any], model: str | None = None) -> list[float]:
        """Return features of one more neighbour that move a model most from its class before; the first's."""
        name = next(iter(self.models)) if model is None else model
        network, change = self.models[name], self.change(name, values)
        base = self._base(network)
        logits = torch.tensor(_answer(network, base, change.node).logits)
        own = torch.arange(len(logits), device=self.graph.device) == logits.argmax()

        def away(logits: Tensor, attention: AttentionMap, clean: Clean) -> Tensor:
            rows = logits[clean.nodes]
            return (rows[:, ~own].amax(1) - rows[:, own].squeeze(1)).mean()

        graph, members = _near(network, change.apply(network, base), change.node)
        assert self.graph.features is not None
        stored = self.graph.features.stored
        box = (min(0.0, float(stored.min())), float(stored.max()))
        budget = Budget(nodes=1, edges=1, box=box, steps=STEPS, step_size=0.1)
        search = PGDInjection(budget, Objective("class before", away, reads="logits", node_mean=True))
        with collect_warnings():  # that the search found little is seen on the page
            result = search.run(network, graph.replace(test_mask=members == change.node))
        assert result.change.features is not None
        worst: list[float] = result.change.features[0].tolist()
        return worst

    def _base(self, model: nn.Module) -> Graph:
        """The graph as loaded, with the encodings of the graph before the change where a model adds some."""
        graph = prepared(model, self.graph)
        if graph.positional is None:
            return self.graph
        both = {"positional": graph.positional, "positional_values": graph.positional_values}
        name = f"positional {graph.positional.shape[1]}"
        return self.graph.derived(name, lambda plain: plain.replace(**both))


def certified_neighbours(certificates: Sequence[InjectionCertificate]) -> list[int] | None:
    """Return for every node the largest number of injected neighbours that provably leave its class, else 0.

    None if no certificate against new neighbours of the node alone is known.
    """
    direct = [one for one in certificates if one.where == "direct" and one.known]
    if not direct:
        return None
    most = torch.zeros(len(direct[0].certified), dtype=torch.long)
    for one in sorted(direct, key=lambda each: each.neighbours):
        most[one.certified] = one.neighbours
    counts: list[int] = most.tolist()
    return counts


def _near(model: nn.Module, graph: Graph, node: int) -> tuple[Graph, Tensor]:
    """The receptive field of a node without labels, and the nodes in it; the whole graph if not known."""
    from torch_geometric.utils import k_hop_subgraph  # slow to import, and not needed for help texts

    ready = prepared(model, graph)
    stages = stages_of(model) if body_of(model) and ready.edge_weight is None else None
    if not isinstance(stages, Layerwise):
        return ready, torch.arange(ready.num_nodes, device=ready.device)
    size, hops = ready.num_nodes, len(stages.stages)
    members, edges, _, _ = k_hop_subgraph(node, hops, ready.edge_index, relabel_nodes=True, num_nodes=size)
    values = {name: getattr(ready, name) for name in ("positional", "positional_values")}
    field = Graph(
        Adjacency.from_sorted(edges[0], edges[1], len(members)),
        None if ready.features is None else ready.features.take(members),
        **{name: None if value is None else value[members] for name, value in values.items()},
        name=ready.name,
    )
    return field, members


def _answer(model: nn.Module, graph: Graph, node: int) -> NodeAnswer:
    part, members = _near(model, graph, node)
    observation, number = observe(model, part), int((members == node).nonzero())
    layers = []
    for layer in observation.attention.layers:
        row = slice(*layer.rowptr[number : number + 2].tolist())
        shares = layer.explanation()[row].tolist()
        layers.append({"neighbours": members[layer.source[row]].tolist(), "explanation": shares})
    return NodeAnswer(observation.logits[number].tolist(), layers)


def in_browser(model: nn.Module, graph: Graph) -> bool:
    """Whether the script of the page can compute this model: a GAT or GATv2 on a graph that is not large."""
    if not isinstance(model, AttentionModel) or body_of(model) != "layers" or not model.is_rowwise:
        return False
    if graph.features is None or graph.edge_weight is not None or graph.edge_attr is not None:
        return False
    layers = list(getattr(model, "convs", ()))
    size = graph.num_edges * int(_index_kind(graph.num_nodes)[1]) + min(_sizes(graph).values())
    return (
        size * 4 // 3 <= LARGEST  # as base64
        and next(model.parameters()).dtype == torch.float32
        and all(isinstance(layer, AttentionLayer) and layer.score != "dot" for layer in layers)
        and prepared(model, graph).has_loops
    )


def as_base64(values: Tensor | np.ndarray[Any, Any], kind: str) -> dict[str, str]:
    """Return little-endian numbers of a kind (`f4`, `u1`, `u2`, `u4`) in base64."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else values
    data = np.ascontiguousarray(array.astype(f"<{kind}")).tobytes()
    return {"type": kind, "data": base64.b64encode(data).decode()}


def model_values(model: nn.Module) -> list[dict[str, Any]]:
    """Return the layers of a model that is computed `in_browser`."""
    return [_layer(layer) for layer in model.convs]  # type: ignore[union-attr]


def _layer(layer: AttentionLayer) -> dict[str, Any]:
    values: dict[str, Any] = {
        **{name: getattr(layer, name) for name in ("score", "heads", "channels", "concat", "slope")},
        "width": layer.heads * layer.channels if layer.concat else layer.channels,
        "value": _tensors(layer.value, "weight", "bias"),
        **_tensors(layer, "bias"),
        "norm": layer.input_norm and _tensors(layer.input_norm, "scale", "shift"),
        "limits": None,
    }
    if layer.limits is not None:
        limits = ((name, one) for name, one in layer.limits.items() if isinstance(one, Limits))
        values["limits"] = {name: _tensors(one, "low", "high", "radius") for name, one in limits}
    if layer.score == "dynamic":
        values["right"] = _tensors(layer.right, "weight", "bias")
        return values | {"weight": as_base64(layer.score_weight, "f4")}
    vectors = {"source": layer.source_weight, "destination": layer.destination_weight}
    return values | {name: as_base64(vector, "f4") for name, vector in vectors.items()}


def _tensors(module: nn.Module, *names: str) -> dict[str, Any]:
    """Attributes of a module in base64."""
    values = {name: getattr(module, name) for name in names}
    return {name: None if value is None else as_base64(value, "f4") for name, value in values.items()}


def graph_values(graph: Graph) -> dict[str, Any]:
    """Return the edges without self-loops, the features and the mean features of every class."""
    source, destination = graph.adjacency.source.cpu().numpy(), graph.adjacency.destination.cpu().numpy()
    kept = source != destination
    rowptr = np.searchsorted(destination[kept], np.arange(graph.num_nodes + 1))
    rows = torch.zeros(graph.num_classes, graph.num_features)
    for label in typical_classes(graph):
        rows[label] = typical_features(graph, label)[0]
    return {
        "nodes": graph.num_nodes,
        "rowptr": as_base64(rowptr, "u4"),
        "source": as_base64(source[kept], _index_kind(graph.num_nodes)),
        "features": _features(graph),
        "typical": as_base64(rows, "f4"),
    }


def typical_classes(graph: Graph) -> list[int]:
    """Return the classes that `typical_features` knows."""
    if graph.y is None or graph.features is None:
        return []
    labels = graph.y if graph.train_mask is None else graph.y[graph.train_mask]
    return [label for label in torch.unique(labels).tolist() if label >= 0]


def _index_kind(count: int) -> str:
    return "u2" if count <= 2**16 else "u4"


def _entries(graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
    """Row pointers, columns and values of the features that are not zero."""
    assert graph.features is not None
    base = graph.features.base
    if isinstance(base, SparseRows):
        return base.indptr, base.indices, base.values
    rows, columns = base.nonzero(as_tuple=True)
    return pointers(rows, len(base)), columns, base[rows, columns]


def _sizes(graph: Graph) -> dict[str, int]:
    """Bytes of the features as one bit per entry, as non-zeros, and as all entries."""
    _, columns, values = _entries(graph)
    nodes, width, ones = graph.num_nodes, graph.num_features, bool((values == 1).all())
    entry = int(_index_kind(width)[1]) + (0 if ones else 4)
    sizes = {"sparse": len(columns) * entry + 4 * nodes, "dense": 4 * nodes * width}
    return sizes | ({"bits": nodes * -(-width // 8)} if ones else {})


def _features(graph: Graph) -> dict[str, Any]:
    """The features in the form that takes the fewest bytes."""
    assert graph.features is not None
    sizes, width = _sizes(graph), graph.num_features
    form = min(sizes, key=lambda name: sizes[name])
    out: dict[str, Any] = {"kind": form, "columns": width}
    if form == "dense":
        return out | {"values": as_base64(graph.features.to_dense(), "f4")}
    if form == "bits":
        ones = graph.features.to_dense().cpu().numpy() != 0
        bits = np.packbits(ones, axis=1, bitorder="little")  # [N, ⌈F / 8⌉], the lowest bit first
        return out | {"bits": as_base64(bits, "u1")}
    rowptr, columns, values = _entries(graph)
    return out | {
        "rowptr": as_base64(rowptr, "u4"),
        "indices": as_base64(columns, _index_kind(width)),
        "values": None if "bits" in sizes else as_base64(values, "f4"),
    }
