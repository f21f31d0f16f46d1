"""The script of the page computes what PyTorch computes: logits and attention after any change."""

from __future__ import annotations

import os
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fgai import datasets
from fgai.graph import Graph
from fgai.reports.whatif.answer import in_browser
from fgai.training import limit, load_model, make_faithful, train, untrained_model
from support.graph_cases import small_data
from support.whatif_cases import computed, largest_difference, random_change

pytestmark = pytest.mark.browser
CLOSE = 1e-4


def compare(
    browser: Any, graph: Graph, models: dict[str, nn.Module], count: int
) -> dict[str, tuple[float, float]]:
    """Per model the largest difference over `count` random changes and the median of milliseconds."""
    rng, out = np.random.default_rng(0), {}
    changes = [random_change(graph, next(iter(models.values())), rng) for _ in range(count)]
    for (name, model), got in zip(
        models.items(), computed(browser, graph, [*models.values()], changes), strict=True
    ):
        assert in_browser(model, graph)
        worst = max(
            largest_difference(model, graph, *pair) for pair in zip(changes, got["views"], strict=True)
        )
        out[name] = worst, median(got["seconds"])
    return out


def test_planted(browser: Any) -> None:
    graph = datasets.load_dataset("planted")
    models = {name: load_model(f"planted-{name}") for name in ("gat", "fgai")}
    assert all(worst < CLOSE for worst, _ in compare(browser, graph, models, 20).values())


def test_every_form_of_features_and_layers(browser: Any) -> None:
    dense = small_data()
    binary = dense.replace(features=type(dense.features).dense((dense.features.base > 0.5).float()))
    wide = torch.zeros(40, 700).index_put((torch.arange(40), 17 * torch.arange(40)), torch.arange(40.0) + 2)
    for graph in (dense, binary, Graph.from_edges(dense.edge_index, 40, wide, y=dense.y)):
        models = {
            f"{kind} {options}": untrained_model(kind, graph, hidden_channels=3, heads=2, **options)
            for kind in ("GAT", "GATv2")
            for options in ({"num_layers": 3}, {"norm": "layer"}, {"num_layers": 1})
        }
        models["limited"] = limit(untrained_model("GATv2", graph, norm="layer"), graph, 0.1, shrink=0.3)
        for weight in (
            p for model in models.values() for name, p in model.named_parameters() if "norm" in name
        ):
            torch.nn.init.uniform_(weight, -2, 2)
        for worst, _ in compare(browser, graph, models, 6).values():
            assert worst < CLOSE


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("name", ["planted", "cora", "amazon-photo"])
def test_two_hundred_changes(browser: Any, name: str) -> None:
    """Prints the largest difference and the median time of an update."""
    if name != "planted" and "FGAI_DATA" not in os.environ:
        pytest.skip("needs FGAI_DATA")
    graph, models = datasets.load_dataset(name), {}
    for kind in ("GAT", "GATv2"):
        vanilla = train(kind, graph, epochs=60, progress=False)
        models[kind] = vanilla
        models[f"{kind} behind limits"] = limit(vanilla, graph)
        models[f"{kind} faithful"] = make_faithful(vanilla, graph, epochs=20, progress=False, check=False)
    for kind, (worst, milliseconds) in compare(browser, graph, models, 200).items():
        print(f"{name}, {kind}: largest difference {worst:.1e}, median update {milliseconds:.2f} ms")
        assert worst < CLOSE
