"""Limits change no bit on their own graph, whichever kernels run."""

from __future__ import annotations

import pytest
import torch

from fgai import GAT, GT, GATv2, limit, load_dataset
from fgai.attention import observe

GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=GPU)])
@pytest.mark.parametrize("kind", (GAT, GATv2, GT))
def test_no_bit_changes_whatever_kernels_run(kind, device: str) -> None:
    """Fused or step by step, sums are rounded otherwise; neither way is anything clipped."""
    graph = load_dataset("planted").to(device)
    torch.manual_seed(0)
    model = kind.for_data(graph).to(device).eval()
    limited, graph = limit(model, graph, 0.0, shrink=0.0), model.prepare(graph)
    for heads in ("each", "mean"):
        one, two = observe(model, graph, heads=heads), observe(limited, graph, heads=heads)
        assert torch.equal(one.logits, two.logits)
        for before, after in zip(one.attention, two.attention, strict=True):
            assert torch.equal(before.values, after.values)
