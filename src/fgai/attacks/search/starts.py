"""Where a search begins: features [M, F] of the new nodes inside the box."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fgai.attacks.budget import Box
from fgai.graph import Graph


@dataclass(frozen=True, eq=False)
class _StartContext:
    """The input of a start.

    Attributes:
        graph: prepared, clean, with features.
        endpoints: [M, e].
        labels: [N] classes the attacked model predicts on the clean graph, or None.
        box: of the features.
        seed: of the random numbers of `stream`.
        donated: [M, F] the worst features found for the vanilla model, or None.
        incumbent: [M, F] the worst features found so far for the attacked one, or None.
    """

    graph: Graph
    endpoints: Tensor
    labels: Tensor | None
    box: Box
    seed: str = ""
    donated: Tensor | None = None
    incumbent: Tensor | None = None

    @property
    def middle(self) -> Tensor:
        return self.box.middle.expand(self.endpoints.shape[0], -1)

    def stream(self, name: str) -> torch.Generator:
        """Random numbers for one member, which depend on no other."""
        return torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))

    def drawn(self, scale: float, generator: torch.Generator) -> Tensor:
        """Tanh of normal noise of some scale, stretched to the box."""
        noise = torch.randn(self.middle.shape, generator=generator, dtype=torch.float32).to(self.middle)
        return self.box.features(torch.tanh(scale * noise))


Start = Callable[[_StartContext, torch.Generator], Tensor]


def _corner(context: _StartContext, generator: torch.Generator) -> Tensor:
    """A random corner of the box for every new node."""
    low, high = context.box
    coins = torch.rand(context.middle.shape, generator=generator, dtype=torch.float32).to(low)
    return torch.where(coins < 0.5, low, high)


def _others(context: _StartContext, generator: torch.Generator) -> Tensor:
    """Features of real nodes whose class is not the one most of the endpoints have."""
    graph, count = context.graph, context.endpoints.shape[0]
    assert graph.features is not None
    drawn = torch.randint(graph.num_nodes, (count, 32), generator=generator).to(graph.device)
    pick = drawn[:, 0]
    if context.labels is not None:
        mode = context.labels[context.endpoints].mode(1).values
        differs = context.labels[drawn] != mode[:, None]
        pick = drawn.gather(1, differs.float().argmax(1, keepdim=True)).squeeze(1)
    return graph.features.select(pick).clamp(*context.box)


def _strangers(context: _StartContext, count: int, generator: torch.Generator) -> Tensor:
    """Real nodes [M, count] for every new one, of classes other than most of its endpoints have, if any."""
    graph = context.graph
    shape = (context.endpoints.shape[0], 8 * count)
    drawn = torch.randint(graph.num_nodes, shape, generator=generator).to(graph.device)
    if context.labels is None:
        return drawn[:, :count]
    mode = context.labels[context.endpoints].mode(1).values
    alike = context.labels[drawn] == mode[:, None]
    return drawn.gather(1, alike.long().argsort(dim=1, stable=True)[:, :count])


def _known(
    features: Tensor | None, noise: float, context: _StartContext, generator: torch.Generator
) -> Tensor:
    """Features found before, or noise of some scale where there are none."""
    return context.drawn(noise, generator) if features is None else features.clamp(*context.box)


STARTS: dict[str, Start] = {
    "middle": lambda context, generator: context.middle,
    "small": lambda context, generator: context.drawn(0.05, generator),
    "medium": lambda context, generator: context.drawn(0.3, generator),
    "large": lambda context, generator: context.drawn(1.0, generator),
    "corner": _corner,
    "others": _others,
    "donated": lambda context, generator: _known(context.donated, 1.0, context, generator),
    "incumbent": lambda context, generator: _known(context.incumbent, 0.3, context, generator),
}
