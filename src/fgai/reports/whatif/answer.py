"""`WhatIf`: how a change of the graph changes the attention and the class of one node in several models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch_geometric.utils import k_hop_subgraph

from fgai.attacks import Budget, Objective, PGDInjection
from fgai.attention import AttentionMap, Layerwise, limits_of, model_name, observe, prepared, stages_of
from fgai.attention.interface import originals
from fgai.certificates import InjectionCertificate, certify_injection
from fgai.checks import whole
from fgai.errors import InputError, collect_warnings
from fgai.explanations.node import check_node
from fgai.graph import ChangeRecord, Graph
from fgai.graph.fingerprint import fingerprint
from fgai.models import as_graph
from fgai.models.base import body_of
from fgai.objectives import Clean
from fgai.records import weights_hash
from fgai.reports.whatif.payload import LARGEST, graph_values, in_browser, model_values, typical_classes
from fgai.sparse import Adjacency
from fgai.tasks import task_of
from fgai.threads import with_gradients
from fgai.typed import typed

NEIGHBOURS = (1, 2, 5)
"""Numbers of injected neighbours that classes are certified against."""
STEPS = 40
"""Gradient steps of the search for the worst node."""


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

    Raises:
        InputError: no models, or not node classification.

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

        Raises:
            CheckpointError: the change is for another model or graph, or cannot be applied.
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
