"""`TappedLayer`: the base of fgai's own attention layers, which show their attention themselves."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fgai.sparse import Adjacency

LayerTap = Callable[[Tensor, Adjacency], Tensor]
"""(attention [E, H], edges) → the attention to go on with."""
Watch = Callable[[Tensor, Adjacency], None]
"""(attention averaged over the heads [E, 1], edges)."""


class TappedLayer(nn.Module):
    """An attention layer that calls `tap` and `watch`, where they are set, once in every run.

    Attributes:
        tap: called with the attention [E, H] after the softmax and before dropout; returns what is used
            instead. So attention is recorded and perturbed.
        watch: called with the attention the layer goes on with, averaged over the heads [E, 1]; only sees it,
            so that fused kernels, which return it beside the output, can serve.
    """

    tap: LayerTap | None
    watch: Watch | None

    def __init__(self) -> None:
        super().__init__()
        self.tap = None
        self.watch = None
