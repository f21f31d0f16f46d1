"""`harden`: adversarial training of a model with limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fgai.attention import call_model, entry_limits, evaluating, limits_of, straight_through
from fgai.attention.interface import originals
from fgai.graph import Graph
from fgai.progress import show_progress
from fgai.threads import with_gradients
from fgai.trackers import Tracker
from fgai.training.adversary import InjectionAdversary
from fgai.training.fine_tuning import _fine_tune, _open_source
from fgai.training.limiting import _range_pass, set_ranges
from fgai.training.loop import SCORE_STEPS
from fgai.training.recipes import Draws, VanillaRecipe
from fgai.training.settings import HardenSettings, _resolve_settings
from fgai.typed import typed

M = TypeVar("M", bound=nn.Module)


@typed
class AdversarialRecipe(VanillaRecipe):
    """Cross-entropy on the clean graph and on one with adversarial nodes, see `InjectionAdversary`."""

    capturable = True
    injects = True
    stream = 0x2545F4914  # its own, so that these draws change neither dropout nor evaluations

    def __init__(self, graph: Graph, settings: HardenSettings) -> None:
        super().__init__(graph)
        self.name = settings.method
        self.settings, self.weight, self.shares = settings, settings.attack_weight, settings.shares
        self.adversary = InjectionAdversary(graph, settings.budget)
        self.adversary.check_box()

    def start(self, model: nn.Module, seed: int) -> None:
        """Draw the first features."""
        super().start(model, seed)
        if limits_of(model):
            set_ranges(model, self.graph, *self.shares)
        self.adversary.start(self._generator(-1), entry_limits(model))
        self.validation, self.validation_endpoints = self.adversary.validation_attack(self._generator(-2))

    def losses(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield the clean cross-entropy, then the attacked one, each with its weight."""
        return self.losses_from(model, self._draw(epoch).to(self.graph.device), epoch)

    def draw(self, epoch: int) -> Draws | None:
        """Return the endpoints of the adversary's nodes."""
        return self._draw(epoch) if self.task.fixed_graph else None

    def _draw(self, epoch: int) -> Draws:
        return Draws("step", {"endpoints": self.adversary.draw(self._generator(epoch))})

    def losses_from(self, model: nn.Module, draws: Draws, epoch: int = 0) -> Iterator[dict[str, Tensor]]:
        """See `losses`."""
        graph, rows, labels = self.batch(epoch)
        with _range_pass(model, *self.shares, sampled=True), straight_through(model):
            clean = cross_entropy(call_model(model, graph).index_select(0, rows), labels)
        yield {"clean": clean, "total": (1 - self.weight) * clean}
        del clean
        logits = self.adversary.attacked_logits(model, graph, draws.tensors["endpoints"])
        attacked = cross_entropy(logits.index_select(0, rows), labels)
        yield {"attacked": attacked, "total": self.weight * attacked}

    def score_tensor(self, model: nn.Module) -> Tensor:
        """Return the mean of clean and attacked validation score."""
        self.validation.restart()
        with torch.no_grad(), _range_pass(model, *self.shares):
            clean = super().score_tensor(model)
        with evaluating(model, freeze=True):
            for step in range(SCORE_STEPS + 1):
                logits = self.validation.attacked_logits(model, self.graph, self.validation_endpoints)
                if step < SCORE_STEPS:
                    loss = cross_entropy(logits.index_select(0, self.val_rows), self.val_labels)
                    loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            return (clean + self.validation_score(logits)) / 2


@typed
@with_gradients
def harden(
    model: M,
    data: Any,
    settings: HardenSettings | None = None,
    *,
    seed: int = 0,
    check: bool = True,
    progress: bool | None = None,
    checkpoint: Path | str | None = None,
    checkpoint_every: int = 25,
    tracker: Tracker | None = None,
    batch_size: int | None = None,
    fan_out: int | Sequence[int] | None = None,
    **overrides: Any,
) -> M:
    """Return a copy of a trained model with stable predictions; the model itself does not change.

    A copy of the model gets limits (see `fgai.limit`) and is fine-tuned by cross-entropy on the clean graph
    and on one with injected nodes, see `HardenSettings`. It needs labels and masks, and does not keep
    explanations: for those use `make_faithful`, which describes the arguments. The check is of predictions.
    With `batch_size` an epoch is a pass over the training nodes, and injected nodes join these alone.

    Raises:
        InputError: an unknown setting, a value that is not allowed, or no labels in `train_mask`.
        AttentionError: `limits=True` and a layer that cannot be limited.

    Example:
        >>> import fgai
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train("GAT", data, epochs=5)
        >>> len(fgai.harden(model, data, epochs=2, nodes=3, edges=3).history.terms)
        2
    """
    (model,) = originals(model)
    with show_progress(progress), _open_source(data, seed, batch_size, fan_out) as source:
        settings = _resolve_settings(HardenSettings, settings, overrides, model, source.node_graph)
        source.prepare(model, batch_size, fan_out)

        def recipe(settings: HardenSettings) -> Any:
            if batch_size is None:
                return AdversarialRecipe(source.graph, settings)
            return source.harden(model, settings)

        return _fine_tune(
            model,
            source,
            recipe,
            settings,
            check=check and batch_size is None,
            seed=seed,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            progress=progress,
            tracker=tracker,
        )
