"""`Watch`: a training as its tracker sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from fgai.trackers import Tracker
from fgai.training.capture import Terms
from fgai.training.history import History


class Watch:
    """Tells a tracker what a history holds; a tracker that raises costs no epoch.

    Args:
        tracker: or None, who hears nothing.
        run: name of the training.
        history: of the training, read when something is told.
    """

    def __init__(self, tracker: Tracker | None, run: str, history: History) -> None:
        self.tracker, self.run, self.history = tracker or Tracker(), run, history
        self.tracker.on_start(run, list(self._rows(range(len(history.terms)))))

    def epochs(self, done: Iterable[Terms], save: Callable[[], None] | None) -> None:
        """Tell of epochs that are done.

        Args:
            done: their terms, which the history holds, too.
            save: keeps the training, called if the tracker raises; None where it is kept already.
        """
        numbers = [terms.epoch for terms in done]
        with _saved(save):
            for epoch, row in zip(numbers, self._rows(numbers), strict=True):
                self.tracker.on_epoch(self.run, epoch, row)

    def end(self, save: Callable[[], None] | None) -> None:
        """Tell that the training is over; `save` as of `epochs`."""
        found = self.history
        summary: dict[str, float | str] = {
            "epochs": len(found.terms),
            "kept_epoch": found.kept_epoch,
            "stopped": found.stopped,
            "seconds": found.seconds,
        }
        with _saved(save):
            self.tracker.on_end(self.run, summary)

    def _rows(self, numbers: Sequence[int]) -> Iterator[dict[str, float]]:
        """Terms by epoch, and the validation score where there was one."""
        first = min(numbers, default=0)
        scores: dict[int, float] = {}
        for epoch, score in reversed(self.history.scores):
            if epoch < first:
                break
            scores[epoch] = score
        for epoch in numbers:
            found = {"score": scores[epoch]} if epoch in scores else {}
            yield {**self.history.terms[epoch], **found}


@contextmanager
def _saved(save: Callable[[], None] | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if save is not None:
            save()
        raise
