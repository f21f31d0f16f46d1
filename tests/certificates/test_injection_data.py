"""Certificates against injection on real graphs: thousands of attacks of the threat break none of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fgai
from fgai.attention import call_model, entry_limits, prepared
from fgai.certificates import InjectionCertificate
from fgai.graph import Graph

ATTACKS = 10_000


def wirings(nodes: Tensor, each: int, stream: torch.Generator) -> Tensor:
    """Endpoints [M, each] of new nodes so that every node, but for a remainder, gains one of them."""
    mixed = nodes[torch.randperm(len(nodes), generator=stream)]
    return mixed[: len(mixed) - len(mixed) % each].view(-1, each)


def attacked(
    model: nn.Module, graph: Graph, found: InjectionCertificate, nodes: Tensor, seed: int
) -> Iterator[Graph]:
    """Graphs in which each of `nodes` has one new neighbour: loud, in the corners, or climbed."""
    stream = torch.Generator().manual_seed(seed)
    ends = wirings(nodes, 1 + seed % 3, stream)
    width = sum(limits.low.numel() for limits in entry_limits(model))
    blank = torch.zeros(len(ends), graph.num_features)
    loud = 10.0 ** (seed % 5) * torch.randn(len(ends), graph.num_features, generator=stream)
    yield graph.inject(ends, loud)[0]
    base = graph.inject(ends, blank)[0]
    yield base.replace(entry_values=torch.rand(len(ends), width, generator=stream).round())
    entry_values = torch.rand(len(ends), width, generator=stream).requires_grad_()
    for _ in range(5):
        logits = call_model(model, base.replace(entry_values=entry_values))[: graph.num_nodes]
        lead = logits.gather(1, found.classes[:, None]).squeeze(1) - _best_other(logits, found.classes)
        (slope,) = torch.autograd.grad(lead[nodes].clamp(min=-1).sum(), entry_values)
        entry_values = (entry_values - 0.3 * slope.sign()).clamp(0, 1).detach().requires_grad_()
        yield base.replace(entry_values=entry_values.detach())


def _best_other(logits: Tensor, classes: Tensor) -> Tensor:
    mine = torch.nn.functional.one_hot(classes, logits.shape[1]).bool()
    return logits.masked_fill(mine, -torch.inf).amax(1)


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("kind", ["GAT", "GATv2"])
@pytest.mark.parametrize("name", ["planted", "cora", "amazon-photo"])
def test_ten_thousand_attacks_break_no_certificate(name: str, kind: str, data_root: Path) -> None:
    data = fgai.load_dataset(name, root=None if name == "planted" else data_root)
    model = fgai.train(kind, data, epochs=60, progress=False)
    model = fgai.limit(model, data, 0.3, shrink=0.5)  # tight, so that there is something to break
    graph, seed = prepared(model, data), 0
    every = torch.arange(graph.num_nodes)
    proofs = {
        where: fgai.certify_injection(model, data, neighbours=1, where=where) for where in ("any", "direct")
    }
    for where, found in proofs.items():
        held = found.certified.nonzero().flatten()
        assert len(held) > 0
        tried = 0
        while tried < ATTACKS:
            nodes = every if where == "any" else _apart(graph, held, seed)
            for change in attacked(model, graph, found, nodes, seed):
                with torch.no_grad():
                    classes = call_model(model, change)[: graph.num_nodes].argmax(1)
                asked = held if where == "any" else nodes
                assert torch.equal(classes[asked], found.classes[asked])
                tried += len(asked)
            seed += 1


def _apart(graph: Graph, held: Tensor, seed: int) -> Tensor:
    """Certified nodes that neither are neighbours nor share one: within its reach each alone gains some."""
    order = held[torch.randperm(len(held), generator=torch.Generator().manual_seed(seed))]
    taken = torch.zeros(graph.num_nodes, dtype=torch.bool)
    rowptr, source, chosen = graph.adjacency.rowptr, graph.adjacency.source, []
    for node in order.tolist():
        around = source[rowptr[node] : rowptr[node + 1]]
        if not bool(taken[around].any() | taken[node]):
            chosen.append(node)
            taken[around] = True
            taken[node] = True
    return torch.tensor(chosen)
