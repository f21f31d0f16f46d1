"""The loop alone: best weights, early stopping, clipping, divergence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fgai.errors import DivergenceError, InputError
from fgai.training import Recipe, TrainConfig, fit
from support.training_cases import Calling


class Scripted(Recipe):
    """A recipe whose terms and scores are given, so that the loop alone is tested."""

    name = "scripted"

    def __init__(self, scores: list[float], factors: list[float] | None = None) -> None:
        self.scores, self.factors, self.asked = scores, factors, 0

    def losses(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        size = sum(p.sum() for p in model.parameters())
        factor = 1.0 if self.factors is None else self.factors[epoch]
        yield {"pull": size * factor, "total": size * factor}

    def score(self, model: nn.Module) -> float:
        self.asked += 1
        return self.scores[self.asked - 1]


class TestLoop:
    def run(self, recipe: Scripted, **config: Any) -> tuple[nn.Module, Any, list[dict[str, Tensor]]]:
        model, seen = nn.Linear(2, 3), []
        nn.init.zeros_(model.weight)

        def remember(epoch: int, terms: dict[str, float]) -> None:
            seen.append({k: v.clone() for k, v in model.state_dict().items()})

        history = fit(
            model, recipe, TrainConfig(weight_decay=0.0, **config), progress=False, tracker=Calling(remember)
        )
        return model, history, seen

    def test_best_weights_are_kept(self) -> None:
        model, history, seen = self.run(Scripted([0.1, 0.7, 0.3, 0.7, 0.2]), epochs=5)
        assert history.best_epoch == 1 and history.stopped == "epochs"
        assert history.kept_epoch == 2 and history.ending == "all epochs"
        assert torch.equal(model.state_dict()["weight"], seen[1]["weight"])
        assert [score for _, score in history.scores] == [0.1, 0.7, 0.3, 0.7, 0.2]

    def test_early_stopping_counts_epochs_without_a_better_score(self) -> None:
        model, history, seen = self.run(Scripted([0.1, 0.5, 0.4, 0.4, 0.4, 0.9]), epochs=6, patience=3)
        assert history.stopped == "patience" and len(seen) == 5
        assert history.ending == "stopped early, no better validation score for 3 epochs (`patience`)"
        assert torch.equal(model.state_dict()["weight"], seen[1]["weight"])

    def test_validation_every_third_epoch_and_at_the_end(self) -> None:
        _, history, _ = self.run(Scripted([0.1, 0.2, 0.3]), epochs=8, validate_every=3)
        assert [epoch for epoch, _ in history.scores] == [2, 5, 7]

    def test_clipping_bounds_the_step(self) -> None:
        model, sizes = nn.Linear(2, 3), []
        nn.init.zeros_(model.weight)

        def remember(*_: object) -> None:
            sizes.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))

        # The gradient of every one of the 9 parameters is the factor, so its norm is three times as large.
        recipe = Scripted([0.1, 0.2, 0.3], [0.1, 1e6, 1.0])
        config = TrainConfig(epochs=3, weight_decay=0.0, clip=1.0)
        fit(model, recipe, config, progress=False, tracker=Calling(remember))
        assert sizes == pytest.approx([0.3, 1.0, 1.0], rel=1e-5)
        expected = torch.zeros(3, 2, requires_grad=True)
        adam = torch.optim.Adam([expected], lr=config.lr)
        for factor in (0.1, 1 / 3, 1 / 3):
            expected.grad = torch.full_like(expected, factor)
            adam.step()
        torch.testing.assert_close(model.weight, expected)

    def test_what_cannot_be_trained_is_refused(self, tmp_path: Path) -> None:
        model = nn.Linear(2, 3)
        with pytest.raises(InputError, match="`checkpoint_every` must be at least 1"):
            fit(model, Scripted([0.1]), TrainConfig(epochs=1), checkpoint=tmp_path, checkpoint_every=0)
        with pytest.raises(InputError, match="`requires_grad=True`, Linear has none"):
            fit(model.requires_grad_(False), Scripted([0.1]), TrainConfig(epochs=1))

    def test_divergence_names_the_term_and_keeps_the_best_weights(self) -> None:
        model, seen = nn.Linear(2, 3), []
        recipe = Scripted([0.1, 0.5], [1.0, 1.0, float("nan")])
        with pytest.raises(DivergenceError, match="epoch 3: pull is not finite"):
            fit(
                model,
                recipe,
                TrainConfig(epochs=5),
                progress=False,
                tracker=Calling(lambda *_: seen.append(model.weight.detach().clone())),
            )
        assert torch.equal(model.weight, seen[1]) and not model.training
