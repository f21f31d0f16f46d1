"""`ReportedAttack`: chooses by what is reported, not by the loss it climbs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from fgai.attacks.base import Attack, Judge
from fgai.attacks.search.aims import Aim, ExplanationAim, LinkAim, ObjectiveAim, PredictionAim
from fgai.attacks.search.climb import Found
from fgai.attacks.search.site import Site
from fgai.graph import Graph, GraphChange
from fgai.metrics import error_weights
from fgai.objectives import Clean
from fgai.recompute import Recompute
from fgai.tasks import task_of


class ReportedAttack(Attack):
    """An attack whose strongest change is the one with the largest `Objective.damage`.

    Its searches climb the objective's loss. For wrong predictions they climb several losses, see
    `fgai.attacks.search.aims.ROW_LOSSES`.
    """

    @property
    def searches(self) -> bool:
        """It does, with steps of its own."""
        return True

    @property
    def reads(self) -> bool:
        """Whether attention is what it aims at."""
        return self.objective.reads != "logits"

    def damage(self, judge: Judge, change: GraphChange, value: float) -> float:
        """Return the objective's damage after the change, from a full pass."""
        return float(self.objective.judged(*judge.look(change), judge.clean))

    def predicted(self, judge: Judge) -> Tensor | None:
        """Return the clean predictions [N], where there is one for every node."""
        logits = judge.clean.logits
        return logits.argmax(1) if logits.shape[0] == judge.graph.num_nodes else None

    def site(
        self, model: nn.Module, graph: Graph, endpoints: Tensor, clean: Clean, recompute: Recompute | None
    ) -> Site:
        """Return the model as a function of the features of new nodes at these endpoints."""
        return Site(model, graph, endpoints, clean, self.partial(recompute), reads=self.objective.reads)

    def partial(self, recompute: Recompute | None) -> Recompute | None:
        """Return `recompute` if the objective can be computed from the rows in reach, else None."""
        return recompute if self.objective.classes or self.objective.explanation is not None else None

    def aim(self, losses: Sequence[str], site: Site) -> Aim:
        """Return the objective at a site; `losses` names the row loss of each set of features."""
        if self.objective.explanation is not None:
            return ExplanationAim(site, self.objective.explanation, len(losses))
        if not self.objective.classes:
            return ObjectiveAim(site, self.objective)
        clean = site.clean
        score = task_of(site.graph).scores[clean.score]
        kind = LinkAim if score == "link_auc" else PredictionAim
        return kind(site, losses, error_weights(score, clean.labels[clean.nodes]))


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
