"""The one training loop: every recipe gives terms and a score, the loop does the rest."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fgai.alone import seeded, with_gradients
from fgai.checks import above, at_least, one_of, whole
from fgai.checks import seed as check_seed
from fgai.errors import DivergenceError, InputError
from fgai.processes import current
from fgai.progress import Bar, shown, stage
from fgai.trackers import Tracker
from fgai.training.capture import Drawn, _mean_terms, _Replays, _run_parts, _summed, _Terms, can_replay
from fgai.training.resume import History, _read_state, _TrainingState
from fgai.typed import typed

PROBE = 10
"""Climbing steps of the fresh attack by which adversarial recipes score an epoch."""
LONGEST = 10_000_000
"""Epochs at most: more would not end."""


@typed
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and how fast to train.

    Attributes:
        epochs: at most; each a step on the whole graph, or a pass over it in mini-batches.
        lr: Adam's learning rate.
        weight_decay: l2 penalty on all parameters.
        patience: epochs without a better validation score after which to stop.
        validate_every: epochs between validations.
        clip: largest gradient norm, 0 for none.
        decay: share by which the learning rate falls, linearly, until the last epoch.
    """

    epochs: int = 200
    lr: float = 0.01
    weight_decay: float = 5e-4
    patience: int = 100
    validate_every: int = 1
    clip: float = 0.0
    decay: float = 0.0

    def __post_init__(self) -> None:
        whole(self.epochs, "epochs", 1, LONGEST)
        above(self.lr, "lr", 0.0)
        at_least(self.weight_decay, "weight_decay", 0.0)
        whole(self.patience, "patience", 1)
        whole(self.validate_every, "validate_every", 1)
        at_least(self.clip, "clip", 0.0)
        if not 0.0 <= self.decay <= 1.0:
            raise InputError(f"`decay` must be between 0 and 1, got {self.decay}")

    def replace(self, **changes: Any) -> TrainConfig:
        """Return a copy with some settings changed.

        Raises:
            InputError: there is no such setting.
        """
        for name in changes:
            one_of(name, "settings", TRAIN_FIELDS)
        return dataclasses.replace(self, **changes)


TRAIN_FIELDS = tuple(field.name for field in dataclasses.fields(TrainConfig))


class Step(NamedTuple):
    """One step of the optimizer.

    Attributes:
        size: weight of the step in the epoch's terms and among processes: the seeds of a mini-batch; 0 in a
            process without any.
        parts: the loss, see `Recipe.parts`.
    """

    size: int
    parts: Iterator[dict[str, Tensor]]


class Recipe:
    """A loss and the score that decides which epoch's weights are kept. A whole graph is one batch.

    A recipe defines `parts` and `score`, or `steps` and `score` if it reads mini-batches.

    A recipe whose steps can be captured in a CUDA graph says `capturable = True` in its own class body and
    defines `draw`, `replayed` and `measure` (then `score` is its value), none of which waits for the device.
    Subclasses do not inherit the flag: their steps may need other draws.
    """

    name: str
    batched: ClassVar[bool] = False
    """Whether it reads mini-batches, which several processes can share."""
    capturable: ClassVar[bool] = False

    def start(self, model: nn.Module, seed: int) -> None:
        """Compute frozen targets before the first epoch; nothing by default."""

    def parts(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield the loss of this epoch in one or more parts, each with its terms and their sum as `total`.

        Every part is back-propagated and freed before the next is asked for, so that a loss on two graphs
        needs the memory of one; their gradients add up to one step.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `parts` or `steps`")

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the optimizer in an epoch."""
        return 1

    def steps(self, model: nn.Module, epoch: int) -> Iterator[Step]:
        """Yield the steps of an epoch, each taken before the next is asked for; by default one of `parts`."""
        yield Step(1, self.parts(model, epoch))

    def score(self, model: nn.Module) -> float:
        """Return the validation score, higher is better; by default the value of `measure`."""
        return float(self.measure(model))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that must survive a restart; none by default."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore the tensors that `state` returned."""

    def draw(self, epoch: int) -> Drawn | None:
        """Return the random draws of an epoch, on the CPU; None (the default) runs it without capture."""
        return None

    def replayed(self, model: nn.Module, drawn: Drawn) -> Iterator[dict[str, Tensor]]:
        """Yield the same as `parts`, from draws that are on the device."""
        raise NotImplementedError(f"{type(self).__name__} is capturable and must define `replayed`")

    def measure(self, model: nn.Module) -> Tensor:
        """Return the score as a tensor."""
        raise NotImplementedError(f"{type(self).__name__} must define `score`, or `measure` if capturable")


@typed
def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of one epoch; depends on nothing but its arguments, so a run can resume anywhere."""
    check_seed(seed)
    return (seed * 1_000_003 + epoch * 7_919 + 12_345) % (2**63 - 1)


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
    """Train `model` in place and leave the best weights in it.

    With several processes (`fgai.large.process_group`) each trains on its own mini-batches, all make the same
    steps, and the first alone writes and prints.

    Args:
        model: on the device where it shall train.
        recipe: what to minimise.
        config: see `TrainConfig`.
        seed: of dropout and of the recipe's draws.
        progress: show a bar; None decides by whether a terminal is attached.
        checkpoint: folder to save the state in and to resume from when it holds one. Ctrl-C then waits for
            the end of the epoch and saves it.
        checkpoint_every: epochs between saves.
        fingerprint: of what is trained on what; a checkpoint with another one is refused.
        tracker: called after every epoch, and at the end.
        run: name of the training for the tracker; the recipe's name by default.

    Raises:
        DivergenceError: when a term is not finite; the last good weights are in the model then.
        InputError: several processes would train on the whole graph.
        RanksError: processes disagree, or one failed.
    """
    ranks, run = current(), run or recipe.name
    device = _device(model, recipe)
    tracker = tracker if tracker is not None and ranks.leads else Tracker()
    folder = None if checkpoint is None else Path(checkpoint)
    state = _TrainingState(model, _optimizer(model, config, device), recipe)
    with seeded(epoch_seed(seed, -1), device):
        recipe.start(model, seed)
    saved = ranks.first(_read_state(folder, fingerprint) if folder is not None and ranks.leads else None)
    if saved is not None:
        state.restore(*saved)
    history = state.history
    first, began = len(history.terms), perf_counter() - history.seconds

    def save() -> None:
        if folder is not None and ranks.leads:
            state.save(folder, fingerprint)

    tracker.on_start(run, _rows(history, range(first)))
    with (
        shown(progress if ranks.leads else False),
        stage(recipe.name, config.epochs, done=first) as bar,
        _delayed_interrupt(folder is not None) as interrupted,
        _Steps(state, config, seed) as steps,
        seeded(epoch_seed(seed, first), device),
    ):
        for epoch in range(first, config.epochs):
            if history.stopped == "patience":
                break
            steps.run(epoch)
            last = epoch == config.epochs - 1
            validates = (epoch + 1) % config.validate_every == 0 or last
            stops = ranks.any(interrupted())
            saves = folder is not None and ((epoch + 1) % checkpoint_every == 0 or last or stops)
            if not (steps.due or validates or saves or type(tracker) is not Tracker):
                continue
            epochs = steps.read()
            for terms in epochs:
                _check_finite(terms, state)
                history.add(terms.values, terms.seconds)
            if validates:
                state.validated(ranks.first(steps.score()), epoch, config.patience)
            history.seconds = perf_counter() - began
            if saves:
                save()
            with _saving_on_error(save):
                for terms, row in zip(epochs, _rows(history, [one.epoch for one in epochs]), strict=True):
                    bar.advance(note=_note(terms.values, state.best_score))
                    tracker.on_epoch(run, terms.epoch, row)
            if stops or ranks.any(interrupted()):
                raise KeyboardInterrupt
    with _saving_on_error(save):
        summary: dict[str, float | str] = {"epochs": len(history.terms), "kept_epoch": history.kept_epoch}
        tracker.on_end(run, {**summary, "stopped": history.stopped, "seconds": history.seconds})
    state.finish()
    return history


def _device(model: nn.Module, recipe: Recipe) -> torch.device:
    """The device of a model that can be trained by a recipe."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        raise InputError(f"`model` must have parameters to train, {type(model).__name__} has none")
    if current().several and not recipe.batched:
        raise InputError("several processes train in mini-batches; give `batch_size`, or start one process")
    return parameter.device


def _optimizer(model: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Adam:
    """Adam over all trainable parameters; on a GPU in one kernel that a CUDA graph can hold."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if device.type != "cuda":
        return torch.optim.Adam(parameters, lr=config.lr, weight_decay=config.weight_decay)
    lr = torch.tensor(config.lr, device=device)
    return torch.optim.Adam(parameters, lr=lr, weight_decay=config.weight_decay, fused=True, capturable=True)


def _rows(history: History, epochs: Sequence[int]) -> list[dict[str, float]]:
    """Terms by epoch, and the validation score where there was one; the last epochs of the history."""
    scores = dict(history.scores[-len(epochs) :])
    return [
        {**history.terms[epoch], **({"score": scores[epoch]} if epoch in scores else {})} for epoch in epochs
    ]


def _note(terms: dict[str, float], best: float) -> str:
    """The best score and the loss, its parts last: on a narrow terminal they are cut off."""
    total = {"total": terms["total"], **terms}
    return "  ".join([f"best {best:.4f}", *(f"{name} {value:.4g}" for name, value in total.items())])


def _check_finite(terms: _Terms, state: _TrainingState) -> None:
    """Raise if a term is not finite, with the best weights in the model."""
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
    """A tracker that raises costs no epoch."""
    try:
        yield
    except BaseException:
        save()
        raise


@contextmanager
def _delayed_interrupt(delay: bool = True) -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed; a second Ctrl-C interrupts at once.

    Outside the main thread, where Python delivers no signals, and with `delay=False` signals are left alone.
    """
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
    """The training steps: captured and replayed where that is possible, else kernel by kernel."""

    def __init__(self, state: _TrainingState, config: TrainConfig, seed: int) -> None:
        self.state, self.config, self.seed = state, config, seed
        self.model, self.recipe, self.optimizer = state.model, state.recipe, state.optimizer
        self.device, self.ranks = next(self.model.parameters()).device, current()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.done: list[_Terms] = []
        self.replays: _Replays | None = None
        if can_replay(self.recipe, self.model):
            self.replays = _Replays(
                self.recipe, self.model, self.update, lambda epoch: epoch_seed(seed, epoch)
            )

    def __enter__(self) -> _Steps:
        return self

    def __exit__(self, *_: object) -> None:
        """Free the captured graphs and their memory at once."""
        if self.replays is not None:
            self.model.zero_grad(set_to_none=True)
            self.replays = None

    @property
    def due(self) -> bool:
        """Whether the terms must be read now."""
        return bool(self.done) or (self.replays is not None and self.replays.full)

    def run(self, epoch: int) -> None:
        """Train one epoch, or launch it."""
        rate = self.config.lr * (1 - self.config.decay * epoch / self.config.epochs)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # a captured step reads it from there
            else:
                group["lr"] = rate
        if self.replays is not None and self.replays.step(epoch):
            return
        self.done = self.read()
        tick = perf_counter()
        taken: list[tuple[int, dict[str, float]]] = []
        own = epoch_seed(self.seed, epoch) + self.ranks.rank  # or all ranks would drop the same units
        # An epoch of mini-batches has a bar of its own.
        batches = stage(f"epoch {epoch + 1}", self.recipe.steps_per_epoch)
        with (
            seeded(own, self.device),
            batches if self.recipe.batched else nullcontext(Bar("")) as bar,
        ):
            self.model.train()
            for step in self.recipe.steps(self.model, epoch):
                self.model.train()  # a step may have changed it
                self.optimizer.zero_grad(set_to_none=True)
                names, terms = _run_parts(step.parts)
                self.ranks.average_gradients(self.parameters, step.size)
                self.update()
                if step.size:
                    taken.append((step.size, _summed(names, terms.tolist())))
                bar.advance()
        if self.ranks.several:
            self.ranks.agree({f"weights after epoch {epoch + 1}": self.state.digest()})
            taken = [one for theirs in self.ranks.gather(taken) for one in theirs]
        self.done.append(_Terms(epoch, _mean_terms(taken), perf_counter() - tick))

    def read(self) -> list[_Terms]:
        """Return the terms of the epochs since the last call."""
        done, self.done = self.done, []
        return done + ([] if self.replays is None else self.replays.read())

    def score(self) -> float:
        """Return the recipe's validation score."""
        return float(self.recipe.score(self.model) if self.replays is None else self.replays.score())

    def update(self) -> None:
        """Clip the gradients and take one step."""
        if self.config.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()
