"""`Best`: the weights a training keeps, and what it says when it loses them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

from fgai.errors import DivergenceError
from fgai.training.history import History


@dataclass
class Best:
    """The weights that are kept, and the score they were kept for."""

    weights: dict[str, Tensor]
    score: float = -math.inf

    def offer(self, score: float, epoch: int, model: nn.Module, history: History, patience: int) -> None:
        """Note an epoch's score; keep its weights if it is the best, or stop if none was for long."""
        history.scores.append((epoch, score))
        if score > self.score:
            self.score, self.weights, history.best_epoch = score, copy_of(model), epoch
        elif epoch - history.best_epoch >= patience:
            history.stopped = "patience"


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers of a model as they are now."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def check_finite(values: dict[str, float], epoch: int, model: nn.Module, best: dict[str, Tensor]) -> None:
    """Raise if a term is not finite, with the best weights in the model.

    Raises:
        DivergenceError: names the term.
    """
    bad = [name for name, value in values.items() if not math.isfinite(value) and name != "total"]
    if bad or not math.isfinite(values["total"]):
        model.load_state_dict(best)
        model.eval()
        raise DivergenceError(
            f"training diverged in epoch {epoch + 1}: {', '.join(bad) or 'total'} is not finite; the best"
            " weights so far are kept in the model. Lower `lr` or the weight of that term"
        )
