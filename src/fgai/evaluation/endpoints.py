"""What an attack reached at the seed's random endpoints, and at those of each rule."""

from __future__ import annotations

from fgai.attacks import Ledger
from fgai.errors import InputError
from fgai.typed import typed

RANDOM = "random"


@typed
def by_endpoints(ledger: Ledger) -> dict[str, float]:
    """Return the most damage done by rule, and at `chosen` endpoints; nothing if there was one set only.

    Noise has random endpoints.

    Args:
        ledger: of an ensemble; other attacks name no members.

    Example:
        >>> rows = [{"member": "sign", "endpoints": "random"}, {"member": "sign", "endpoints": "cover"}]
        >>> by_endpoints(Ledger(members=rows, damages=[0.1, 0.3, 0.4]))
        {'random': 0.3, 'cover': 0.4, 'chosen': 0.4}
    """
    worst: dict[str, float] = {}
    if any("endpoints" not in row for row in ledger.members):
        raise InputError("every member of the `ledger` must name its endpoints")
    for row, damage in ledger.proposals():
        rule = RANDOM if row is None else row["endpoints"]
        worst[rule] = max(damage, worst.get(rule, damage))
    chosen = [damage for rule, damage in worst.items() if rule != RANDOM]
    return {**worst, "chosen": max(chosen)} if chosen and RANDOM in worst else {}
