"""Injection that changes the explanation and keeps the prediction, whatever objective is asked for."""

from __future__ import annotations

from fgai.attacks.budget import Budget
from fgai.attacks.injection import PGDInjection
from fgai.objectives import Objective


class PreservingInjection(PGDInjection):
    """`PGDInjection` under the `preserving` objective: another top-k, the same class.

    The objective is part of the threat: any other that is asked for by name is replaced. A callable, such as
    a `Preserving` with another share of classes to keep, is taken as it is.

    Args:
        budget: what it may spend.
        objective: a callable, or a name, which does not matter.
        k: size of the explanation.
    """

    name = "preserving-injection"
    own_objective = True

    def __init__(self, budget: Budget, objective: str | Objective = "preserving", *, k: int = 5) -> None:
        super().__init__(budget, "preserving" if isinstance(objective, str) else objective, k=k)
