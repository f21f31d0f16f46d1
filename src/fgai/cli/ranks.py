"""`on_all_ranks`: commands that the processes of one torchrun work on together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec

from fgai.checks import device as checked_device
from fgai.large.processes import joined

P = ParamSpec("P")


def on_all_ranks(work: Callable[P, None]) -> Callable[P, None]:
    """Join the other processes before a command, where torchrun has started some; the first one speaks.

    Every process computes on a device of its own, see `Ranks.place`.
    """

    @functools.wraps(work)
    def together(*args: P.args, **kwargs: P.kwargs) -> None:
        given: dict[str, Any] = kwargs
        place = checked_device(given["device"])
        with joined(place) as ranks:
            given["device"] = str(ranks.place(place))
            given["quiet"] = given["quiet"] or not ranks.leads
            work(*args, **kwargs)

    return together
