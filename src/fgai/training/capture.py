"""Training steps without launch overhead: on a GPU each kind of step is captured once and then replayed.

A training step on a graph of ten thousand nodes is a hundred kernels of a few microseconds, and starting them
one by one takes ten times as long as running them. Their shapes never change, so they are captured in a CUDA
graph; the draws of an epoch are copied to fixed addresses before each replay. The results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fgai.attention import adapter_of
from fgai.errors import FgaiWarning, warn
from fgai.ops.capture import Replay

WARM_UP = 2
"""Steps of a kind that run kernel by kernel before it is captured: they compile and allocate what stays."""
RING = 32
"""Epochs whose terms may wait on the device before they are read."""


@dataclass(frozen=True)
class Drawn:
    """The random draws of one epoch, made on the host.

    Steps of one `kind` differ only in tensors, whose shapes are the same in every epoch.
    """

    kind: str
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Drawn:
        """Return the same on a device."""
        return Drawn(self.kind, {name: tensor.to(device) for name, tensor in self.tensors.items()})


class _Terms(NamedTuple):
    """The loss terms of one epoch and the time it took."""

    epoch: int
    values: dict[str, float]
    seconds: float


def can_replay(recipe: Any, model: nn.Module) -> bool:
    """Whether the steps can be captured: on a GPU, where both recipe and model declare it."""
    first, declared = next(model.parameters(), None), vars(type(recipe)).get("capturable", False)
    return first is not None and first.is_cuda and bool(declared) and adapter_of(model).can_capture


def _summed(names: list[str], numbers: list[float]) -> dict[str, float]:
    """Add up the terms of all parts by name, the total last."""
    values: dict[str, float] = {}
    for name, number in zip(names, numbers, strict=True):
        values[name] = values.get(name, 0.0) + number
    return {**{k: v for k, v in values.items() if k != "total"}, "total": values["total"]}


def _mean_terms(taken: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Average terms over steps by their sizes, each over the steps that have it; one step as it is."""
    if len(taken) == 1:
        return taken[0][1]
    sums: dict[str, list[float]] = {}
    for size, values in taken:
        for name, value in values.items():
            total = sums.setdefault(name, [0.0, 0.0])
            total[0] += size * value
            total[1] += size
    means = {name: value / size for name, (value, size) in sums.items()}
    return {**{k: v for k, v in means.items() if k != "total"}, "total": means["total"]}


def _run_parts(parts: Iterator[dict[str, Tensor]]) -> tuple[list[str], Tensor]:
    """Back-propagate every part and return the names and values of all terms, on the device."""
    names: list[str] = []
    terms: list[Tensor] = []
    for part in parts:
        part["total"].backward()  # type: ignore[no-untyped-call]
        names += part
        terms += [term.detach().reshape(()) for term in part.values()]
        del part
    return names, torch.stack(terms) if terms else torch.zeros(0)


class _Replays:
    """The steps and the score of one training, captured kind by kind."""

    def __init__(
        self, recipe: Any, model: nn.Module, update: Callable[[], None], seed_of: Callable[[int], int]
    ) -> None:
        self.recipe, self.model, self.update, self.seed_of = recipe, model, update, seed_of
        self.device = next(model.parameters()).device
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[str, Replay[Any]] = {}
        self.inputs: dict[str, Drawn] = {}
        self.staging: dict[str, dict[str, Tensor]] = {}
        self.runs: dict[str, int] = {}
        self.ring = torch.zeros(RING, 0, device=self.device, dtype=torch.float64)
        self.waiting: list[tuple[int, list[str]]] = []
        self.since = 0.0
        self.failed = False

    def step(self, epoch: int) -> bool:
        """Launch one epoch; False when it cannot be replayed and was not run."""
        if self.failed or (drawn := self.recipe.draw(epoch)) is None:
            return False
        if not self.waiting:
            self.since = perf_counter()
        inputs = self._stage(drawn)
        names, terms = self._compute(drawn.kind, inputs, self.seed_of(epoch))
        if len(names) > self.ring.shape[1]:
            self.ring = pad(self.ring, (0, len(names) - self.ring.shape[1]))
        self.ring[len(self.waiting), : len(names)].copy_(terms)
        self.waiting.append((epoch, names))
        return True

    @property
    def full(self) -> bool:
        """Whether the terms must be read before the next step."""
        return len(self.waiting) >= RING

    def read(self) -> list[_Terms]:
        """Wait for the epochs under way and return their terms."""
        if not self.waiting:
            return []
        rows = self.ring[: len(self.waiting)].tolist()
        seconds = (perf_counter() - self.since) / len(rows)
        terms = [
            _Terms(epoch, _summed(names, row[: len(names)]), seconds)
            for (epoch, names), row in zip(self.waiting, rows, strict=True)
        ]
        self.waiting.clear()
        return terms

    def score(self) -> float:
        """Return the recipe's score, captured from the second time on."""
        work = lambda: self.recipe.measure(self.model)  # noqa: E731
        return float(self._run("score", work, warm_up=1))

    def _stage(self, drawn: Drawn) -> Drawn:
        """Copy the draws to their fixed addresses, from page-locked memory, without waiting."""
        if drawn.kind not in self.inputs:
            self.inputs[drawn.kind] = drawn.to(self.device)
            self.staging[drawn.kind] = {
                name: torch.empty((RING, *t.shape), dtype=t.dtype, pin_memory=True)
                for name, t in drawn.tensors.items()
            }
        else:
            for name, tensor in drawn.tensors.items():
                page = self.staging[drawn.kind][name][len(self.waiting)]
                page.copy_(tensor)
                self.inputs[drawn.kind].tensors[name].copy_(page, non_blocking=True)
        return self.inputs[drawn.kind]

    def _compute(self, kind: str, inputs: Drawn, seed: int) -> tuple[list[str], Tensor]:
        def work() -> tuple[list[str], Tensor]:
            self.model.train()
            self.model.zero_grad(set_to_none=True)
            terms = _run_parts(self.recipe.replayed(self.model, inputs))
            self.update()
            return terms

        torch.cuda.default_generators[self.device.index or 0].manual_seed(seed)
        result: tuple[list[str], Tensor] = self._run(f"step {kind}", work, WARM_UP)
        return result

    def _run(self, name: str, work: Callable[[], Any], warm_up: int) -> Any:
        if name in self.graphs:
            return self.graphs[name]()
        self.runs[name] = self.runs.get(name, 0) + 1
        if self.runs[name] <= warm_up or self.failed:
            return work()
        try:
            self.graphs[name] = Replay(work, self.device, self.pool)
        except RuntimeError as error:
            self.failed = True
            text = f"a training step could not be captured ({error}); it runs kernel by kernel"
            warn(FgaiWarning(f"{text}, which is slower"))
            return work()
        return self.graphs[name]()
