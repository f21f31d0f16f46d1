"""The recipe of defences: cross-entropy, and what the defence itself wants small."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fgai.attention import call_model
from fgai.models import Defended
from fgai.training.recipes import Vanilla


class Regularised(Vanilla):
    """Cross-entropy plus the terms of the defence (`Defended.terms`); scored like plain training.

    Args:
        graph: prepared for the model, as the task views it in training, with labels and masks.
    """

    name = "defence"

    def parts(self, model: nn.Module, epoch: int) -> Iterator[dict[str, Tensor]]:
        """Yield the cross-entropy and the terms in one part."""
        graph, rows, labels = self.lesson(epoch)
        loss = cross_entropy(call_model(model, graph).index_select(0, rows), labels)
        terms = {"cross_entropy": loss}
        if isinstance(model, Defended):
            terms |= model.terms(graph)
        yield {**terms, "total": torch.stack(list(terms.values())).sum()}
