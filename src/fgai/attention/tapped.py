"""`TappedLayer`: the base of fgai's own attention layers, which show their attention themselves."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from fgai.attention.limits import Limits
from fgai.errors import AttentionError
from fgai.sparse import Adjacency
from fgai.typed import typed

LayerTap = Callable[[Tensor, Adjacency, Tensor | None], Tensor]
"""(attention [E, H], edges, scores before the softmax [E, H] if there are any) → attention to go on with."""
Watch = Callable[[Tensor, Adjacency, Tensor | None], None]
"""(attention averaged over the heads [E, 1], edges, scores averaged likewise [E] or None)."""


@typed
class TappedLayer(nn.Module):
    """An attention layer that calls `tap` and `watch`, where they are set, once in every run.

    Attributes:
        tap: called with the attention [E, H] after the softmax and before dropout; returns what is used
            instead. So attention is recorded and perturbed.
        watch: called with the attention the layer goes on with, averaged over the heads [E, 1]; only sees it,
            so that fused kernels, which return it beside the output, can serve.
        ranked: whether `watch` wants the scores.
        limits: ranges of what each node says, by what the layer reads of it; None for none, see `fgai.limit`.
    """

    tap: LayerTap | None
    watch: Watch | None
    ranked: bool
    limits: nn.ModuleDict | None

    def __init__(self) -> None:
        super().__init__()
        self.tap = None
        self.watch = None
        self.ranked = False
        self.limits = None

    def what_is_said(self) -> dict[str, Limits]:
        """Return new limits by name for all that the layer reads of a node; layers that have none refuse."""
        raise AttentionError(
            f"{type(self).__name__} cannot be limited: it does not say what it reads of a node"
            " (`what_is_said`)"
        )

    def limited(self, name: str, said: Tensor) -> Tensor:
        """Return what nodes say [N, ...] inside the limits of that name, where there are some."""
        return said if self.limits is None else self.limits[name](said)
