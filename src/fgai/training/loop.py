"""`fit`: the training loop of every `Recipe`."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import perf_counter
from types import FrameType

import torch
from torch import Tensor, nn

from fgai.checks import whole
from fgai.errors import DivergenceError, InputError
from fgai.processes import current
from fgai.progress import Bar, show_progress, stage
from fgai.threads import seeded, with_gradients
from fgai.trackers import Tracker
from fgai.training.capture import (
    MAX_UNREAD,
    _backward,
    _CapturedSteps,
    _EpochTerms,
    _mean_by_name,
    _sum_by_name,
    can_capture,
)
from fgai.training.recipes import Recipe, epoch_seed
from fgai.training.resume import History, _read_checkpoint, _TrainingState
from fgai.training.settings import TrainConfig
from fgai.typed import typed

SCORE_STEPS = 10  # ascent steps of the attack by which adversarial recipes score an epoch


@typed
@with_gradients
def fit(
    model: nn.Module,
    recipe: Recipe,
    config: TrainConfig,
    *,
    seed: int = 0,
    progress: bool | None = None,
    checkpoint: Path | str | None = None,
    checkpoint_every: int = 25,
    fingerprint: str = "",
    tracker: Tracker | None = None,
    run: str | None = None,
) -> History:
    """Train `model` in place and leave the best weights in it; see `fgai.train`.

    With a folder `checkpoint` the training is saved there and resumes from there, if `fingerprint` is that of
    the saved one; Ctrl-C takes effect at the end of the epoch, after a save. `run` names the training for the
    tracker. With several processes each trains on its own mini-batches, and the first alone writes files.

    Raises:
        DivergenceError: a term is not finite; the model then has the best weights so far.
        InputError: nothing to train, or several processes that would train on the whole graph.
        RanksError: processes disagree, or one failed.
    """
    whole(checkpoint_every, "checkpoint_every", 1)
    processes, run = current(), run or recipe.name
    optimizer = _optimizer(model, recipe, config)
    device = optimizer.param_groups[0]["params"][0].device
    tracker = tracker if tracker is not None and processes.is_main else Tracker()
    folder = None if checkpoint is None else Path(checkpoint)
    state = _TrainingState(model, optimizer, recipe)
    with seeded(epoch_seed(seed, -1), device):
        recipe.start(model, seed)
    saved = processes.broadcast(
        _read_checkpoint(folder, fingerprint) if folder is not None and processes.is_main else None
    )
    if saved is not None:
        state.restore(*saved)
    history = state.history
    first, start = len(history.terms), perf_counter() - history.seconds

    def save() -> None:
        if folder is not None and processes.is_main:
            state.save(folder, fingerprint)

    tracker.on_start(run, _tracker_rows(history, range(first)))
    with (
        show_progress(progress if processes.is_main else False),
        stage(recipe.name, config.epochs, done=first) as bar,
        _delayed_interrupt(folder is not None) as interrupted,
        _Steps(state, config, seed) as steps,
        seeded(epoch_seed(seed, first), device),
    ):
        for epoch in range(first, config.epochs):
            if history.stopped == "patience":
                break
            must_read = steps.run(epoch)
            last = epoch == config.epochs - 1
            validates = (epoch + 1) % config.validate_every == 0 or last
            stops = processes.any(interrupted())
            saves = folder is not None and ((epoch + 1) % checkpoint_every == 0 or last or stops)
            if not (must_read or validates or saves or type(tracker) is not Tracker):
                continue
            epochs = steps.read()
            for terms in epochs:
                _check_finite(terms, state)
                history.add(terms.values, terms.seconds)
            if validates:
                state.add_score(processes.broadcast(steps.score()), epoch, config.patience)
            history.seconds = perf_counter() - start
            if saves:
                save()
            with _saving_on_error(save):
                rows = _tracker_rows(history, [each.epoch for each in epochs])
                for terms, row in zip(epochs, rows, strict=True):
                    bar.advance(note=_note(terms.values, state.best_score))
                    tracker.on_epoch(run, terms.epoch, row)
            if stops or processes.any(interrupted()):
                raise KeyboardInterrupt
    with _saving_on_error(save):
        summary: dict[str, float | str] = {"epochs": len(history.terms), "kept_epoch": history.kept_epoch}
        tracker.on_end(run, {**summary, "stopped": history.stopped, "seconds": history.seconds})
    state.finish()
    return history


def _optimizer(model: nn.Module, recipe: Recipe, config: TrainConfig) -> torch.optim.Adam:
    parameters = [each for each in model.parameters() if each.requires_grad]
    if not parameters:
        name = type(model).__name__
        raise InputError(f"`model` must have parameters with `requires_grad=True`, {name} has none")
    if current().is_distributed and not recipe.mini_batches:
        raise InputError("several processes train in mini-batches; give `batch_size`, or start one process")
    if not parameters[0].is_cuda:
        return torch.optim.Adam(parameters, lr=config.lr, weight_decay=config.weight_decay)
    lr = torch.tensor(config.lr, device=parameters[0].device)
    return torch.optim.Adam(parameters, lr=lr, weight_decay=config.weight_decay, fused=True, capturable=True)


def _tracker_rows(history: History, epochs: Sequence[int]) -> list[dict[str, float]]:
    """Return what the tracker gets for each of these last epochs: the terms, and `score` if there is one."""
    scores = dict(history.scores[-len(epochs) :])
    return [
        {**history.terms[epoch], **({"score": scores[epoch]} if epoch in scores else {})} for epoch in epochs
    ]


def _note(terms: dict[str, float], best: float) -> str:
    total = {"total": terms["total"], **terms}
    return "  ".join([f"best {best:.4f}", *(f"{name} {value:.4g}" for name, value in total.items())])


def _check_finite(terms: _EpochTerms, state: _TrainingState) -> None:
    bad = [name for name, value in terms.values.items() if not math.isfinite(value)]
    if bad:
        state.finish()
        names = ", ".join(name for name in bad if name != "total") or "total"
        raise DivergenceError(
            f"training diverged in epoch {terms.epoch + 1}: {names} is not finite; the best"
            " weights so far are kept in the model. Lower `lr` or the weight of that term"
        )


@contextmanager
def _saving_on_error(save: Callable[[], None]) -> Iterator[None]:
    """Save the training if the block raises, so that no epoch is lost to an error in a tracker."""
    try:
        yield
    except BaseException:
        save()
        raise


@contextmanager
def _delayed_interrupt(delay: bool = True) -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether Ctrl-C was pressed. A second one interrupts at once."""
    pressed = threading.Event()
    if not delay or threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.getsignal(signal.SIGINT)

    def handler(number: int, frame: FrameType | None) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, handler)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


class _Steps:
    def __init__(self, state: _TrainingState, config: TrainConfig, seed: int) -> None:
        self.state, self.config, self.seed = state, config, seed
        self.model, self.recipe, self.optimizer = state.model, state.recipe, state.optimizer
        self.device, self.processes = next(self.model.parameters()).device, current()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.unread: list[_EpochTerms] = []
        self.captured: _CapturedSteps | None = None
        if can_capture(self.recipe, self.model):
            self.captured = _CapturedSteps(self.recipe, self.model, self.update, seed)

    def __enter__(self) -> _Steps:
        return self

    def __exit__(self, *_: object) -> None:
        if self.captured is not None:
            self.model.zero_grad(set_to_none=True)
            self.captured = None

    def run(self, epoch: int) -> bool:
        """Train one epoch, or start it on the GPU; return whether `read` must be called now."""
        rate = self.config.lr * (1 - self.config.decay * epoch / self.config.epochs)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # a captured step reads it from there
            else:
                group["lr"] = rate
        if self.captured is not None and self.captured.step(epoch):
            return len(self.captured.unread) >= MAX_UNREAD
        self.unread = self.read()
        start = perf_counter()
        self.unread.append(_EpochTerms(epoch, _mean_by_name(self._run_steps(epoch)), perf_counter() - start))
        return True

    def _run_steps(self, epoch: int) -> list[tuple[int, dict[str, float]]]:
        steps: list[tuple[int, dict[str, float]]] = []
        own_seed = epoch_seed(self.seed, epoch) + self.processes.rank  # so that dropout differs
        batches = stage(f"epoch {epoch + 1}", self.recipe.steps_per_epoch)
        with (
            seeded(own_seed, self.device),
            batches if self.recipe.mini_batches else nullcontext(Bar("")) as bar,
        ):
            self.model.train()
            for step in self.recipe.steps(self.model, epoch):
                self.model.train()  # a step may have changed it
                self.optimizer.zero_grad(set_to_none=True)
                names, terms = _backward(step.losses)
                self.processes.average_gradients(self.parameters, step.weight)
                self.update()
                if step.weight:
                    steps.append((step.weight, _sum_by_name(names, terms.tolist())))
                bar.advance()
        if self.processes.is_distributed:
            self.processes.require_equal({f"weights after epoch {epoch + 1}": self.state.digest()})
            steps = [one for theirs in self.processes.gather(steps) for one in theirs]
        return steps

    def read(self) -> list[_EpochTerms]:
        unread, self.unread = self.unread, []
        return unread + ([] if self.captured is None else self.captured.read())

    def score(self) -> float:
        return float(self.recipe.score(self.model) if self.captured is None else self.captured.score())

    def update(self) -> None:
        if self.config.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
