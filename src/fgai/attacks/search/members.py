"""The members of the ensemble: start × space × optimiser × loss, each a search of its own."""

from __future__ import annotations

from dataclasses import dataclass

from fgai.attacks.search.aims import ROW_LOSSES
from fgai.attacks.search.optimisers import OPTIMISERS
from fgai.attacks.search.spaces import SPACES
from fgai.attacks.search.starts import STARTS
from fgai.checks import at_least, one_of


@dataclass(frozen=True, kw_only=True)
class Member:
    """One way to search.

    Attributes:
        name: for records.
        start: a name from `STARTS`.
        space: a name from `SPACES`.
        optimiser: a name from `OPTIMISERS`.
        rate: its step size or learning rate, in units of half the box.
        loss: a name from `ROW_LOSSES`, for predictions.
        steps: gradient steps.
    """

    name: str
    start: str
    space: str = "tanh"
    optimiser: str = "adam"
    rate: float = 0.1
    loss: str = "margin"
    steps: int = 300

    def __post_init__(self) -> None:
        one_of(self.start, "start", tuple(STARTS))
        one_of(self.space, "space", tuple(SPACES))
        one_of(self.optimiser, "optimiser", tuple(OPTIMISERS))
        one_of(self.loss, "loss", tuple(ROW_LOSSES))
        at_least(self.steps, "steps", 0)


MEMBERS: tuple[Member, ...] = (
    Member(
        name="sign large", start="middle", space="box", optimiser="sign", rate=0.1, loss="entropy", steps=50
    ),
    Member(name="sign small", start="middle", space="box", optimiser="sign", rate=0.02, steps=200),
    Member(name="adam small entropy", start="small", loss="entropy"),
    Member(name="adam small margin", start="small"),
    Member(name="adam small reach", start="small", loss="reach"),
    Member(name="adam medium entropy", start="medium", loss="entropy"),
    Member(name="adam medium margin", start="medium"),
    Member(name="adam large margin", start="large"),
    Member(name="adam large reach", start="large", loss="reach"),
    Member(name="adam others margin", start="others"),
    Member(
        name="momentum small margin", start="small", space="box", optimiser="momentum", rate=0.05, steps=100
    ),
    Member(name="transfer", start="donated", steps=100),
)

DONOR = Member(name="donor", start="small")
"""How the parent model is attacked for the features it donates."""
