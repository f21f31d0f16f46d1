"""`Tracker`: three calls that long work makes, and that do nothing unless overridden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Values = Mapping[str, float]
"""Numbers by name: the terms of a loss, a validation score, the value of an attack."""
Summary = Mapping[str, float | str]
"""What a run came to."""


class Tracker:
    """Watches runs: `train`, `make_faithful` (a run for every attempt) and attacks take one as `tracker`.

    Override what is wanted. Calls come in order and from the thread that trains. One that raises stops the
    run, whose state is saved first where it has a checkpoint; the same call goes on with it.

    Example:
        >>> import fgai
        >>> class Losses(Tracker):
        ...     def on_epoch(self, run, epoch, values):
        ...         losses.append(values["total"])
        >>> losses = []
        >>> data = fgai.load_dataset("planted")
        >>> model = fgai.train("GAT", data, epochs=3, progress=False, tracker=Losses())
        >>> len(losses)
        3
    """

    def on_start(self, run: str, past: Sequence[Values]) -> None:
        """A run begins, or goes on.

        Args:
            run: its name, e.g. `vanilla` or `fgai`.
            past: values of the epochs done before, where it is resumed. A log that may have gone further
                before the run was killed is put back to these.
        """

    def on_epoch(self, run: str, epoch: int, values: Values) -> None:
        """An epoch is done, counted from 0; of an attack a value was judged."""

    def on_end(self, run: str, summary: Summary) -> None:
        """A run has ended by itself."""
