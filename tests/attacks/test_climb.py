"""Climbs side by side: each as if it were alone, whatever moves beside it."""

from __future__ import annotations

import pytest
import torch

from fgai.attacks import EXPLANATION_MEMBERS, PREDICTION_MEMBERS, Budget, EnsembleInjection
from fgai.attacks.budget import Box
from fgai.attacks.search.climb import Way, climb_of
from fgai.attacks.search.optimisers import OPTIMISERS
from fgai.attacks.search.site import Site
from fgai.attacks.search.spaces import SPACES, beside
from fgai.attention import evaluating, observe, prepared
from fgai.objectives import Clean
from fgai.recompute import Recompute
from support import attack_cases as cases

BOX = Box.of(-1.0, 1.0, torch.zeros(6))


@pytest.mark.parametrize("objective", ["prediction", "explanation"])
@pytest.mark.parametrize("name", ["gat", "gatv2", "gt", "pyg"])
def test_members_side_by_side_find_what_each_finds_alone(name: str, objective: str) -> None:
    graph, model = cases.tiny_graph(), cases.trained(name, "vanilla")
    ready, draws = prepared(model, graph), torch.Generator().manual_seed(1)
    members = EXPLANATION_MEMBERS if objective == "explanation" else PREDICTION_MEMBERS
    ways = list(dict.fromkeys(Way(m.space, m.optimiser, m.rate, m.loss) for m in members))
    assert len({(way.space, way.optimiser) for way in ways}) == 3
    attack = EnsembleInjection(Budget(nodes=2, edges=3, steps=6), objective, k=cases.K)
    with evaluating(model, freeze=True):
        seen = observe(model, ready, heads="mean")
        rows = ready.test_mask.nonzero().flatten()  # type: ignore[union-attr]
        clean, endpoints = Clean(seen.logits, seen.attention, rows), rows[:6].view(2, 3)
        recompute = Recompute(model, ready) if Recompute.fits(model, ready) else None
        site = attack.site(model, ready, endpoints, clean, recompute)
        start = 0.1 * torch.randn(len(ways), 2, ready.features.num_columns, generator=draws)  # type: ignore[union-attr]
        together = _climbed(attack, site, start, ways)
        alone = [_climbed(attack, site, start[i : i + 1], ways[i : i + 1])[0] for i in range(len(ways))]
    for way, one, other in zip(ways, together, alone, strict=True):
        torch.testing.assert_close(one.features, other.features, atol=1e-5, rtol=1e-4, msg=str(way))
        assert one.damage == pytest.approx(other.damage) and one.loss == pytest.approx(other.loss, abs=1e-5)
        assert one.gradient == pytest.approx(other.gradient, rel=1e-3, abs=1e-6)


def _climbed(attack: EnsembleInjection, site: Site, start: torch.Tensor, ways: list[Way]) -> list:
    return climb_of(site, attack.aim([way.loss for way in ways], site), start, ways, BOX).run(6)


def test_rates_are_in_units_of_half_the_box() -> None:
    box = Box(torch.tensor([-4.0, 0.0, 7.0]), torch.tensor([4.0, 1.0, 7.0]))
    ways = [Way("box", "sign", 0.1, "margin"), Way("tanh", "sign", 0.1, "margin")]
    start = box.middle.expand(2, 1, 3)
    climb = climb_of(object(), object(), start, ways, box)  # type: ignore[arg-type]
    climb.point.add_(climb.optimiser.move(torch.ones(2, 1, 3)))
    moved = climb.space.features(climb.point, box) - start
    tanh = torch.tanh(torch.tensor(0.1))
    torch.testing.assert_close(moved[:, 0], torch.stack([torch.tensor([0.4, 0.05, 0.0]), tanh * box.half]))


def test_one_kind_alone_is_left_as_it_is() -> None:
    space = SPACES["tanh"]
    assert beside([(3, space)]) is space
    climb = climb_of(object(), object(), torch.zeros(2, 1, 6), [Way("box", "adam", 0.1, "margin")] * 2, BOX)  # type: ignore[arg-type]
    assert type(climb.optimiser) is OPTIMISERS["adam"] and climb.space is SPACES["box"]
