"""Training: the same by seed, the best weights kept, resumed bit by bit, saved and read back."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GATConv, SuperGATConv

from fgai.errors import InputError
from fgai.training import make_faithful, train
from support.training_cases import GRAPH, SHORT, assert_same_weights, fresh


def global_state() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002


class TestTrain:
    @pytest.mark.parametrize("name", ["GAT", "GATv2", "GT", "GCN"])
    def test_same_seed_same_weights(self, name: str) -> None:
        runs = [train(fresh(name), GRAPH, seed=seed, **SHORT) for seed in (3, 3, 4)]
        assert_same_weights(runs[0], runs[1])
        assert runs[0].history.terms == runs[1].history.terms
        assert runs[0].history.terms != runs[2].history.terms

    def test_given_model_and_global_generators_are_untouched(self) -> None:
        model = fresh().train()
        second = fresh()
        before = global_state()
        trained = train(model, GRAPH, **SHORT)
        make_faithful(trained, GRAPH, **SHORT)
        assert global_state() == before
        assert_same_weights(model, second)
        assert model.training and not trained.training
        assert not hasattr(model, "history")

    def test_it_learns(self) -> None:
        model = train(fresh(dropout=0.2), GRAPH, epochs=60, lr=0.03, progress=False)
        assert GRAPH.y is not None and GRAPH.test_mask is not None
        right = (model(GRAPH).argmax(1) == GRAPH.y)[GRAPH.test_mask].float().mean()
        assert right > 0.6
        assert model.history.terms[-1]["cross_entropy"] < model.history.terms[0]["cross_entropy"]

    def test_layers_that_keep_tensors_of_their_last_pass_are_copied(self) -> None:
        class Mine(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = SuperGATConv(6, 3)

            def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
                return self.conv(x, edge_index)

        trained = train(Mine(), GRAPH, **SHORT)
        assert not trained.conv.att_x.is_leaf
        faithful = make_faithful(trained, GRAPH, **SHORT)
        assert len(faithful.history.terms) == SHORT["epochs"] and not trained.conv.att_x.is_leaf

    def test_users_model_and_data_train_too(self) -> None:
        class Mine(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv = GATConv(6, 3)

            def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
                return self.conv(x, edge_index)

        torch.manual_seed(0)
        model = Mine()
        trained = train(model, GRAPH.to_data(), **SHORT)
        assert isinstance(trained, Mine)
        assert len(trained.history.epoch_seconds) == 4

    def test_bad_settings_and_data(self) -> None:
        for changes, message in (
            ({"epochs": 0}, "`epochs`"),
            ({"lr": -1.0}, "`lr`"),
            ({"patience": 0}, "`patience`"),
        ):
            with pytest.raises(InputError, match=message):
                train(fresh(), GRAPH, **changes)
        with pytest.raises(InputError, match="no labels"):
            train(fresh(), GRAPH.replace(y=None))
        with pytest.raises(InputError, match="`val_mask`"):
            train(fresh(), GRAPH.replace(val_mask=None))
        assert GRAPH.y is not None and GRAPH.train_mask is not None
        holes = GRAPH.y.clone()
        holes[GRAPH.train_mask.nonzero()[0]] = -1
        with pytest.raises(InputError, match="1 nodes without a label"):
            train(fresh(), GRAPH.replace(y=holes))


class TestFaithful:
    def test_same_seed_same_weights_and_vanilla_is_only_read(self) -> None:
        vanilla = train(fresh(), GRAPH, epochs=10, progress=False)
        vanilla.zero_grad(set_to_none=True)
        before = {k: v.clone() for k, v in vanilla.state_dict().items()}
        runs = [make_faithful(vanilla, GRAPH, seed=seed, nodes=3, edges=4, **SHORT) for seed in (1, 1, 2)]
        assert_same_weights(runs[0], runs[1])
        assert runs[0].history.terms != runs[2].history.terms
        for name, value in vanilla.state_dict().items():
            assert torch.equal(value, before[name])
        assert all(p.requires_grad for p in vanilla.parameters())
        assert all(p.grad is None for p in vanilla.parameters())

    def test_first_epoch_starts_at_the_vanilla_model(self) -> None:
        vanilla = train(fresh(), GRAPH, epochs=10, progress=False)
        faithful = make_faithful(
            vanilla, GRAPH, nodes=3, edges=4, epochs=1, clip_share=0.0, shrink=0.0, progress=False
        )
        first = faithful.history.terms[0]
        assert first["closeness"] == pytest.approx(0.0, abs=1e-6)
        assert first["similarity"] == pytest.approx(0.0, abs=1e-5)
        assert first["prediction_stability"] > 0

    def test_unknown_settings_are_refused(self) -> None:
        with pytest.raises(InputError, match=r"`settings` must be one of .* got 'warmth'"):
            make_faithful(fresh(), GRAPH, warmth=3)
        with pytest.raises(InputError, match="did you mean 'similarity'"):
            make_faithful(fresh(), GRAPH, similarty=3)
