"""`check_card`: what must hold of a card's numbers, for readers and for continuous integration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from fgai.cards.card import Card
from fgai.checks import one_of
from fgai.errors import InputError
from fgai.metrics import METRICS, metric_at
from fgai.typed import typed

SIDES = ("min", "max")


@typed
@dataclass(frozen=True, kw_only=True)
class Finding:
    """What came of one number under one bar.

    Attributes:
        path: of the number on the card.
        side: `min`, the least allowed, or `max`, the most.
        bound: the bar.
        value: the number; None where it is not defined, and then no bar is met.
    """

    path: str
    side: str
    bound: float
    value: float | None

    def __post_init__(self) -> None:
        one_of(self.side, "side", SIDES)

    @property
    def met(self) -> bool:
        """Whether the number is on the right side of the bar, or on it."""
        if self.value is None:
            return False
        return self.value >= self.bound if self.side == "min" else self.value <= self.bound


@typed
def check_card(
    card: Card, minimum: Mapping[str, float] | None = None, maximum: Mapping[str, float] | None = None
) -> list[Finding]:
    """Hold a card's numbers against bars.

    A bar on `f1` holds for every number below that name, `f1.clean` and `f1.attacked`; a bar on a metric's
    name, such as `g_tvd_rel`, for every number that metric gave.

    Args:
        card: whose numbers.
        minimum: least values by name.
        maximum: most values by name.

    Returns:
        One finding for each number and bar.

    Raises:
        InputError: no bars, a bar that is no finite number, or a name the card has nothing under.

    Example:
        >>> number = {"title": "F1", "value": 0.9, "chance": 0.2, "direction": "higher", "parameters": {}}
        >>> parts = ("model", "data", "threat", "protocol", "version")
        >>> rest = {**{part: {} for part in parts}, "limits": [], "warnings": []}
        >>> check_card(Card(name="GAT", numbers={"f1.clean": number}, **rest), {"f1": 0.8})[0].met
        True
    """
    found = []
    for side, bars in (("min", minimum or {}), ("max", maximum or {})):
        for name, bound in bars.items():
            if not abs(bound) < float("inf"):
                raise InputError(f"the bar of {name!r} must be a finite number, got {bound!r}")
            found += [
                Finding(path=path, side=side, bound=bound, value=card.numbers[path]["value"])
                for path in _paths(card, name)
            ]
    if not found:
        raise InputError("`minimum` or `maximum` must set at least one bar")
    return found


def _paths(card: Card, name: str) -> list[str]:
    """The numbers of a card that a name stands for.

    Raises:
        InputError: there is none.
    """
    below = [path for path in card.numbers if path == name or path.startswith(f"{name}.")]
    if not below and name in METRICS:
        below = [path for path in card.numbers if (spec := metric_at(path)) and spec.name == name]
    if not below:
        near = get_close_matches(name, card.numbers) or list(card.numbers)
        raise InputError(f"the card has no quantity {name!r}; it has {', '.join(near)}")
    return below
