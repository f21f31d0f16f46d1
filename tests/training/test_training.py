"""Training: the same by seed, the best weights kept, resumed bit by bit, saved and read back."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as pack_tensors
from torch import Tensor, nn
from torch_geometric.nn import GATConv

from fgai.attacks import Budget
from fgai.attention import prepared
from fgai.errors import CheckpointError, DivergenceError, FgaiError, InputError
from fgai.models import GAT, GCN, GT, GATv2
from fgai.training import (
    Adversarial,
    Faithful,
    FaithfulConfig,
    TrainConfig,
    Vanilla,
    fit,
    load,
    make_faithful,
    read_header,
    save,
    train,
    untrained,
)
from fgai.training.interrupt import held_interrupt
from fgai.training.progress import Progress
from support.graph_cases import small_data

GRAPH = small_data()
SHORT: dict[str, Any] = {"epochs": 4, "progress": False}


def fresh(name: str = "GAT", seed: int = 0, **changes: Any) -> nn.Module:
    sizes = {"GT": {"width": 16, "heads": (4, 1)}, "GCN": {"channels": 6}}.get(
        name, {"channels": 2, "heads": 3}
    )
    return untrained(name, GRAPH, seed=seed, **{**sizes, **changes})


def assert_same_weights(first: nn.Module, second: nn.Module) -> None:
    a, b = first.state_dict(), second.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def global_state() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())  # noqa: NPY002


class Scripted:
    """A recipe whose terms and scores are given, so that the loop alone is tested."""

    name = "scripted"

    def __init__(self, scores: list[float], losses: list[float] | None = None) -> None:
        self.scores, self.losses, self.asked = scores, losses, 0

    def start(self, model: nn.Module, seed: int) -> None:
        pass

    def parts(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        size = sum(p.sum() for p in model.parameters())
        factor = 1.0 if self.losses is None else self.losses[epoch]
        yield {"pull": size * factor, "total": size * factor}

    def score(self, model: nn.Module) -> float:
        self.asked += 1
        return self.scores[self.asked - 1]

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        pass


class TestTrain:
    @pytest.mark.parametrize("name", ["GAT", "GATv2", "GT", "GCN"])
    def test_same_seed_same_weights(self, name: str) -> None:
        runs = [train(fresh(name), GRAPH, seed=seed, **SHORT) for seed in (3, 3, 4)]
        assert_same_weights(runs[0], runs[1])
        assert runs[0].history.terms == runs[1].history.terms
        assert runs[0].history.terms != runs[2].history.terms

    def test_given_model_and_global_generators_are_untouched(self) -> None:
        model = fresh().train()
        twin = fresh()
        before = global_state()
        trained = train(model, GRAPH, **SHORT)
        make_faithful(trained, GRAPH, **SHORT)
        assert global_state() == before
        assert_same_weights(model, twin)
        assert model.training and not trained.training
        assert not hasattr(model, "history")

    def test_it_learns(self) -> None:
        model = train(fresh(dropout=0.2), GRAPH, epochs=60, lr=0.03, progress=False)
        assert GRAPH.y is not None and GRAPH.test_mask is not None
        right = (model(GRAPH).argmax(1) == GRAPH.y)[GRAPH.test_mask].float().mean()
        assert right > 0.6
        assert model.history.terms[-1]["cross_entropy"] < model.history.terms[0]["cross_entropy"]

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


class TestLoop:
    def run(self, recipe: Scripted, **config: Any) -> tuple[nn.Module, Any, list[dict[str, Tensor]]]:
        model, seen = nn.Linear(2, 3), []
        nn.init.zeros_(model.weight)

        def remember(epoch: int, terms: dict[str, float]) -> None:
            seen.append({k: v.clone() for k, v in model.state_dict().items()})

        history = fit(
            model, recipe, TrainConfig(weight_decay=0.0, **config), progress=False, on_epoch=remember
        )
        return model, history, seen

    def test_best_weights_are_kept(self) -> None:
        model, history, seen = self.run(Scripted([0.1, 0.7, 0.3, 0.7, 0.2]), epochs=5)
        assert history.best_epoch == 1 and history.stopped == "epochs"
        assert torch.equal(model.state_dict()["weight"], seen[1]["weight"])
        assert [score for _, score in history.scores] == [0.1, 0.7, 0.3, 0.7, 0.2]

    def test_early_stopping_counts_epochs_without_a_better_score(self) -> None:
        model, history, seen = self.run(Scripted([0.1, 0.5, 0.4, 0.4, 0.4, 0.9]), epochs=6, patience=3)
        assert history.stopped == "patience" and len(seen) == 5
        assert torch.equal(model.state_dict()["weight"], seen[1]["weight"])

    def test_validation_every_third_epoch_and_at_the_end(self) -> None:
        _, history, _ = self.run(Scripted([0.1, 0.2, 0.3]), epochs=8, validate_every=3)
        assert [epoch for epoch, _ in history.scores] == [2, 5, 7]

    def test_clipping_bounds_the_step(self) -> None:
        losses = [1.0, 1e6, 1.0]
        plain, _, _ = self.run(Scripted([0.1, 0.2, 0.3], losses), epochs=3)
        clipped, _, _ = self.run(Scripted([0.1, 0.2, 0.3], losses), epochs=3, clip=1.0)
        assert not torch.equal(plain.state_dict()["weight"], clipped.state_dict()["weight"])

    def test_divergence_names_the_term_and_keeps_the_best_weights(self) -> None:
        model, seen = nn.Linear(2, 3), []
        recipe = Scripted([0.1, 0.5], [1.0, 1.0, float("nan")])
        with pytest.raises(DivergenceError, match="epoch 2: pull is not finite"):
            fit(
                model,
                recipe,
                TrainConfig(epochs=5),
                progress=False,
                on_epoch=lambda *_: seen.append(model.weight.detach().clone()),
            )
        assert torch.equal(model.weight, seen[1]) and not model.training

    def test_progress_is_silent_without_a_terminal(self, capfd: pytest.CaptureFixture[str]) -> None:
        with Progress(3, "work") as bar:
            bar.step({"loss": 1.0}, 0.5)
        assert capfd.readouterr() == ("", "")


def recipes(kind: str) -> tuple[nn.Module, Any]:
    """A model and a recipe for it, made afresh as after a restart."""
    vanilla = fresh()
    graph = prepared(vanilla, GRAPH)
    budget = {"nodes": 3, "edges": 4}
    match kind:
        case "vanilla":
            return vanilla, Vanilla(graph)
        case "adversarial":
            return vanilla, Adversarial(graph, Budget(**budget, step_size=0.1, targets="fit"))
        case _:
            return fresh(), Faithful(vanilla, graph, FaithfulConfig(**budget))


class KilledError(Exception):
    pass


class TestResume:
    CONFIG = TrainConfig(epochs=6, validate_every=2, lr=0.02)

    @pytest.mark.parametrize("after", range(6))
    @pytest.mark.parametrize("kind", ["vanilla", "adversarial", "faithful"])
    def test_killed_after_any_epoch_gives_the_same_weights(
        self, kind: str, after: int, tmp_path: Path
    ) -> None:
        whole, recipe = recipes(kind)
        history = fit(whole, recipe, self.CONFIG, seed=2, progress=False)

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
            fit(model, recipe, self.CONFIG, on_epoch=kill, **options)
        model, recipe = recipes(kind)
        resumed = fit(model, recipe, self.CONFIG, **options)
        assert_same_weights(model, whole)
        assert resumed.terms == history.terms and resumed.scores == history.scores
        assert resumed.best_epoch == history.best_epoch

    def test_interrupt_is_held_to_the_end_of_the_epoch(self, tmp_path: Path) -> None:
        whole = train(fresh(), GRAPH, config=self.CONFIG, progress=False)

        class Pressed(Vanilla):
            def parts(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
                if epoch == 2:
                    os.kill(os.getpid(), signal.SIGINT)
                yield from super().parts(model, epoch)

        recipe = Pressed(prepared(fresh(), GRAPH))
        options: dict[str, Any] = {"config": self.CONFIG, "progress": False, "checkpoint": tmp_path}
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            train(fresh(), GRAPH, recipe=recipe, **options)
        assert signal.getsignal(signal.SIGINT) is before
        epochs = json.loads(_header(tmp_path / "training.safetensors")["about"])["epoch"]
        assert epochs == 3
        assert_same_weights(train(fresh(), GRAPH, **options), whole)

    def test_second_interrupt_comes_through(self) -> None:
        with pytest.raises(KeyboardInterrupt), held_interrupt() as interrupted:
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupted()
            os.kill(os.getpid(), signal.SIGINT)

    def test_other_threads_hold_nothing(self) -> None:
        seen: list[bool] = []

        def work() -> None:
            with held_interrupt() as interrupted:
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
            lambda: train(fresh(channels=5), GRAPH, **options),
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


def _header(path: Path) -> dict[str, str]:
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size])["__metadata__"]


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
        twin = make_faithful(vanilla, GRAPH, nodes=3, edges=4, epochs=1, progress=False)
        first = twin.history.terms[0]
        assert first["closeness"] == pytest.approx(0.0, abs=1e-6)
        assert first["similarity"] == pytest.approx(0.0, abs=1e-5)
        assert first["explanation_stability"] > 0

    def test_unknown_settings_are_refused(self) -> None:
        with pytest.raises((TypeError, FgaiError), match="warmth"):
            make_faithful(fresh(), GRAPH, warmth=3)
        with pytest.raises(InputError, match="did you mean 'hybrid'"):
            FaithfulConfig(adversary="hybird")


class TestCheckpoint:
    @pytest.mark.parametrize("name", ["GAT", "GATv2", "GT", "GCN"])
    def test_saved_and_read_back_is_equal(self, name: str, tmp_path: Path) -> None:
        model = train(fresh(name), GRAPH, **SHORT)
        path = save(model, tmp_path / "deep" / "model", data_fingerprint="abc", about={"dataset": "small"})
        assert path.suffix == ".safetensors"
        back = load(path)
        assert type(back) is type(model) and not back.training
        assert_same_weights(back, model)
        assert torch.equal(back(GRAPH), model(GRAPH))
        assert back.history.terms == model.history.terms
        header = read_header(path)
        assert header["data_fingerprint"] == "abc" and header["about"] == {"dataset": "small"}
        assert header["config"] == json.loads(json.dumps(model.config))

    def test_numbered_names_keep_their_dots(self, tmp_path: Path) -> None:
        assert save(fresh(), tmp_path / "gat.v1").name == "gat.v1.safetensors"

    def test_another_architecture_is_refused(self, tmp_path: Path) -> None:
        path = save(fresh("GATv2"), tmp_path / "model")
        with pytest.raises(CheckpointError, match=r"holds a GATv2, expected GAT$"):
            load(path, expect="GAT")

    def test_foreign_model_is_not_saved(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="got Linear"):
            save(nn.Linear(2, 3), tmp_path / "model")
        assert list(tmp_path.iterdir()) == []

    def test_missing_damaged_and_foreign_files(self, tmp_path: Path) -> None:
        path = save(fresh(), tmp_path / "model")
        whole = path.read_bytes()
        (size,) = struct.unpack("<Q", whole[:8])

        def edited(change: dict[str, Any]) -> bytes:
            header = json.loads(_header(path)["fgai"])
            tensors = {k: v.contiguous() for k, v in fresh().state_dict().items()}
            return pack_tensors(tensors, {"fgai": json.dumps({**header, **change})})

        cases = {
            "no checkpoint at": None,
            "truncated": whole[:-30],
            "damaged or not a safetensors": whole[: size // 2],
            "not a safetensors file": b"\x80\x04 a pickle, perhaps",
            "saved by another program": pack_tensors({"weight": torch.ones(2, 3)}),
            "newer fgai": edited({"schema": 99}),
            "expected GAT or GATv2 or GCN": edited({"class": "GIN"}),
            "does not fit its own architecture": edited({"config": {"in_channels": 6, "out_channels": 4}}),
            "own architecture": edited({"config": {"wings": 2}}),
            "does not say what it holds": edited({"schema": None}),
        }
        for number, (message, content) in enumerate(cases.items()):
            file = tmp_path / f"case-{number}.safetensors"
            if content is not None:
                file.write_bytes(content)
            with pytest.raises(CheckpointError, match=message):
                load(file)
        with pytest.raises(CheckpointError):
            load(tmp_path)

    def test_a_failed_write_leaves_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = save(fresh(), tmp_path / "model")
        old = path.read_bytes()

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(FgaiError, match="No space left on device; nothing was changed"):
            save(fresh(seed=5), path)
        assert path.read_bytes() == old
        assert [p.name for p in tmp_path.iterdir()] == [path.name]

    def test_class_names_cover_the_models(self) -> None:
        assert {type(fresh(n)) for n in ("GAT", "GATv2", "GT", "GCN")} == {GAT, GATv2, GT, GCN}
