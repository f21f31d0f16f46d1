"""`History`: what happened while training."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from fgai.files import check_items
from fgai.training.capture import Terms
from fgai.typed import typed


@typed
@dataclass
class History:
    """What happened while training.

    Attributes:
        terms: per epoch, each loss term's value; one that an epoch did not compute keeps its last value.
        scores: per validation, (epoch, score).
        best_epoch: whose weights were kept, as an index of `terms`; see `kept_epoch`.
        seconds: wall-clock time of the epochs, validation included.
        epoch_seconds: time of each training step alone.
        stopped: why training ended: `epochs` or `patience`.
        attempts: trainings it took; see `make_faithful`.
    """

    terms: list[dict[str, float]] = field(default_factory=list)
    scores: list[tuple[int, float]] = field(default_factory=list)
    best_epoch: int = 0
    seconds: float = 0.0
    epoch_seconds: list[float] = field(default_factory=list)
    stopped: str = "epochs"
    attempts: int = 1

    @property
    def kept_epoch(self) -> int:
        """The epoch whose weights were kept, counted from 1, as it is shown everywhere."""
        return self.best_epoch + 1

    @property
    def ending(self) -> str:
        """Why training ended, in words."""
        if self.stopped != "patience":
            return "all epochs"
        waited = len(self.terms) - self.kept_epoch
        return f"stopped early, no better validation score for {waited} epochs (`patience`)"

    def add(self, terms: Terms) -> None:
        """Note one epoch."""
        self.epoch_seconds.append(terms.seconds)
        self.terms.append({**(self.terms[-1] if self.terms else {}), **terms.values})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return copy.deepcopy(self.__dict__)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> History:
        """Inverse of `to_dict`.

        Raises:
            CheckpointError: a field is unknown or of another type.
        """
        check_items(values, get_type_hints(cls), "the history", required=())
        history = cls(**values)
        history.scores = [(int(epoch), float(score)) for epoch, score in history.scores]
        return history
