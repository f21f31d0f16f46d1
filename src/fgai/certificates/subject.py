"""The subject of an injection certificate: a model and its graph, and the model as a chain of layers."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fgai.attention import call_model, duplicate, evaluating, observe, prepared
from fgai.attention.interface import originals
from fgai.certificates.base import record_fields
from fgai.certificates.chain import Chain, same_outputs
from fgai.certificates.integrity import find_alteration
from fgai.graph import Graph
from fgai.models import as_graph, body_of

PRECISE = (torch.float32, torch.float64)


@dataclass(frozen=True, eq=False)
class _Subject:
    """A model and its graph; with a `problem`, which says why, nothing about classes can be certified."""

    model: nn.Module
    original: Graph
    prepared: Graph
    graph: Graph  # prepared, on the CPU
    chain: Chain | None  # on the CPU; None if the model is no chain
    problem: str | None
    classes: Tensor  # int64 [N], of the model on its own device; -1 with a problem
    observation: Any  # of the model on the CPU; None with a problem

    def fields(self, command: str) -> dict[str, Any]:
        """Return the fields of a record that name the model, the data and the command."""
        return record_fields(self.model, self.graph, self.original, command)


def _subject(model: nn.Module, data: Any) -> _Subject:
    """Read a model as a chain of layers; it is left as it was."""
    (model,) = originals(model)
    original = as_graph(data)
    graph, observation = prepared(model, original), None
    near, classes = graph.to("cpu"), torch.full((graph.num_nodes,), -1)
    with evaluating(model), torch.no_grad():
        chain = _chain_of(model, graph)
        if isinstance(chain, str):
            return _Subject(model, original, graph, near, None, chain, classes, None)
        own_classes = call_model(model, graph).argmax(1).cpu()
        own, chain = duplicate(model).cpu(), copy.deepcopy(chain).cpu()
    with torch.no_grad():
        problem = _problem(own, chain, near)
        if problem is None:
            classes, observation = own_classes, observe(own, near)
    return _Subject(model, original, graph, near, chain, problem, classes, observation)


def _chain_of(model: Any, graph: Graph) -> Chain | str:
    """Return a model in evaluation mode as a chain, or why it is none."""
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
    if (alteration := find_alteration(model)) is not None:
        return f"{alteration}; only GAT and GATv2 as they are can be followed"
    if model.guard is not None:
        return "weights on edges, guards and replaced values are not followed"
    if not model.is_rowwise:
        return "only node-level read-outs are followed"
    layers = list(model.convs)
    between: list[list[nn.Module]] = [[nn.ELU()] for _ in layers[1:]]
    return Chain([f"convs.{index}" for index in range(len(layers))], layers, [[], *between, []])


def _problem(model: nn.Module, chain: Chain, graph: Graph) -> str | None:
    """Say why nothing can be certified about a chain; None if it can."""
    if not all(weight.dtype in PRECISE for weight in model.parameters()):
        return "weights of less than float32 round too coarsely; use model.float()"
    if (problem := chain.problem()) is not None:
        return problem
    if not bool((chain.adjacency(graph).degree > 0).all()):
        return "some nodes have no neighbour, not even themselves; add self-loops"
    if body_of(model) == "layers":  # declared, not traced
        return None
    assert graph.features is not None
    precise = graph.replace(features=graph.features.to("cpu", torch.float64))
    if not same_outputs(duplicate(model).double(), copy.deepcopy(chain).double(), precise):
        return "its layers, put together again, give something else than the model"
    return None
