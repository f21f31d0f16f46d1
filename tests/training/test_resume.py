"""A training that was stopped goes on bit by bit as if it had not been."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as pack_tensors
from torch import Tensor, nn

from fgai.attention import prepared
from fgai.errors import CheckpointError
from fgai.training import (
    AdversarialRecipe,
    FaithfulRecipe,
    FaithfulSettings,
    HardenSettings,
    History,
    TrainConfig,
    VanillaRecipe,
    fit,
    make_faithful,
    train,
)
from fgai.training.loop import _delayed_interrupt
from support.graph_cases import small_data
from support.training_cases import GRAPH, Calling, assert_same_weights, fresh, header_of


def recipes(kind: str) -> tuple[nn.Module, Any]:
    """A model and a recipe for it, made afresh as after a restart."""
    vanilla = fresh()
    graph = prepared(vanilla, GRAPH)
    budget = {"nodes": 3, "edges": 4}
    match kind:
        case "vanilla":
            return vanilla, VanillaRecipe(graph)
        case "adversarial":
            return vanilla, AdversarialRecipe(graph, HardenSettings(**budget))
        case _:
            return fresh(), FaithfulRecipe(vanilla, graph, FaithfulSettings(**budget))


@cache
def uninterrupted(kind: str) -> tuple[nn.Module, History]:
    model, recipe = recipes(kind)
    return model, fit(model, recipe, TestResume.CONFIG, seed=2, progress=False)


class KilledError(Exception):
    pass


SLOW = [pytest.param(after, marks=pytest.mark.slow) for after in (0, 1, 4)]


class TestResume:
    CONFIG = TrainConfig(epochs=6, validate_every=2, lr=0.02)

    @pytest.mark.many
    @pytest.mark.parametrize("after", [2, 3, 5, *SLOW])
    @pytest.mark.parametrize("kind", ["vanilla", "adversarial", "faithful"])
    def test_killed_after_any_epoch_gives_the_same_weights(
        self, kind: str, after: int, tmp_path: Path
    ) -> None:
        whole, history = uninterrupted(kind)

        def kill(epoch: int, terms: dict[str, float]) -> None:
            if epoch == after:
                raise KilledError

        options: dict[str, Any] = {
            "seed": 2,
            "progress": False,
            "checkpoint": tmp_path,
            "checkpoint_every": 2,
        }
        model, recipe = recipes(kind)
        with pytest.raises(KilledError):
            fit(model, recipe, self.CONFIG, tracker=Calling(kill), **options)
        model, recipe = recipes(kind)
        resumed = fit(model, recipe, self.CONFIG, **options)
        assert_same_weights(model, whole)
        assert resumed.terms == history.terms and resumed.scores == history.scores
        assert resumed.best_epoch == history.best_epoch

    def test_interrupt_is_held_to_the_end_of_the_epoch(self, tmp_path: Path) -> None:
        whole = train(fresh(), GRAPH, config=self.CONFIG, progress=False)

        class Pressed(VanillaRecipe):
            def losses(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
                if epoch == 2:
                    os.kill(os.getpid(), signal.SIGINT)
                yield from super().losses(model, epoch)

        recipe = Pressed(prepared(fresh(), GRAPH))
        options: dict[str, Any] = {"config": self.CONFIG, "progress": False, "checkpoint": tmp_path}
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            train(fresh(), GRAPH, recipe=recipe, **options)
        assert signal.getsignal(signal.SIGINT) is before
        epochs = json.loads(header_of(tmp_path / "training.safetensors")["about"])["epoch"]
        assert epochs == 3
        assert_same_weights(train(fresh(), GRAPH, **options), whole)

    def test_second_interrupt_comes_through(self) -> None:
        with pytest.raises(KeyboardInterrupt), _delayed_interrupt() as interrupted:
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupted()
            os.kill(os.getpid(), signal.SIGINT)

    def test_other_threads_hold_nothing(self) -> None:
        seen: list[bool] = []

        def work() -> None:
            with _delayed_interrupt() as interrupted:
                seen.append(interrupted())

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert seen == [False]

    def test_another_training_is_refused(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"epochs": 2, "progress": False, "checkpoint": tmp_path}
        train(fresh(), GRAPH, **options)
        assert GRAPH.train_mask is not None
        others: list[Any] = [
            lambda: train(fresh(hidden_channels=5), GRAPH, **options),
            lambda: train(fresh("GATv2"), GRAPH, **options),
            lambda: train(fresh(), GRAPH, **{**options, "epochs": 3}),
            lambda: train(fresh(), GRAPH, seed=1, **options),
            lambda: train(fresh(), small_data(seed=1), **options),
            lambda: train(fresh(), GRAPH.replace(train_mask=GRAPH.train_mask.roll(1)), **options),
            lambda: make_faithful(fresh(), GRAPH, **options),
        ]
        for other in others:
            with pytest.raises(CheckpointError, match="another training"):
                other()

    def test_faithful_training_of_another_vanilla_model_is_refused(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {
            "epochs": 2,
            "nodes": 3,
            "edges": 4,
            "progress": False,
            "checkpoint": tmp_path,
        }
        make_faithful(fresh(), GRAPH, **options)
        with pytest.raises(CheckpointError, match="another training"):
            make_faithful(fresh(seed=1), GRAPH, **options)

    @pytest.mark.parametrize("damage", ["truncated", "foreign", "empty", "unlabelled"])
    def test_damaged_state_is_refused(self, damage: str, tmp_path: Path) -> None:
        options: dict[str, Any] = {"epochs": 2, "progress": False, "checkpoint": tmp_path}
        train(fresh(), GRAPH, **options)
        file = tmp_path / "training.safetensors"
        content = {
            "truncated": file.read_bytes()[:-40],
            "foreign": b"PK\x03\x04 an archive",
            "empty": b"",
            "unlabelled": pack_tensors({"model/x": torch.ones(2)}, {"about": "{}"}),
        }[damage]
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match="delete it to start anew"):
            train(fresh(), GRAPH, **options)
        assert file.read_bytes() == content
