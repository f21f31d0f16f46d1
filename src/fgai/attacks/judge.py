"""`Judge`: the objective of an attack on perturbed graphs, and the ledger of what that cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fgai.attention import AttentionMap, call_model, observe
from fgai.graph import Graph, GraphChange
from fgai.graph.change import SeenEdges
from fgai.objectives import READS, Clean, Objective
from fgai.progress import current
from fgai.recompute import PartialObjective, Recompute
from fgai.typed import typed


@typed
@dataclass
class Ledger:
    """What an attack spent.

    Attributes:
        steps: gradient steps over all restarts.
        forwards: forward passes, the judging ones included.
        seconds: wall-clock time.
        gradient: largest entry of any gradient seen, in size; 0 where none was taken.
        curve: objective at each candidate that was judged, in order.
        feasible: share of those that kept what the objective demands; None where it demands nothing.
        partial: forward passes that computed only the rows in reach of the change.
        share: mean over the forward passes of the work done, as a share of a full pass.
        members: of an ensemble, what each member found where, and what that took; empty for other attacks.
        damages: what each proposed change was chosen by, random noise first; judged afresh by a full pass.
        won: place of the chosen change among those.
        rules: of an ensemble, the rule that chose the endpoints of each proposed change; else empty.
    """

    steps: int = 0
    forwards: int = 0
    seconds: float = 0.0
    gradient: float = 0.0
    curve: list[float] = field(default_factory=list)
    feasible: float | None = None
    partial: int = 0
    share: float = 1.0
    members: list[dict[str, Any]] = field(default_factory=list)
    damages: list[float] = field(default_factory=list)
    won: int = 0
    rules: list[str] = field(default_factory=list)

    def proposals(self) -> list[tuple[dict[str, Any] | None, float]]:
        """Return the member that proposed each change, None for noise, and the change's damage.

        Every restart proposes random noise first, then what its members found.

        Example:
            >>> rows = [{"member": "sign"}, {"member": "polish"}]
            >>> Ledger(members=rows, damages=[0.1, 0.3, 0.4]).proposals()[:2]
            [(None, 0.1), ({'member': 'sign'}, 0.3)]
        """
        restarts = max(1, len(self.damages) - len(self.members))
        each, rows = len(self.members) // restarts, iter(self.members)
        return [
            (None if place % (each + 1) == 0 else next(rows), damage)
            for place, damage in enumerate(self.damages)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for records."""
        return asdict(self)


class Mark(NamedTuple):
    """Where the books of a judge stand."""

    values: int
    work: float
    forwards: int
    partial: int


@typed
class Judge:
    """Scores perturbed graphs through the attacked model; every forward pass is noted in the ledger.

    Args:
        model: attacked, in eval mode.
        graph: clean, prepared for the model.
        objective: what the attacker maximises.
        clean: what the model said before the attack.
        ledger: where forward passes are counted.
        partial: computes the objective from the rows a change reaches, where that pays; None never does.
        recompute: the model on the clean graph, ready for partial passes; None where it cannot.
        vanilla: the model the attacked one was made from, or None.
        on_step: called with a few words before each long step, or None.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        objective: Objective,
        clean: Clean,
        ledger: Ledger,
        partial: PartialObjective | None = None,
        recompute: Recompute | None = None,
        vanilla: nn.Module | None = None,
        on_step: Callable[[str], None] | None = None,
    ) -> None:
        self._on_step = on_step
        self.clean, self.model, self.graph = clean, model, graph
        self.recompute, self.vanilla = recompute, vanilla
        self._model, self._objective, self._ledger, self._partial = model, objective, ledger, partial
        self._graph, self._last = graph, (SeenEdges(GraphChange()), graph)
        self._work = 0.0
        self._trace: list[Tensor] = []  # read once at the end: reading every value would stall the device

    def __call__(self, attacked: Graph) -> Tensor:
        """Return the objective on a perturbed graph, with gradients to its features."""
        return self.guided(attacked)[0]

    def guided(self, attacked: Graph, guide: Objective | None = None) -> tuple[Tensor, Tensor]:
        """Return the objective, and a smoother function to climb in its place (itself without `guide`)."""
        value = self._counted(None if guide or not self._partial else self._partial.on(attacked))
        if value is None:
            wanted = {self._objective.reads} if guide is None else {self._objective.reads, guide.reads}
            seen = self._forward(attacked, max(wanted, key=READS.index))
            value = self._objective(*seen, self.clean)
        self._trace.append(value.detach())
        return value, value if guide is None else guide.loss(*seen, self.clean)

    def change(self, change: GraphChange) -> Tensor:
        """Return the objective after a change of the clean graph, with gradients to its features.

        Preferable to putting the graph together: changes in a row that share their edges share that work.
        """
        partial = self._partial if change.entry_values is None else None
        value = self._counted(None if partial is None else partial.after(change))
        if value is None:
            last, attacked = self._last
            if not last.same(change):
                attacked = change.apply(self._graph)[0]
                self._last = SeenEdges(change), attacked
            value = self._objective(
                *self._forward(
                    attacked.replace(
                        features=change.features_on(self._graph), entry_values=change.entry_values
                    ),
                    self._objective.reads,
                ),
                self.clean,
            )
        self._trace.append(value.detach())
        return value

    def look(self, change: GraphChange) -> tuple[Tensor, AttentionMap]:
        """Return logits and attention after a change: one full pass, no objective."""
        return self._forward(change.apply(self._graph)[0], "heads")

    def tell(self, step: str) -> None:
        """Tell whoever watches what comes next, in a few words."""
        current().tell(step)
        if self._on_step is not None:
            self._on_step(step)

    def spent(self, passes: int, share: float) -> None:
        """Note forward passes that a search made by itself, each a share of a full one."""
        self._ledger.forwards += passes
        self._ledger.partial += passes if share < 1 else 0
        self._work += passes * share
        self._ledger.share = self._work / max(1, self._ledger.forwards)

    def scored(self, logits: Tensor, attention: AttentionMap) -> Tensor:
        """Return the objective of outputs of a pass made elsewhere: counted, but not in the curve."""
        self._count(1.0)
        return self._objective(logits, attention, self.clean)

    def mark(self) -> Mark:
        """Return where the books stand, for `back_to`."""
        return Mark(len(self._trace), self._work, self._ledger.forwards, self._ledger.partial)

    def back_to(self, mark: Mark) -> None:
        """Forget what was noted since."""
        del self._trace[mark.values :]
        self._work, self._ledger.forwards, self._ledger.partial = mark.work, mark.forwards, mark.partial

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Note nothing inside the block: what runs there is only captured."""
        mark = self.mark()
        try:
            yield
        finally:
            self.back_to(mark)

    def replayed(self, value: Tensor, share: float = 1.0) -> None:
        """Note a forward pass that was replayed from a capture, its value and its share of a full one."""
        self._count(share)
        self._ledger.partial += share < 1
        self._trace.append(value.clone())

    def share_since(self, mark: Mark) -> float:
        """Return the mean work of the forward passes since, as a share of a full one."""
        return (self._work - mark.work) / max(1, self._ledger.forwards - mark.forwards)

    def curve(self) -> list[float]:
        """Return every value judged so far, in order."""
        return torch.stack(self._trace).tolist() if self._trace else []

    def _counted(self, found: tuple[Tensor, float] | None) -> Tensor | None:
        if found is None:
            return None
        self._count(found[1])
        self._ledger.partial += 1
        return found[0]

    def _forward(self, attacked: Graph, reads: str) -> tuple[Tensor, AttentionMap]:
        self._count(1.0)
        if reads == "logits":
            return call_model(self._model, attacked), AttentionMap(())
        seen = observe(self._model, attacked, heads="mean" if reads == "ranking" else "each", grad=True)
        return seen.logits, seen.attention

    def _count(self, share: float) -> None:
        self._ledger.forwards += 1
        self._work += share
        self._ledger.share = self._work / self._ledger.forwards
