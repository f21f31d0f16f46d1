"""Threats by name, the same for every method: those of the evaluation protocol."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fgai.attacks.base import Attack
from fgai.attacks.budget import Budget
from fgai.attacks.ensemble import EnsembleInjection, ShortEnsemble
from fgai.attacks.existing import DICE, PRBCD, FeaturePGD, RandomEdges
from fgai.attacks.injection import TDGIA, AdaptiveInjection, NaturalInjection, PGDInjection, RandomInjection
from fgai.attacks.values import ValueInjection
from fgai.checks import at_least, one_of
from fgai.errors import InputError
from fgai.objectives import Loss, Objective
from fgai.tasks import get_task
from fgai.typed import typed


@typed
@dataclass(frozen=True)
class Threat:
    """A named threat: which attack, with which budget, and what for.

    `budget` is that on one graph, `per_graph` that for each graph of a batch of small ones (`budget` where
    None). `objective` is what the attacker maximises, if that is part of the threat. `weak` says why its
    search is too weak for a claim; empty if it is not. `about` is one line.
    """

    name: str
    attack: type[Attack]
    budget: Budget
    about: str
    per_graph: Budget | None = None
    objective: str | Objective | None = None
    weak: str = ""

    def budget_for(self, task: str) -> Budget:
        """Return the budget of a task, given by its name."""
        return self.per_graph if get_task(task).row_per_graph and self.per_graph is not None else self.budget

    def sized(
        self, nodes: int | None = None, edges: int | None = None, box: tuple[float, float] | None = None
    ) -> Threat:
        """Return the threat with other `nodes` and `edges`, or in another `box`; None keeps what it has.

        `InputError` for a number below 1, or of something this threat does not change.

        Example:
            >>> THREATS["standard"].sized(nodes=2, box=(0.0, 1.0)).budget.box
            (0.0, 1.0)
        """
        counts = (("nodes", nodes), ("edges", edges))
        changes: dict[str, Any] = {name: count for name, count in counts if count is not None}
        for name, count in changes.items():
            at_least(count, name, 1)
            if not getattr(self.budget, name):
                raise InputError(f"the threat {self.name!r} has no `{name}` to change; leave it out")
        if box is not None:
            if not self.budget.nodes and not self.budget.radius:
                raise InputError(f"the threat {self.name!r} changes no features; leave `box` out")
            changes["box"] = box
        per_graph = None if self.per_graph is None else replace(self.per_graph, **changes)
        return replace(self, budget=replace(self.budget, **changes), per_graph=per_graph)


DEFAULT = "ensemble-short"  # the threat of `evaluate`, `compare`, `report` and `audit` if none is named


def _injection(name: str, attack: type[Attack], about: str, *, weak: str = "", **search: Any) -> Threat:
    """A threat of 20 new nodes with 20 edges each; in a batch, of one node with 3 edges in each graph."""
    budget, small = Budget(nodes=20, edges=20, **search), Budget(nodes=1, edges=3, **search)
    return Threat(name, attack, budget, f"20 nodes × 20 edges{about}", small, weak=weak)


SIGN_50: dict[str, Any] = {"steps": 50, "step_size": 0.05}
LARGE: tuple[dict[str, Any], dict[str, Any]] = {"nodes": 60, "edges": 40}, {"nodes": 3, "edges": 4}
_ALL = (
    _injection(DEFAULT, ShortEnsemble, ", the searches that find most, 100 steps each: about a minute"),
    _injection(
        "ensemble",
        EnsembleInjection,
        ", all searches of the ensemble, random and chosen endpoints: for every claim",
    ),
    Threat(
        "ensemble-strong",
        EnsembleInjection,
        Budget(**LARGE[0]),
        "60 nodes × 40 edges, all searches of the ensemble: reported beside `ensemble`",
        Budget(**LARGE[1]),
    ),
    _injection(
        "standard",
        PGDInjection,
        ", ten signed steps: the paper's own column",
        weak="the paper's weak attack, ten signed steps",
        steps=10,
        step_size=0.1,
    ),
    Threat(
        "strong",
        PGDInjection,
        Budget(**LARGE[0], **SIGN_50, restarts=3),
        "60 nodes × 40 edges, 3 × 50 signed steps: for old results",
        Budget(**LARGE[1], **SIGN_50, restarts=3),
        weak="signed steps alone, a weak search",
    ),
    _injection("random", RandomInjection, ", random features in the data's range: the noise floor"),
    Threat(
        "edges", RandomEdges, Budget(edges=400), "400 random edges between existing nodes", Budget(edges=2)
    ),
    Threat(
        "modify",
        FeaturePGD,
        Budget(rows=0.05, radius=0.1, steps=10, step_size=0.01),
        "features of 5 % of the test nodes moved by at most a tenth of half their box",
    ),
    _injection(
        "adaptive",
        AdaptiveInjection,
        " in disguise, 4 × 50 steps: for models with a defence",
        **SIGN_50,
        restarts=4,
    ),
    Threat(
        "preserving",
        PGDInjection,
        Budget(nodes=20, edges=20, steps=50, step_size=0.1),
        "20 nodes × 20 edges that change explanations and keep the predicted classes",
        Budget(nodes=1, edges=3, steps=50, step_size=0.1),
        objective="preserving",
    ),
    Threat("dice", DICE, Budget(edges=400), "400 edges: fewer within classes, more between, no search"),
    _injection(
        "natural",
        NaturalInjection,
        " that look like real ones: copies and mixtures of nodes of other classes",
        steps=200,
        step_size=0.1,
    ),
    Threat(
        "flips",
        PRBCD,
        Budget(edges=400, steps=50, step_size=1000.0),
        "400 edges between existing nodes come or go, found by gradients (PRBCD)",
    ),
    Threat(
        "tdgia",
        TDGIA,
        Budget(nodes=20, edges=20, steps=50, step_size=0.3),
        "20 nodes × 20 edges where the graph is weakest, in five batches",
    ),
    _injection(
        "values",
        ValueInjection,
        " with any values that the first layer's limits allow: for models with limits",
    ),
)
THREATS = {threat.name: threat for threat in _ALL}


@typed
def register_threat(threat: Threat) -> Threat:
    """Add a threat by its name: to `make_attack`, `evaluate`, the report and the command line.

    `InputError` if the name is taken.

    Example:
        >>> mild = Threat("mild", PGDInjection, Budget(nodes=5, edges=5, steps=10, step_size=0.1), "5 × 5")
        >>> register_threat(mild).name in THREATS
        True
        >>> THREATS.pop("mild") is mild
        True
    """
    if threat.name in THREATS:
        raise InputError(f"the threat {threat.name!r} exists already; choose another name")
    THREATS[threat.name] = threat
    return threat


@typed
def make_attack(
    threat: str | Threat,
    objective: str | Objective | Loss | None = None,
    *,
    targets: str = "test",
    k: int = 5,
    task: str = "node",
) -> Attack:
    """Return the attack of a threat: a name from `THREATS`, or a `Threat` of your own.

    `objective` is `prediction` by default, or the threat's own; `targets` are `test`, `val` or `fit`; `k` is
    the size of the explanation, for its objective; `task` is `node`, `link` or `graph`, whose small graphs
    get a small budget each. `InputError` for an unknown name, or another objective than the threat's own.
    """
    threat = threat_of(threat)
    chosen = (threat.objective or "prediction") if objective is None else objective
    own, asked = Objective.of(threat.objective or chosen, k).name, Objective.of(chosen, k).name
    if own != asked:
        raise InputError(
            f"the threat {threat.name!r} has the objective {own!r}, so `objective` cannot be"
            f" {asked!r}; leave it out or take another threat"
        )
    return threat.attack(replace(threat.budget_for(task), targets=targets), chosen, k=k)


@typed
def threat_of(threat: str | Threat) -> Threat:
    """Return a threat by its name, or as it is; `InputError` for an unknown name."""
    return threat if isinstance(threat, Threat) else THREATS[one_of(threat, "threat", tuple(THREATS))]


@typed
def weak_search_note(name: str) -> str:
    """Return the note for numbers measured under a threat whose search is weak, or nothing.

    Example:
        >>> weak_search_note("strong")
        'Measured with signed steps alone, a weak search; use the threat ensemble for a claim.'
    """
    weak = THREATS[name].weak if name in THREATS else ""
    return f"Measured with {weak}; use the threat ensemble for a claim." if weak else ""
