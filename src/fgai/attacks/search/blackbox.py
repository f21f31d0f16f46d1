"""Searches without gradients: if one of them finds more than the climbs, gradients are masked.

Every new node is a mixture of prototypes: the mean features of each predicted class and random signs. An
evolution strategy moves the mixtures; features are the mixtures pushed to the box. Nothing is differentiated,
so rounding, saturation and clipping inside the model do not stop it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fgai.attacks.search.aims import Aim
from fgai.attacks.search.climb import Found
from fgai.attacks.search.site import Site
from fgai.attacks.search.starts import Place

POPULATION, GENERATIONS = 16, 12
SPREAD, RATE = 0.7, 0.5
GAIN = 6.0
"""How hard mixtures are pushed towards corners of the box."""


def prototypes(place: Place, generator: torch.Generator, noise: int = 8) -> Tensor:
    """Directions [P, F] in units of the box: mean features of the classes, centred, and random signs."""
    graph = place.graph
    assert graph.features is not None
    drawn = torch.randint(0, 2, (noise, graph.num_features), generator=generator).to(place.middle) * 2 - 1
    if place.labels is None:
        return drawn
    count = int(place.labels.max()) + 1
    rows = torch.randperm(graph.num_nodes, generator=generator)[:2000].to(graph.device)
    known, label = place.box.points(graph.features.select(rows)), place.labels[rows]
    mean = known.new_zeros(count, known.shape[1]).index_add(0, label, known)
    mean = mean / torch.bincount(label, minlength=count).clamp(min=1)[:, None] - known.mean(0)
    return torch.cat([mean / mean.abs().amax(1, keepdim=True).clamp(min=1e-9), drawn])


@torch.no_grad()
def evolve(site: Site, aim: Aim, place: Place, generator: torch.Generator) -> Found:
    """Return the worst features an evolution strategy over mixtures of prototypes finds.

    Args:
        site: where the new nodes are.
        aim: judges `POPULATION` sets of features at once.
        place: what may be read.
        generator: on the CPU.
    """
    basis = prototypes(place, generator)
    mean = torch.zeros(place.endpoints.shape[0], basis.shape[0], dtype=torch.float32)
    best, top = place.middle, (float("-inf"), float("-inf"))
    for _ in range(GENERATIONS):
        noise = torch.randn(POPULATION, *mean.shape, generator=generator, dtype=torch.float32)
        noise[POPULATION // 2 :] = -noise[: POPULATION // 2]
        mixed = (mean + SPREAD * noise).to(basis)
        features = place.box.features(torch.tanh(GAIN * mixed @ basis))
        loss, damage = aim(site.view(features))
        scores = list(zip(damage.tolist(), loss.tolist(), strict=True))
        winner = max(range(POPULATION), key=lambda i: scores[i])
        if scores[winner] > top:
            best, top = features[winner].clone(), scores[winner]
        order = sorted(range(POPULATION), key=lambda i: scores[i])
        rank = torch.empty(POPULATION, dtype=torch.float32)
        rank[order] = torch.linspace(-1.0, 1.0, POPULATION, dtype=torch.float32)
        mean += RATE * (rank[:, None, None] * noise).mean(0) * 4
    return Found(best, top[0], top[1], 0.0, 0)
