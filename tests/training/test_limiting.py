"""`limit`, `clipped`, and trainings through limits."""

from __future__ import annotations

import contextlib
import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv

from fgai import GAT, GT, GATv2
from fgai.attention import add_limits, entry_limits, limits_of, measuring, observe, prepared
from fgai.errors import AttentionError, FgaiWarning, InputError
from fgai.evaluation import evaluate
from fgai.graph import Graph
from fgai.metrics import rank_correlation
from fgai.training import (
    FaithfulRecipe,
    FaithfulSettings,
    count_clipped,
    fit,
    limit,
    load_model,
    make_faithful,
    save_model,
    train,
    train_method,
)
from fgai.training.limiting import set_ranges
from fgai.training.resume import copy_model
from support.graph_cases import small_data

QUICK = {"epochs": 6, "nodes": 4, "edges": 3, "progress": False}


class Mine(nn.Module):
    """A user's model."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.first = GATConv(features, 4, heads=2)
        self.second = GATConv(8, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x, edge_index)), edge_index)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def data() -> Graph:
    return small_data(nodes=80)


@pytest.fixture(scope="module")
def model(data: Graph) -> GAT:
    return train(GAT.for_data(data), data, epochs=10, progress=False)


def whole_ranges(model: nn.Module, data: Graph, **options: Any) -> Any:
    """Limits that leave no node out."""
    return limit(model, data, 0.0, shrink=0.0, **options)


def test_returns_a_copy_that_says_the_same(model: GAT, data: Graph) -> None:
    before = copy.deepcopy(model.state_dict())
    limited = whole_ranges(model, data)
    assert type(limited) is GAT and limited is not model and not limits_of(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    ready = prepared(model, data)
    assert torch.equal(observe(model, ready).logits, observe(limited, ready).logits)
    assert count_clipped(limited, data).count == 0 and count_clipped(limited, data).share == 0.0


def test_a_users_model(data: Graph) -> None:
    torch.manual_seed(0)
    model = Mine(data.num_features, data.num_classes).eval()
    limited = whole_ranges(model, data)
    seen = (data.features.to_dense(), data.edge_index)  # type: ignore[union-attr]
    assert torch.equal(model(*seen), limited(*seen))
    assert not torch.equal(model(1e4 * seen[0], seen[1]), limited(1e4 * seen[0], seen[1]))


def test_clip_shares(model: GAT, data: Graph) -> None:
    shares = [
        count_clipped(limit(model, data, share, shrink=0.0), data).share for share in (0.0, 0.02, 0.1, 0.3)
    ]
    assert shares[0] == 0.0 and sorted(shares) == shares and shares[-1] > shares[1]
    chosen = limit(model, data, "auto", shrink=0.0)
    assert data.val_mask is not None and data.y is not None
    right = [
        float((observe(m, prepared(m, data)).logits.argmax(1) == data.y)[data.val_mask].double().mean())
        for m in (model, chosen)
    ]
    assert right[1] >= right[0] - 0.002


def test_shrinking_moves_large_vectors_and_keeps_their_direction(model: GAT, data: Graph) -> None:
    shares = [count_clipped(limit(model, data, 0.0, shrink=shrink), data).share for shrink in (0.0, 0.1, 0.4)]
    assert shares[0] == 0.0 < shares[1] < shares[2]
    soft = limit(model, data, 0.0, shrink=0.1)
    found = count_clipped(soft, data)
    assert found.share == pytest.approx(found.reference_share, abs=0.02)
    ready = prepared(model, data)
    one, two = observe(model, ready, heads="mean").attention, observe(soft, ready, heads="mean").attention
    assert min(rank_correlation(a.heads(), b.heads(), a.rowptr) for a, b in zip(one, two, strict=True)) > 0.9


def test_another_graph_is_out_of_range(model: GAT, data: Graph) -> None:
    limited = limit(model, data, 0.01, shrink=0.05)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        evaluate(limited, data, threat="random")
        assert not [w for w in caught if "out-of-range" in str(w.message)]
        assert data.features is not None
        other = data.replace(features=data.features.map(lambda values: 5 * values))
        evaluate(limited, other, threat="random")
    assert [w for w in caught if "out-of-range" in str(w.message)]


def test_ranges_of_some_nodes(model: GAT, data: Graph) -> None:
    few = whole_ranges(model, data, nodes=data.train_mask)
    whole = whole_ranges(model, data)
    for some, every in zip(limits_of(few), limits_of(whole), strict=True):
        assert bool((some.high - some.low <= every.high - every.low + 1e-6).all())
    assert count_clipped(few, data).count > 0


def test_limits_are_measured_anew(model: GAT, data: Graph) -> None:
    again = whole_ranges(limit(model, data, 0.2), data)
    for one, two in zip(limits_of(again), limits_of(whole_ranges(model, data)), strict=True):
        assert torch.equal(one.low, two.low) and torch.equal(one.high, two.high)


def test_a_graph_of_one_node(model: GAT) -> None:
    torch.manual_seed(0)
    lonely = Graph.from_edges(torch.zeros(2, 0, dtype=torch.long), 1, torch.ones(1, 6))
    limited = whole_ranges(GAT(6, 3), lonely)
    assert count_clipped(limited, lonely).count == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shrink": 1.0}, "`shrink` must be"),
        ({"shrink": -0.1}, "`shrink` must be"),
        ({"clip_share": 0.5}, "below 0.5"),
        ({"clip_share": -0.1}, "at least 0"),
        ({"clip_share": "some"}, "or 'auto'"),
        ({"nodes": torch.zeros(80, dtype=torch.bool)}, "empty"),
        ({"nodes": torch.zeros(7, dtype=torch.bool)}, r"shape \[80\]"),
        ({"nodes": torch.tensor([99])}, r"0\.\.79"),
    ],
)
def test_bad_input(model: GAT, data: Graph, changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        limit(model, data, **changes)  # type: ignore[arg-type]


def test_models_without_attention_or_limits(model: GAT, data: Graph) -> None:
    with pytest.raises(AttentionError):
        limit(nn.Linear(6, 3), data)
    with pytest.raises(InputError, match="has no limits"):
        count_clipped(model, data)


def test_saved_and_loaded(model: GAT, data: Graph, tmp_path: Path) -> None:
    limited = limit(model, data, 0.05)
    again = load_model(save_model(limited, tmp_path / "model"))
    attacked, _ = prepared(model, data).inject(torch.tensor([[0, 1]]), torch.full((1, 6), 50.0))
    assert torch.equal(limited(attacked), again(attacked))
    assert len(limits_of(again)) == 6
    assert not limits_of(load_model(save_model(model, tmp_path / "plain")))


def test_a_limited_model_of_another_width_is_refused(model: GAT, data: Graph) -> None:
    state = limit(model, data).state_dict()
    other = GAT(6, 3, hidden_channels=4)
    add_limits(other)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(state)


@pytest.mark.many
@pytest.mark.parametrize("kind", [GAT, GATv2, GT, Mine])
def test_faithful_models_have_the_ranges_of_their_own_weights(kind: Any, data: Graph) -> None:
    torch.manual_seed(0)
    fresh = Mine(data.num_features, data.num_classes) if kind is Mine else kind.for_data(data)
    vanilla = train(fresh, data, epochs=5, progress=False)
    faithful = make_faithful(vanilla, data, clip_share=0.05, shrink=0.1, **QUICK)
    kept = [limits.high.clone() for limits in limits_of(faithful)]
    assert kept and all(bool(high.isfinite().all()) for high in kept)
    graph = prepared(faithful, data)
    with measuring(faithful, 0.05, shrink=0.1):
        observe(faithful, graph)
    assert all(torch.equal(high, limits.high) for high, limits in zip(kept, limits_of(faithful), strict=True))
    assert not limits_of(make_faithful(vanilla, data, limits=False, **QUICK))


def test_resumed_equals_uninterrupted(model: GAT, data: Graph, tmp_path: Path) -> None:
    settings = FaithfulSettings(nodes=4, edges=3, epochs=10, shrink=0.1, lr=0.005)
    whole = make_faithful(model, data, settings, seed=3, progress=False)
    graph, label = prepared(model, data), "the same run"

    class KilledError(Exception):
        pass

    class Killed(FaithfulRecipe):
        def losses(self, net: nn.Module, epoch: int) -> Any:
            if epoch == 4:
                raise KilledError
            yield from super().losses(net, epoch)

    for kind in (Killed, FaithfulRecipe):
        other = copy_model(model)
        add_limits(other)
        with contextlib.suppress(KilledError):
            fit(
                other, kind(model, graph, settings), settings.train_config, seed=3, progress=False,
                checkpoint=tmp_path, checkpoint_every=2, fingerprint=label,
            )  # fmt: skip
    set_ranges(other, graph, settings.clip_share, settings.shrink)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_adversarial_training_with_limits(model: GAT, data: Graph) -> None:
    made = train_method(
        "harden", "GAT", data, vanilla=model, progress=False,
        settings={"epochs": 6, "nodes": 4, "edges": 3, "shrink": 0.0},
    )  # fmt: skip
    assert limits_of(made) and 0 < count_clipped(made, data).share < 0.06
    assert entry_limits(made) and not limits_of(model)


def test_layers_without_limits_are_trained_without(data: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    vanilla = train(GAT.for_data(data), data, epochs=2, progress=False)
    monkeypatch.setattr("fgai.training.faithful.can_be_limited", lambda model: False)
    with pytest.warns(FgaiWarning, match="cannot be limited"):
        faithful = make_faithful(vanilla, data, **QUICK)
    assert not limits_of(faithful)
