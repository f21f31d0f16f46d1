"""The one training loop: every recipe gives terms and a score, the loop does the rest."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from fgai.processes import ProcessGroup, current
from fgai.progress import Bar, shown, stage
from fgai.trackers import Tracker
from fgai.training.capture import Drawn, _mean_terms, _Replays, _run_parts, _summed, _Terms, can_replay
from fgai.training.resume import History, _read_state, _SavedState, _state_digest, _write_state
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
        decay: share of the learning rate that is gone by the last epoch, falling linearly.
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
            process that has none left.
        parts: the loss, see `Recipe.parts`.
    """

    size: int
    parts: Iterator[dict[str, Tensor]]


class Recipe(ABC):
    """A loss and the score that decides which epoch's weights are kept. A whole graph is one batch.

    A recipe defines `parts` and `score`, or `steps` and `score` if it reads mini-batches.

    A recipe whose steps can be captured in a CUDA graph says `capturable = True` in its own class body and
    defines `draw`, `replayed` and `measure`, none of which waits for the device. Subclasses do not inherit
    the flag: they may do more in a step than they draw.
    """

    name: str
    batched: ClassVar[bool] = False
    """Whether it reads mini-batches, which several processes can share."""
    capturable: ClassVar[bool] = False

    def start(self, model: nn.Module, seed: int) -> None:  # noqa: B027
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

    @abstractmethod
    def score(self, model: nn.Module) -> float:
        """Return the validation score, higher is better."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that must survive a restart; none by default."""
        return {}

    def load_state(self, state: dict[str, Tensor]) -> None:  # noqa: B027
        """Restore the tensors that `state` returned."""

    def draw(self, epoch: int) -> Drawn | None:
        """Return the random draws of an epoch, on the CPU; None (the default) runs it without capture."""
        return None

    def replayed(self, model: nn.Module, drawn: Drawn) -> Iterator[dict[str, Tensor]]:
        """Yield the same as `parts`, from draws that are on the device."""
        raise NotImplementedError(f"{type(self).__name__} is capturable and must define `replayed`")

    def measure(self, model: nn.Module) -> Tensor:
        """Return the score as a tensor."""
        raise NotImplementedError(f"{type(self).__name__} is capturable and must define `measure`")


def _device(model: nn.Module) -> torch.device:
    """Return the device of the parameters, of which there must be some."""
    held = next(model.parameters(), None)
    if held is None:
        raise InputError(f"there is nothing to train: {type(model).__name__} has no parameters")
    return held.device


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

    On several ranks (`fgai.large.joined`) each trains on its own mini-batches, all make the same steps, and
    the first alone writes and tells.

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
        tracker: told of every epoch, and of the end.
        run: what the tracker knows it as; the recipe's name by default.

    Raises:
        DivergenceError: when a term is not finite; the last good weights are in the model then.
        InputError: several ranks would train on the whole graph.
        RanksError: ranks disagree, or one failed.
    """
    ranks = current()
    device, tracker = _device(model), tracker if ranks.leads else None
    _check_shared(recipe, ranks)
    optimizer = _optimizer(model, config, device)
    history, best, first = History(), _Best(_copy_of(model)), 0
    with seeded(epoch_seed(seed, -1), device):
        recipe.start(model, seed)
    folder = None if checkpoint is None else Path(checkpoint)
    if (saved := _saved(folder, fingerprint, ranks)) is not None:
        first, score, values = saved.restore(model, optimizer, recipe)
        history, best = History.from_dict(values), _Best(saved.best, score)
    steps, watch = (
        _Steps(model, recipe, config, optimizer, seed),
        _Watch(tracker, run or recipe.name, history),
    )

    def save() -> None:
        if folder is not None and ranks.leads:
            done = len(history.terms)
            kept = best.score, model, best.weights
            _write_state(folder, fingerprint, done, *kept, optimizer, recipe, history)

    began = perf_counter() - history.seconds
    held = _held_interrupt(folder is not None)
    with (
        shown(progress if ranks.leads else False),
        stage(recipe.name, config.epochs, done=first) as bar,
        held as interrupted,
        steps,
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
            if not (steps.due or validates or saves or tracker):
                continue
            done = steps.read()
            for terms in done:
                _check_finite(terms.values, terms.epoch, model, best.weights)
                history.add(terms)
            if validates:
                best.offer(ranks.first(steps.score()), epoch, model, history, config.patience)
            history.seconds = perf_counter() - began
            if saves:
                save()
            for terms in done:
                bar.advance(note=_note(terms.values, best.score))
            watch.epochs(done, None if saves else save)
            if stops or ranks.any(interrupted()):
                raise KeyboardInterrupt
    watch.end(save)
    model.load_state_dict(best.weights)
    model.eval()
    return history


def _check_shared(recipe: Recipe, ranks: ProcessGroup) -> None:
    if ranks.several and not recipe.batched:
        raise InputError("several ranks train in mini-batches: give `batch_size`, or start one process")


def _saved(folder: Path | None, fingerprint: str, ranks: ProcessGroup) -> _SavedState | None:
    """The training that a folder holds, as the first of the ranks reads it."""
    return ranks.first(_read_state(folder, fingerprint) if folder is not None and ranks.leads else None)


def _note(terms: dict[str, float], best: float) -> str:
    """The best score and the loss, its parts last: on a narrow terminal they are cut off."""
    total = {"total": terms["total"], **terms}
    return "  ".join([f"best {best:.4f}", *(f"{name} {value:.4g}" for name, value in total.items())])


def _optimizer(model: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Adam:
    """Adam over all trainable parameters; on a GPU in one kernel that a CUDA graph can hold."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if device.type != "cuda":
        return torch.optim.Adam(parameters, lr=config.lr, weight_decay=config.weight_decay)
    lr = torch.tensor(config.lr, device=device)
    return torch.optim.Adam(parameters, lr=lr, weight_decay=config.weight_decay, fused=True, capturable=True)


class _Watch:
    """Tells a tracker what a history holds; a tracker that raises costs no epoch."""

    def __init__(self, tracker: Tracker | None, run: str, history: History) -> None:
        self.tracker, self.run, self.history = tracker or Tracker(), run, history
        self.tracker.on_start(run, list(self._rows(range(len(history.terms)))))

    def epochs(self, done: Iterable[_Terms], save: Callable[[], None] | None) -> None:
        """Tell of epochs that are done."""
        numbers = [terms.epoch for terms in done]
        with _saving(save):
            for epoch, row in zip(numbers, self._rows(numbers), strict=True):
                self.tracker.on_epoch(self.run, epoch, row)

    def end(self, save: Callable[[], None] | None) -> None:
        """Tell that the training is over; `save` as of `epochs`."""
        found = self.history
        summary: dict[str, float | str] = {
            "epochs": len(found.terms),
            "kept_epoch": found.kept_epoch,
            "stopped": found.stopped,
            "seconds": found.seconds,
        }
        with _saving(save):
            self.tracker.on_end(self.run, summary)

    def _rows(self, numbers: Sequence[int]) -> Iterator[dict[str, float]]:
        """Terms by epoch, and the validation score where there was one."""
        first = min(numbers, default=0)
        scores: dict[int, float] = {}
        for epoch, score in reversed(self.history.scores):
            if epoch < first:
                break
            scores[epoch] = score
        for epoch in numbers:
            found = {"score": scores[epoch]} if epoch in scores else {}
            yield {**self.history.terms[epoch], **found}


@contextmanager
def _saving(save: Callable[[], None] | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if save is not None:
            save()
        raise


@contextmanager
def _held_interrupt(hold: bool = True) -> Iterator[Callable[[], bool]]:
    """Hold the first Ctrl-C back inside the block; the caller asks for it when it suits.

    A second Ctrl-C interrupts at once. Outside the main thread, where Python delivers no signals, nothing is
    held.

    Args:
        hold: False leaves signals alone.

    Yields:
        A function that says whether Ctrl-C was pressed.

    Example:
        >>> with _held_interrupt() as interrupted:
        ...     interrupted()
        False
    """
    pressed = threading.Event()
    if not hold or threading.current_thread() is not threading.main_thread():
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


@dataclass
class _Best:
    """The weights that are kept, and the score they were kept for."""

    weights: dict[str, Tensor]
    score: float = -math.inf

    def offer(self, score: float, epoch: int, model: nn.Module, history: History, patience: int) -> None:
        """Note an epoch's score; keep its weights if it is the best, or stop if none was for long."""
        history.scores.append((epoch, score))
        if score > self.score:
            self.score, self.weights, history.best_epoch = score, _copy_of(model), epoch
        elif epoch - history.best_epoch >= patience:
            history.stopped = "patience"


def _copy_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers of a model as they are now."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _check_finite(values: dict[str, float], epoch: int, model: nn.Module, best: dict[str, Tensor]) -> None:
    """Raise if a term is not finite, with the best weights in the model."""
    bad = [name for name, value in values.items() if not math.isfinite(value) and name != "total"]
    if bad or not math.isfinite(values["total"]):
        model.load_state_dict(best)
        model.eval()
        raise DivergenceError(
            f"training diverged in epoch {epoch + 1}: {', '.join(bad) or 'total'} is not finite; the best"
            " weights so far are kept in the model. Lower `lr` or the weight of that term"
        )


class _Steps:
    """The training steps: captured and replayed where that is possible, else kernel by kernel."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        config: TrainConfig,
        optimizer: torch.optim.Adam,
        seed: int,
    ) -> None:
        self.model, self.recipe, self.config, self.optimizer, self.seed = (
            model, recipe, config, optimizer, seed
        )  # fmt: skip
        self.device, self.ranks = next(model.parameters()).device, current()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.done: list[_Terms] = []
        self.replays: _Replays | None = None
        if can_replay(recipe, model):
            self.replays = _Replays(recipe, model, self.update, lambda epoch: epoch_seed(seed, epoch))

    def __enter__(self) -> _Steps:
        return self

    def __exit__(self, *_: object) -> None:
        """Let the captured graphs and their memory go at once, not when the collector comes by."""
        if self.replays is not None:
            self.model.zero_grad(set_to_none=True)
            self.replays = None

    @property
    def due(self) -> bool:
        """Whether the terms must be read now."""
        return bool(self.done) or (self.replays is not None and self.replays.full)

    def run(self, epoch: int) -> None:
        """Train one epoch, or launch it."""
        self._set_rate(self.config.lr * (1 - self.config.decay * epoch / self.config.epochs))
        if self.replays is not None and self.replays.step(epoch):
            return
        self.done += [] if self.replays is None else self.replays.read()
        tick = perf_counter()
        taken: list[tuple[int, dict[str, float]]] = []
        own = epoch_seed(self.seed, epoch) + self.ranks.rank  # or all ranks would drop the same places
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
            self.ranks.agree({f"weights after epoch {epoch + 1}": _state_digest(self.model, self.recipe)})
            taken = [one for theirs in self.ranks.gather(taken) for one in theirs]
        self.done.append(_Terms(epoch, _mean_terms(taken), perf_counter() - tick))

    def read(self) -> list[_Terms]:
        """Return the terms of the epochs since the last call."""
        done = self.done + ([] if self.replays is None else self.replays.read())
        self.done = []
        return done

    def score(self) -> float:
        """Return the recipe's validation score."""
        return self.recipe.score(self.model) if self.replays is None else self.replays.score()

    def update(self) -> None:
        """Clip the gradients and take one step."""
        if self.config.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self.optimizer.step()

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)  # a captured step reads it from there
            else:
                group["lr"] = rate
