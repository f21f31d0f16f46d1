"""What is certified: a model and its graph, read as a chain of layers, or why they cannot be."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fgai.attention import call_model, duplicate, evaluating, model_name, observe, prepared
from fgai.attention.interface import originals
from fgai.bounds.reading import ROUNDING, Reading
from fgai.certificates.chain import Chain, same_as
from fgai.certificates.familiar import unfamiliar
from fgai.graph import Graph
from fgai.graph.fingerprint import fingerprint_of
from fgai.models import as_graph, body_of
from fgai.records import provenance
from fgai.sparse import Adjacency
from fgai.version import versions

PRECISE = (torch.float32, torch.float64)


class _Clean(Protocol):
    """What the layers of a proof read without new neighbours, in float64."""

    adjacency: Adjacency
    exact: list[Reading]
    logits: Tensor


@dataclass(frozen=True, eq=False)
class _Subject:
    """What is certified: a model and its graph, and the model as a chain of layers."""

    model: nn.Module
    original: Graph
    prepared: Graph
    graph: Graph  # prepared, on the CPU
    chain: Chain | str  # on the CPU, or why the model is none
    doubt: str | None  # why nothing can be certified; None where it can
    classes: Tensor  # int64 [N], of the model where it is; of nothing where it is no chain
    observation: Any  # of the model on the CPU; None where nothing can be certified

    def rounded(self, proof: _Clean) -> Tensor:
        """Nodes, bool [N], to which the model, in its own precision, gives something else than the proof."""
        assert isinstance(self.chain, Chain)
        lost = (self.classes != proof.logits.argmax(1)) | _rounded_away(self.chain, self.graph, proof)
        return lost | _apart(self.observation.logits, proof.logits)

    def about(self, command: str) -> dict[str, Any]:
        """Fields of a record that say what it is about."""
        graph, config = self.graph, getattr(self.model, "config", None)
        return {
            "model": {"class": model_name(self.model), "config": config},
            "data": {"name": graph.name, "nodes": graph.num_nodes, "edges": graph.num_edges},
            "version": versions(),
            "provenance": provenance(self.model, fingerprint_of(self.original), command=command),
        }


def _subject(model: nn.Module, data: Any) -> _Subject:
    """Read a model as a chain of layers; it is left as it was."""
    (model,) = originals(model)
    original = as_graph(data)
    graph, classes, observation = prepared(model, original), torch.zeros(0, dtype=torch.long), None
    with evaluating(model), torch.no_grad():
        chain = _chain_of(model, graph)
        if not isinstance(chain, str):
            classes = call_model(model, graph).argmax(1).cpu()
            own, chain = duplicate(model).cpu(), copy.deepcopy(chain).cpu()
    near = graph.to("cpu")
    with torch.no_grad():
        doubt = chain if isinstance(chain, str) else _doubt(own, chain, near)
        if doubt is None:
            observation = observe(own, near)
    return _Subject(model, original, graph, near, chain, doubt, classes, observation)


def _chain_of(model: Any, graph: Graph) -> Chain | str:
    """Return a model in evaluation mode, left as it was, as a chain, or why it is none."""
    if graph.features is None:
        return "the graph has no features"
    if graph.edge_weight is not None or graph.edge_attr is not None or graph.entry_values is not None:
        return "values on edges, guards and replaced values are not followed"
    if graph.batch is not None or graph.links is not None:
        return "only node-level read-outs are followed"
    if body_of(model) != "layers":
        if "torch_geometric.nn" not in sys.modules:  # then no layer is PyG's
            return "only GAT, GATv2 and models of PyG's GATConv and GATv2Conv are followed"
        from fgai.certificates.traced import trace

        return trace(model, graph)
    change = unfamiliar(model)
    if change is not None:
        return f"{change}; only GAT and GATv2 as they are can be followed"
    if model.guard is not None:
        return "weights on edges, guards and replaced values are not followed"
    if not model.is_rowwise:
        return "only node-level read-outs are followed"
    layers = list(model.convs)
    between: list[list[nn.Module]] = [[nn.ELU()] for _ in layers[1:]]
    return Chain([f"convs.{index}" for index in range(len(layers))], layers, [[], *between, []])


def _doubt(model: nn.Module, chain: Chain, graph: Graph) -> str | None:
    """Why nothing can be certified of a chain; None where it can."""
    if not all(weight.dtype in PRECISE for weight in model.parameters()):
        return "weights of less than float32 round too coarsely; use model.float()"
    fault = chain.fault()
    if fault is not None:
        return fault
    if not bool((chain.adjacency(graph).degree > 0).all()):
        return "some nodes have no neighbour, not even themselves; add self-loops"
    if body_of(model) == "layers":  # declared, not traced
        return None
    assert graph.features is not None
    precise = graph.replace(features=graph.features.to("cpu", torch.float64))
    if not same_as(duplicate(model).double(), copy.deepcopy(chain).double(), precise):
        return "its layers, put together again, give something else than the model"
    return None


def _rounded_away(chain: Chain, graph: Graph, proof: _Clean) -> Tensor:
    """Nodes, bool [N], that read something the model computes otherwise than float64.

    Features with a large common offset, say, which the weights cancel: the sums are then all rounding.
    """
    assert graph.features is not None
    source, destination = proof.adjacency.source, proof.adjacency.destination
    lost = torch.zeros(graph.num_nodes, dtype=torch.bool)
    logits = proof.logits
    for exact, (layer, x, out) in zip(proof.exact, chain.runs(graph.features, proof.adjacency), strict=True):
        precise = exact.source[0], exact.destination[0], exact.low
        for own, other in zip(layer.sides(x), precise, strict=True):
            lost |= _apart(own, other)
        lost = lost.index_fill(0, destination[lost[source]], True)
        logits = out
    return lost | _apart(chain.finish(logits), proof.logits)


def _apart(own: Tensor, exact: Tensor) -> Tensor:
    """Rows, bool [N], that are further apart than `ROUNDING` of the largest number."""
    return (own.double() - exact).abs().flatten(1).amax(1) > ROUNDING * exact.abs().max()
