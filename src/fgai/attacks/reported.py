"""`ReportedAttack`: chooses by what is reported, not by the loss it climbs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fgai.attacks.base import Attack, Judge
from fgai.attacks.budget import Budget
from fgai.attacks.search.aims import Aim, ExplanationAim, IntrudersAim, LinkAim, PredictionAim
from fgai.attacks.search.climb import Found
from fgai.attacks.search.site import Site
from fgai.attention import touched_rows
from fgai.graph import Graph, GraphChange
from fgai.metrics import error_weights, task_scores
from fgai.objectives import Clean, Intruders, Objective, Value
from fgai.recompute import Recompute
from fgai.tasks import task_of


class ReportedAttack(Attack):
    """An attack whose strongest change is the one that does most damage to what is reported.

    That is one minus the task's headline score against the true labels (the clean predictions where there are
    none); for an explanation objective the share of the top-k that the touched nodes lost; for `intruders`
    the attention that new nodes take.
    """

    def __init__(
        self, budget: Budget, objective: str | Objective | Value = "prediction", *, k: int = 5
    ) -> None:
        super().__init__(budget, objective, k=k)
        self.intruders = self.objective.value if isinstance(self.objective.value, Intruders) else None
        self.reads = self.objective.explanation is not None or self.intruders is not None
        """Whether attention is what it aims at."""

    @property
    def searches(self) -> bool:
        """It does, with steps of its own."""
        return True

    def damage(self, judge: Judge, change: GraphChange, value: float) -> float:
        """Return what is reported after the change."""
        logits, attention = judge.look(change)
        if self.objective.explanation is not None:
            touched = touched_rows(judge.clean.attention, attention)
            return float(self.objective.explanation.shares(attention, judge.clean, touched)[1])
        if self.intruders is not None:
            return float(self.intruders(logits, attention, judge.clean))
        task, rows = task_of(judge.graph), judge.clean.nodes
        return (
            1 - task_scores(task.name, logits[rows], self.labels(judge)[rows])[task.headline_for(judge.graph)]
        )

    def labels(self, judge: Judge) -> Tensor:
        """Return the class each row should have: the true one, or else the clean prediction."""
        predicted = judge.clean.logits.argmax(1)
        truth = task_of(judge.graph).labels(judge.graph)
        return predicted if truth is None else truth.where(truth >= 0, predicted)

    def predicted(self, judge: Judge) -> Tensor | None:
        """Return the clean predictions [N], where there is one for every node."""
        logits = judge.clean.logits
        return logits.argmax(1) if logits.shape[0] == judge.graph.num_nodes else None

    def site(
        self, model: nn.Module, graph: Graph, endpoints: Tensor, clean: Clean, recompute: Recompute | None
    ) -> Site:
        """Return the model as a function of the features of new nodes at these endpoints."""
        ready = None if self.intruders is not None else recompute
        return Site(model, graph, endpoints, clean, ready, reads=self.reads)

    def aim(self, losses: Sequence[str], site: Site, labels: Tensor) -> Aim:
        """Return what is climbed there, by a loss for each set of features."""
        if self.objective.explanation is not None:
            return ExplanationAim(site, self.objective.explanation, len(losses))
        if self.intruders is not None:
            return IntrudersAim(site, self.intruders)
        task = task_of(site.graph)
        score = task.scores[task.headline_for(site.graph)]
        kind = LinkAim if score == "link_auc" else PredictionAim
        return kind(site, losses, labels, error_weights(score, labels[site.clean.nodes]))


def member_row(member: str, rule: str, found: Found, seconds: float) -> dict[str, Any]:
    """Return what the ledger tells of one member."""
    return {
        "member": member,
        "endpoints": rule,
        "damage": found.damage,
        "loss": found.loss,
        "gradient": found.gradient,
        "steps": found.steps,
        "seconds": seconds,
    }
