"""The members of the ensemble: start × space × optimiser × loss × gradient, each a search of its own."""

from __future__ import annotations

from dataclasses import dataclass

from fgai.attacks.budget import LARGEST
from fgai.attacks.search.aims import ROW_LOSSES
from fgai.attacks.search.gradients import GRADIENTS
from fgai.attacks.search.optimisers import OPTIMISERS
from fgai.attacks.search.spaces import SPACES
from fgai.attacks.search.starts import STARTS
from fgai.checks import one_of, whole
from fgai.typed import typed


@typed
@dataclass(frozen=True, kw_only=True)
class Member:
    """One way to search.

    Attributes:
        name: for records.
        start: a name from `STARTS`.
        space: a name from `SPACES`.
        optimiser: a name from `OPTIMISERS`.
        rate: its step size or learning rate, in units of half the box.
        loss: a name from `ROW_LOSSES`; explanations have one of their own.
        steps: gradient steps.
        gradient: a name from `GRADIENTS`.
    """

    name: str
    start: str
    space: str = "tanh"
    optimiser: str = "adam"
    rate: float = 0.1
    loss: str = "margin"
    steps: int = 300
    gradient: str = "true"

    def __post_init__(self) -> None:
        one_of(self.start, "start", tuple(STARTS))
        one_of(self.space, "space", tuple(SPACES))
        one_of(self.optimiser, "optimiser", tuple(OPTIMISERS))
        one_of(self.loss, "loss", tuple(ROW_LOSSES))
        one_of(self.gradient, "gradient", tuple(GRADIENTS))
        whole(self.steps, "steps", 0, LARGEST)


PREDICTION_MEMBERS: tuple[Member, ...] = (
    Member(name="sign", start="middle", space="box", optimiser="sign", rate=0.01),
    Member(name="momentum", start="small", space="box", optimiser="momentum", rate=0.05),
    Member(name="adam small margin", start="small", rate=0.03),
    Member(name="adam small reach", start="small", loss="reach"),
    Member(name="adam medium reach", start="medium", loss="reach"),
    Member(name="adam corner margin", start="corner"),
    Member(name="adam others margin", start="others"),
    Member(name="adam others reach", start="others", loss="reach"),
    Member(name="straight small margin", start="small", rate=0.03, gradient="straight"),
    Member(name="straight others reach", start="others", loss="reach", gradient="straight"),
    Member(
        name="straight momentum",
        start="small",
        space="box",
        optimiser="momentum",
        rate=0.05,
        gradient="straight",
    ),
    Member(name="smooth small margin", start="small", rate=0.03, gradient="smooth"),
    Member(name="polish", start="incumbent", loss="reach", rate=0.03),
    Member(
        name="polish momentum",
        start="incumbent",
        space="box",
        optimiser="momentum",
        rate=0.01,
        loss="reach",
    ),
)

EXPLANATION_MEMBERS: tuple[Member, ...] = (
    Member(name="sign", start="middle", space="box", optimiser="sign", rate=0.02, steps=200),
    Member(name="sign large", start="middle", space="box", optimiser="sign", steps=100),
    Member(name="momentum", start="small", space="box", optimiser="momentum", rate=0.05, steps=200),
    Member(name="adam large", start="large", steps=200),
    Member(name="adam others", start="others", rate=0.3, steps=200),
    Member(name="transfer", start="donated", steps=200),
    Member(
        name="straight momentum",
        start="small",
        space="box",
        optimiser="momentum",
        rate=0.05,
        steps=200,
        gradient="straight",
    ),
    Member(name="straight others", start="others", rate=0.3, steps=200, gradient="straight"),
    Member(name="smooth large", start="large", steps=200, gradient="smooth"),
    Member(name="polish", start="incumbent", rate=0.03, steps=200),
)

SHORT_MEMBERS: tuple[Member, ...] = tuple(
    member
    for member in PREDICTION_MEMBERS
    if member.name
    in (
        "sign",
        "momentum",
        "adam small margin",
        "adam others reach",
        "straight small margin",
        "straight momentum",
    )
)
"""Those that find most of it in few steps: for checks within a training."""

DONOR = Member(name="donor", start="small", rate=0.03)
"""How the vanilla model is attacked for the features it donates."""


def batches(members: tuple[Member, ...]) -> list[list[Member]]:
    """Members that can climb side by side, in the order of the first of each batch; those that polish last.

    Example:
        >>> [[member.name for member in batch] for batch in batches(PREDICTION_MEMBERS)][-1]
        ['polish', 'polish momentum']
    """
    found: dict[tuple[bool, str, int], list[Member]] = {}
    for member in members:
        last = member.start == "incumbent"
        key = (last, member.gradient, member.steps)
        found.setdefault(key, []).append(member)
    return [found[key] for key in sorted(found, key=lambda key: key[0])]
