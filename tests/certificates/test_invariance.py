"""Injected nodes cannot reorder the first layer; of a transformer, if its positional encodings are kept."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

import fgai
from fgai.attention import observe, prepared
from fgai.certificates import POSITIONAL_CONDITION, certify_injection, invariant_layers
from fgai.graph import Graph, GraphChange
from support import attack_cases as cases

CONDITION = "if positional encodings are kept as computed on the original graph"


def case(kind: type[fgai.GAT] | type[fgai.GT]) -> tuple[nn.Module, Graph]:
    torch.manual_seed(0)
    graph = cases.tiny_graph()
    return kind.for_data(graph).eval(), graph


def order(model: nn.Module, graph: Graph, nodes: int) -> list[list[int]]:
    """The original neighbours of every original node, by rank in the first layer."""
    first = observe(model, graph).attention[0]
    ranks, found = first.ranking(), []
    for node in range(nodes):
        row = slice(*first.rowptr[node : node + 2].tolist())
        listed: Tensor = first.source[row][torch.argsort(ranks[row], descending=True, stable=True)]
        found.append(listed[listed < nodes].tolist())
    return found


def test_encodings_computed_anew_reorder_and_kept_ones_do_not() -> None:
    model, graph = case(fgai.GT)
    count = graph.num_nodes
    clean = order(model, prepared(model, graph), count)
    change = GraphChange(
        endpoints=torch.arange(count).repeat(3, 1), features=torch.zeros(3, graph.num_features)
    )
    larger = change.apply(graph)[0]
    kept = change.apply(prepared(model, graph))[0]
    assert order(model, kept, count) == clean
    anew = Graph.from_edges(larger.edge_index, larger.num_nodes, larger.features.to_dense())
    assert order(model, prepared(model, anew), count) != clean


@pytest.mark.parametrize("kind", [fgai.GAT, fgai.GT])
@pytest.mark.filterwarnings("ignore::fgai.errors.FgaiWarning")
def test_the_condition_stands_wherever_the_claim_does(kind: type[fgai.GAT] | type[fgai.GT]) -> None:
    model, graph = case(kind)
    encoded = kind is fgai.GT
    assert CONDITION == POSITIONAL_CONDITION
    (why, *_) = invariant_layers(model, prepared(model, graph)).values()
    assert why is not None and (why == POSITIONAL_CONDITION) is encoded
    found = certify_injection(model, graph)
    assert (POSITIONAL_CONDITION in found.to_markdown()) is encoded
    assert "positional encodings" in found.promise
    explanation = fgai.explain(model, graph, 3, threat=None)
    out = io.StringIO()
    explanation.show(Console(file=out, width=400))
    assert "injected nodes cannot reorder its neighbours" in out.getvalue()
    assert (f"cannot reorder its neighbours, {POSITIONAL_CONDITION}" in out.getvalue()) is encoded
