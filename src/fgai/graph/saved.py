"""`ChangeRecord`: a change of a graph made for one node, as a JSON file that can be replayed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NotRequired, Self, TypedDict

import torch
from torch import Tensor, nn

from fgai.errors import CheckpointError
from fgai.graph.change import GraphChange, both_ways
from fgai.graph.fingerprint import fingerprint
from fgai.graph.graph import Graph
from fgai.records import Document, weights_hash
from fgai.typed import typed


class InjectedNode(TypedDict):
    """A new node in a file: its edges, and one of `copy`, `typical` and `features`."""

    edges: list[int]  # existing nodes it is joined to, in both directions
    strength: float  # its features are multiplied by this
    copy: NotRequired[int]  # the node whose features it gets
    typical: NotRequired[int]  # mean features of the training nodes of this class, see `typical_features`
    features: NotRequired[list[float]]  # F numbers


@typed
@dataclass(frozen=True, kw_only=True)
class ChangeRecord(Document):
    """Edges to remove and to add, and nodes to inject, around one node, for one model and one graph.

    The what-if page writes it, `fgai evaluate --change FILE` and `fgai.explain(attack=...)` replay it:

        {"kind": "change", "schema": 1, "model": "9f…", "graph": "03…", "node": 24,
         "removed_edges": [[24, 7]], "added_edges": [[24, 90]],
         "injected": [{"copy": 3, "strength": 0.5, "edges": [24, 7]},
                      {"typical": 2, "strength": 1.0, "edges": [24]},
                      {"features": [0.0, 1.5, …], "strength": 1.0, "edges": [24]}]}

    `model` is its `weights_hash`, `graph` the `fingerprint` of the graph as it was loaded, `node` the one
    that was looked at. Edges are removed and added in both directions, also where the graph has only one.
    Changes are applied in the order of the fields; injected nodes get the numbers N, N + 1, … A `checksum`
    may be added.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.GAT.for_data(data)
        >>> new = InjectedNode(copy=3, strength=1.0, edges=[24])
        >>> change = ChangeRecord.of(model, data, 24, injected=[new])
        >>> ChangeRecord.from_dict(change.to_dict()).apply(model, data).num_nodes - data.num_nodes
        1
    """

    KIND: ClassVar[str] = "change"

    model: str
    graph: str
    node: int
    removed_edges: list[list[int]] = field(default_factory=list)
    added_edges: list[list[int]] = field(default_factory=list)
    injected: list[InjectedNode] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        graph: Graph,
        node: int,
        *,
        removed_edges: Sequence[Sequence[int]] = (),
        added_edges: Sequence[Sequence[int]] = (),
        injected: Sequence[InjectedNode] = (),
    ) -> Self:
        """Return the record of a change for this model and this graph."""
        return cls(
            model=weights_hash(model),
            graph=fingerprint(graph),
            node=node,
            removed_edges=[list(pair) for pair in removed_edges],
            added_edges=[list(pair) for pair in added_edges],
            injected=list(injected),
        )

    def apply(self, model: nn.Module, graph: Graph) -> Graph:
        """Check everything and return the changed graph; `graph` is as it was loaded, not prepared.

        `CheckpointError` for another model or graph, an unknown node, an edge to remove that is not there or
        to add that is there, or features that do not fit.
        """
        for kind, own, recorded in (
            ("model", weights_hash(model), self.model),
            ("graph", fingerprint(graph), self.graph),
        ):
            if own != recorded:
                both = f"({recorded[:8]}…, this one is {own[:8]}…)"
                raise CheckpointError(f"the change was made with another {kind} {both}; nothing was replayed")
        self._check(graph)
        features = [_features(node, graph) for node in self.injected]
        removed, added = (_pairs(pairs, graph) for pairs in (self.removed_edges, self.added_edges))
        graph, _ = GraphChange(removed=removed, edges=added).apply(graph)
        for node, row in zip(self.injected, features, strict=True):
            graph, _ = graph.inject(torch.tensor([node["edges"]]), row)
        return graph

    def _check(self, graph: Graph) -> None:
        nodes = [self.node]
        pairs = [*self.removed_edges, *self.added_edges]
        for pair in pairs:
            if len(pair) != 2 or pair[0] == pair[1]:
                raise CheckpointError(f"an edge of the change must join two nodes, got {pair[:3]}")
            nodes += pair
        if len({frozenset(pair) for pair in pairs}) < len(pairs):
            raise CheckpointError("edges of the change must be distinct, but one is there twice")
        for new in self.injected:
            nodes += [*new["edges"], *([new["copy"]] if "copy" in new else [])]
            if not new["edges"] or len(set(new["edges"])) < len(new["edges"]):
                raise CheckpointError(f"an injected node must have distinct edges, got {new['edges'][:10]}")
            if not abs(new["strength"]) <= sys.float_info.max:
                raise CheckpointError(f"`strength` of an injected node must be finite, got {new['strength']}")
        if unknown := [node for node in nodes if not 0 <= node < graph.num_nodes]:
            known = f"the nodes of {graph.name!r} are 0 to {graph.num_nodes - 1}"
            raise CheckpointError(f"the change names node {unknown[0]}, {known}; nothing was replayed")
        for pair in pairs:
            present = bool(both_ways(graph, _pairs([pair], graph)).numel())
            if present != (pair in self.removed_edges):
                words = "adds an edge that is there" if present else "removes an edge that is not there"
                raise CheckpointError(f"the change {words}, {pair[0]} – {pair[1]}; nothing was replayed")


@typed
def typical_features(graph: Graph, label: int) -> Tensor:
    """Return the mean features [1, F] of a class's training nodes; `CheckpointError` without any."""
    of_class = None if graph.y is None or not 0 <= label < graph.num_classes else graph.y == label
    if of_class is not None and graph.train_mask is not None:
        of_class = of_class & graph.train_mask
    if of_class is None or graph.features is None or not bool(of_class.any()):
        raise CheckpointError(f"{graph.name!r} has no training nodes of class {label} with features")
    return graph.features.select(of_class.nonzero().flatten()).mean(0, keepdim=True)


def _features(new: InjectedNode, graph: Graph) -> Tensor:
    if len(new) != 3 or graph.features is None:
        raise CheckpointError(
            "each injected node needs one of `copy`, `typical`, `features`, and the graph features"
        )
    if "copy" in new:
        rows = graph.features.select(torch.tensor([new["copy"]], device=graph.device))
    elif "typical" in new:
        rows = typical_features(graph, new["typical"])
    else:
        values = new["features"]
        if len(values) != graph.num_features or not all(abs(x) <= sys.float_info.max for x in values):
            width = graph.num_features
            raise CheckpointError(f"an injected node must have {width} finite features, got {len(values)}")
        rows = torch.tensor([values], dtype=graph.features.dtype, device=graph.device)
    rows = rows * new["strength"]
    if not bool(rows.isfinite().all()):
        strength = f"`strength` {new['strength']:.3g} must be finite in {graph.features.dtype}"
        raise CheckpointError(f"features of an injected node times {strength}")
    return rows


def _pairs(pairs: Sequence[Sequence[int]], graph: Graph) -> Tensor:
    return torch.tensor(pairs, dtype=torch.long, device=graph.device).reshape(-1, 2).T
