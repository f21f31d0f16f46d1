"""What an attack reached at the seed's random endpoints, and at those chosen by a rule."""

from __future__ import annotations

from fgai.attacks import Ledger

RANDOM = "random"


def by_endpoints(ledger: Ledger) -> dict[str, float]:
    """Return the most damage done at `random` and at `chosen` endpoints; nothing if there was one set only.

    Noise has random endpoints.

    Args:
        ledger: of an ensemble; other attacks name no members.

    Example:
        >>> rows = [{"member": "sign", "endpoints": "random"}, {"member": "sign", "endpoints": "cover"}]
        >>> by_endpoints(Ledger(members=rows, damages=[0.1, 0.3, 0.4]))
        {'random': 0.3, 'chosen': 0.4}
    """
    found: dict[str, float] = {}
    for row, damage in ledger.proposals():
        name = RANDOM if row is None or row["endpoints"] == RANDOM else "chosen"
        found[name] = max(damage, found.get(name, damage))
    return found if len(found) > 1 else {}
