"""Training steps in CUDA graphs: on a GPU each kind of step is captured once and then replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fgai.attention.interface import graph_model
from fgai.errors import FgaiWarning, warn
from fgai.ops.capture import Replay
from fgai.training.recipes import Draws, Recipe, epoch_seed

WARM_UP = 2  # steps of a kind before its capture, which compile kernels and allocate memory
MAX_UNREAD = 32  # epochs whose terms may stay on the device before they are read


class _EpochTerms(NamedTuple):
    epoch: int
    values: dict[str, float]
    seconds: float


def can_capture(recipe: Recipe, model: nn.Module) -> bool:
    """Whether steps can be captured: the model is on a GPU, and recipe and model both declare it."""
    first, own = next(model.parameters(), None), graph_model(model)
    declared = vars(type(recipe)).get("capturable", False) and own is not None and own.can_capture
    return first is not None and first.is_cuda and bool(declared)


def _sum_by_name(names: list[str], numbers: list[float]) -> dict[str, float]:
    values = dict.fromkeys(names, 0.0)
    for name, number in zip(names, numbers, strict=True):
        values[name] += number
    return _total_last(values)


def _mean_by_name(steps: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Return the weighted mean of each term over the steps that have it; a single step is unchanged."""
    if len(steps) == 1:
        return steps[0][1]
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for weight, values in steps:
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + weight * value
            weights[name] = weights.get(name, 0.0) + weight
    return _total_last({name: value / weights[name] for name, value in sums.items()})


def _total_last(values: dict[str, float]) -> dict[str, float]:
    return {**{name: value for name, value in values.items() if name != "total"}, "total": values["total"]}


def _backward(losses: Iterator[dict[str, Tensor]]) -> tuple[list[str], Tensor]:
    """Back-propagate the losses one by one; return the names and values of all terms, on the device."""
    names: list[str] = []
    terms: list[Tensor] = []
    for loss in losses:
        loss["total"].backward()  # type: ignore[no-untyped-call]
        names += loss
        terms += [term.detach().reshape(()) for term in loss.values()]
        del loss
    return names, torch.stack(terms) if terms else torch.zeros(0)


class _CapturedSteps:
    """Steps and score of one training on a GPU, captured kind by kind; `update` changes the weights."""

    def __init__(self, recipe: Recipe, model: nn.Module, update: Callable[[], None], seed: int) -> None:
        self.recipe, self.model, self.update, self.seed = recipe, model, update, seed
        self.device = next(model.parameters()).device
        self.pool = torch.cuda.graph_pool_handle()
        self.replays: dict[str, Replay[Any]] = {}
        self.num_runs: dict[str, int] = {}
        self.inputs: dict[str, Draws] = {}
        self.pinned: dict[str, dict[str, Tensor]] = {}  # page-locked memory, from which copies do not wait
        self.terms = torch.zeros(MAX_UNREAD, 0, device=self.device, dtype=torch.float64)  # a row per epoch
        self.unread: list[tuple[int, list[str]]] = []  # epoch and names of the terms in each row
        self.started, self.failed = 0.0, False

    def step(self, epoch: int) -> bool:
        """Start one epoch on the GPU; return False, without running it, if it cannot be captured."""
        if self.failed or (draws := self.recipe.draw(epoch)) is None:
            return False
        if not self.unread:
            self.started = perf_counter()
        inputs = self._copy_to_device(draws)

        def work() -> tuple[list[str], Tensor]:
            self.model.train()
            self.model.zero_grad(set_to_none=True)
            terms = _backward(self.recipe.losses_from(self.model, inputs))
            self.update()
            return terms

        torch.cuda.default_generators[self.device.index or 0].manual_seed(epoch_seed(self.seed, epoch))
        names, terms = self._run(f"step {draws.kind}", work, WARM_UP)
        if len(names) > self.terms.shape[1]:
            self.terms = pad(self.terms, (0, len(names) - self.terms.shape[1]))
        self.terms[len(self.unread), : len(names)].copy_(terms)
        self.unread.append((epoch, names))
        return True

    def read(self) -> list[_EpochTerms]:
        if not self.unread:
            return []
        rows = self.terms[: len(self.unread)].tolist()
        seconds = (perf_counter() - self.started) / len(rows)
        epochs = [
            _EpochTerms(epoch, _sum_by_name(names, row[: len(names)]), seconds)
            for (epoch, names), row in zip(self.unread, rows, strict=True)
        ]
        self.unread.clear()
        return epochs

    def score(self) -> float:
        return float(self._run("score", lambda: self.recipe.score_tensor(self.model), warm_up=1))

    def _copy_to_device(self, draws: Draws) -> Draws:
        """Copy the draws to the fixed addresses of their kind, without waiting for the device."""
        if draws.kind not in self.inputs:
            self.inputs[draws.kind] = draws.to(self.device)
            self.pinned[draws.kind] = {
                name: torch.empty((MAX_UNREAD, *tensor.shape), dtype=tensor.dtype, pin_memory=True)
                for name, tensor in draws.tensors.items()
            }
        else:
            for name, tensor in draws.tensors.items():
                page = self.pinned[draws.kind][name][len(self.unread)]
                page.copy_(tensor)
                self.inputs[draws.kind].tensors[name].copy_(page, non_blocking=True)
        return self.inputs[draws.kind]

    def _run(self, name: str, work: Callable[[], Any], warm_up: int) -> Any:
        """Call `work` directly the first `warm_up` times, then capture it once and replay the capture."""
        if name in self.replays:
            return self.replays[name]()
        self.num_runs[name] = self.num_runs.get(name, 0) + 1
        if self.num_runs[name] <= warm_up or self.failed:
            return work()
        try:
            self.replays[name] = Replay(work, self.device, self.pool)
        except RuntimeError as error:
            self.failed = True
            text = f"a training step could not be captured ({error}); it runs kernel by kernel"
            warn(FgaiWarning(f"{text}, which is slower"))
            return work()
        return self.replays[name]()
