"""The bound on the top-k while every head of a layer moves: beside the one of the explanation vector."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import fgai
from fgai.attention import LayerAttention, observe, prepared
from fgai.certificates.attention import _heads_overlap
from fgai.datasets import planted

NORMS = ("l1", "l2", "linf")


def layer(heads: int, seed: int = 0) -> LayerAttention:
    graph = planted(seed=seed, num_nodes=60, num_classes=3)
    model = fgai.GAT.for_data(graph, hidden_channels=3, heads=heads).eval()
    found = observe(model, prepared(model, graph)).attention.layers[0]
    scores = torch.randn(
        found.values.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    exponent = scores.exp()
    row = owner(found)
    total = torch.zeros(len(found.rowptr) - 1, heads, dtype=torch.float64).index_add(0, row, exponent)
    return found.with_values(exponent / total[row])


def owner(found: LayerAttention) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(found.rowptr) - 1), found.rowptr.diff())


def size(moves: Tensor, norm: str) -> Tensor:
    """Norm of each head's moves at one node, [tries, 1, H]."""
    return torch.linalg.vector_norm(moves, 1 if norm == "l1" else 2, dim=1, keepdim=True)


def moved(found: LayerAttention, node: int, norm: str, radius: float, seed: int) -> Tensor:
    """Ranks of a node's neighbours [tries, neighbours] after moves that swap pairs, and after random ones."""
    rows = slice(int(found.rowptr[node]), int(found.rowptr[node + 1]))
    w = found.values[rows]
    generator = torch.Generator().manual_seed(seed)
    tries = [torch.randn(w.shape, generator=generator, dtype=torch.float64) for _ in range(20)]
    for i, j in itertools.permutations(range(len(w)), 2):
        for share in (0.0, 0.5, 1.0):
            move = torch.zeros_like(w)
            move[i], move[j] = -share, 1 - share
            tries.append(move)
            worst = torch.zeros_like(w)  # the worst of every head by itself
            worst[i], worst[j] = -(w[j] + radius > w[i]).double(), (w[j] + radius <= w[i]).double()
            tries.append(worst)
    moves = torch.stack(tries)
    steps = moves.sign() if norm == "linf" else moves / size(moves, norm).clamp(min=1e-12)
    return (w + radius * steps).clamp(min=1e-300).log().mean(2)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("heads", [1, 3])
def test_no_move_of_all_heads_does_more(heads: int, norm: str) -> None:
    found, k = layer(heads), 2
    tried = broken = 0
    for radius in (0.003, 0.02, 0.1):
        bound = _heads_overlap(found, k, radius, norm)
        for node in range(0, len(bound), 6):
            rows = slice(int(found.rowptr[node]), int(found.rowptr[node + 1]))
            if rows.stop - rows.start <= k:
                continue
            top = found.ranking()[rows].topk(k).indices
            after = moved(found, node, norm, radius, node).topk(k, dim=1).indices
            kept = (after[:, :, None] == top).any(1).double().mean(1)
            assert float(kept.min()) >= float(bound[node]) - 1e-9
            tried, broken = tried + len(kept), broken + int((kept < 1).sum())
    assert tried > 1000 and broken > 100


def test_it_is_never_above_that_of_the_vector_and_equal_with_one_head() -> None:
    graph = planted(seed=1, num_nodes=80, num_classes=3)
    for heads in (1, 4):
        model = fgai.GAT.for_data(graph, hidden_channels=3, heads=heads).eval()
        for held in fgai.certify_attention(model, graph, radius=0.01, k1=2, k2=2).layers:
            assert held.heads_beta2 is not None
            assert bool((held.heads_beta2 <= held.beta2(0.01) + 1e-9).all())
            if held.heads == 1:
                assert torch.equal(held.heads_beta2 == 1, held.beta2(0.01) == 1)


def test_few_neighbours_and_no_radius() -> None:
    found = layer(2)
    assert bool((_heads_overlap(found, 10_000, 0.5, "l1") == 1).all())
    assert bool((_heads_overlap(found, None, 0.5, "l1") == 1).all())
    assert bool((_heads_overlap(found, 2, 0.0, "l1") == 1).all())
    small = found.rowptr.diff() <= 2
    assert bool((_heads_overlap(found, 2, 1.0, "l1")[small] == 1).all())
