"""What the page may claim: differences between models that exceed the noise over nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fgai.evaluation.paired import Interval, paired_interval
from fgai.reports.numbers import SHARES
from fgai.reports.parts import Part

Intervals = Mapping[str, Mapping[str, Any]]
"""By model and measure: `difference`, `low`, `high` and `nodes`, as the document carries them."""
FALL = "fall"
"""The measure that compares a model with itself: right under attack against right without."""


def intervals_of(parts: Sequence[Part], reference: str) -> dict[str, dict[str, Any]]:
    """Return the interval of every difference whose values are known node by node.

    Of each model that of its own fall under attack; of all but the reference also those of the difference
    from it, by the keys of `fgai.reports.balance`.

    Args:
        parts: records and certificates with their arrays.
        reference: name of the model the others are compared with.
    """
    first = next((part for part in parts if part.name == reference), parts[0])
    out: dict[str, dict[str, Any]] = {}
    for part in parts:
        found = {FALL: _of_predictions(part, part, "clean", "attacked")}
        if part is not first:
            found |= {when: _of_predictions(first, part, when, when) for when in ("attacked", "clean")}
            found |= {
                key: _of_overlaps(first, part, attack)
                for key, attack in (("kept", "prediction"), ("aimed", "explanation"))
            }
            found["proved"] = _of_proofs(first, part)
        out[part.name] = {key: interval._asdict() for key, interval in found.items() if interval is not None}
    return out


def interval_in(intervals: Intervals | None, name: str, key: str) -> Interval | None:
    """Return one interval of a document; None where it has none that can be read."""
    found = ((intervals or {}).get(name) or {}).get(key)
    try:
        return None if found is None else Interval(**found)
    except TypeError:  # from a file of another version
        return None


def _of_predictions(first: Part, second: Part, before: str, after: str) -> Interval | None:
    """What is classified right; only where the score is that share."""
    prefix = "item_" if "item_scored" in first.arrays else ""
    clean, attacked = (
        first.arrays.get(f"{prefix}correct_{before}"),
        second.arrays.get(f"{prefix}correct_{after}"),
    )
    if clean is None or attacked is None or first.score not in SHARES:
        return None
    return paired_interval(clean, attacked, first.arrays.get(f"{prefix}scored"))


def _of_overlaps(first: Part, second: Part, attack: str) -> Interval | None:
    """What stays of explanations, over the nodes that the attack reaches in both models."""
    before, after = (part.arrays.get(f"overlap_{attack}") for part in (first, second))
    ours, theirs = (part.arrays.get("touched") for part in (first, second))
    if before is None or after is None or ours is None or theirs is None or ours.shape != theirs.shape:
        return None
    return paired_interval(before, after, ours & theirs)


def _of_proofs(first: Part, second: Part) -> Interval | None:
    """Whose top-k is proved to stay, at the output layer, over the nodes with more than k neighbours."""
    before, after = _proved(first), _proved(second)
    return None if before is None or after is None else paired_interval(before, after)


def _proved(part: Part) -> NDArray[np.float64] | None:
    """1 where a node's top-k is proved to stay and 0 where it is not; NaN with at most k neighbours."""
    layer, proof = part.layers[-1] if part.layers else {}, part.certificate or {}
    costs, degree, radius, k = layer.get("costs"), layer.get("degree"), proof.get("radius"), proof.get("k2")
    if costs is None or degree is None or not isinstance(radius, int | float) or not isinstance(k, int):
        return None
    held = costs[:, 0] > radius if costs.shape[1] else np.ones(degree.shape, bool)
    return np.where(degree > k, held.astype(np.float64), np.nan)
