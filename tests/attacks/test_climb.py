"""Climbs side by side: each as if it were alone, whatever moves beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fgai.attacks import EXPLANATION_MEMBERS, PREDICTION_MEMBERS, Budget, EnsembleInjection, Judge, Ledger
from fgai.attacks.budget import Box
from fgai.attacks.search.climb import SearchResult, SearchSpec, climb
from fgai.attention import evaluating, observe, prepared
from fgai.errors import InputError
from fgai.graph import GraphChange
from fgai.objectives import Clean
from fgai.recompute import Recompute
from support import attack_cases as cases

BOX = Box.of(-1.0, 1.0, torch.zeros(6))


@pytest.mark.many
@pytest.mark.parametrize("objective", ["prediction", "explanation"])
@pytest.mark.parametrize("name", ["gat", "gatv2", "gt", "pyg"])
def test_members_side_by_side_find_what_each_finds_alone(name: str, objective: str) -> None:
    graph, model = cases.tiny_graph(), cases.trained(name, "vanilla")
    ready, draws = prepared(model, graph), torch.Generator().manual_seed(1)
    members = EXPLANATION_MEMBERS if objective == "explanation" else PREDICTION_MEMBERS
    kinds = dict.fromkeys((m.space, m.optimiser, m.rate, m.loss) for m in members)
    ways = [SearchSpec(space=s, optimiser=o, rate=r, loss=one, steps=6) for s, o, r, one in kinds]
    assert len({(way.space, way.optimiser) for way in ways}) == 3
    attack = EnsembleInjection(Budget(nodes=2, edges=3, steps=6), objective, k=cases.K)
    with evaluating(model, freeze=True):
        seen = observe(model, ready, heads="mean")
        rows = ready.test_mask.nonzero().flatten()  # type: ignore[union-attr]
        clean, endpoints = Clean(seen.logits, seen.attention, rows), rows[:6].view(2, 3)
        recompute = Recompute(model, ready) if Recompute.fits(model, ready) else None
        judge = Judge(model, ready, attack.objective, clean, Ledger(), recompute)
        site = attack.site(judge, GraphChange(endpoints=endpoints))
        start = 0.1 * torch.randn(len(ways), 2, ready.features.num_columns, generator=draws)  # type: ignore[union-attr]
        together = attack.climb(site, start, ways, BOX)
        alone = [attack.climb(site, start[i : i + 1], ways[i : i + 1], BOX)[0] for i in range(len(ways))]
    for way, one, other in zip(ways, together, alone, strict=True):
        torch.testing.assert_close(one.features, other.features, atol=1e-5, rtol=1e-4, msg=str(way))
        assert one.damage == pytest.approx(other.damage) and one.loss == pytest.approx(other.loss, abs=1e-5)
        assert one.gradient == pytest.approx(other.gradient, rel=1e-3, abs=1e-6)


class Linear:
    """A site whose output is the features themselves."""

    passes = 0

    def run(self, features: torch.Tensor) -> torch.Tensor:
        self.passes += len(features)
        return features


def moved(specs: list[SearchSpec], start: torch.Tensor, box: Box) -> list[SearchResult]:
    """Climb the sum of all features."""
    site: Any = Linear()
    score: Any = lambda view: (view.sum((1, 2)), view.detach().sum((1, 2)))  # noqa: E731
    found = climb(site, score, start, specs, box)
    assert site.passes == len(specs) * (specs[0].steps + 1)
    return found


def test_rates_are_in_units_of_half_the_box() -> None:
    box = Box(torch.tensor([-4.0, 0.0, 7.0]), torch.tensor([4.0, 1.0, 7.0]))
    specs = [SearchSpec(space=space, optimiser="sign", rate=0.1, steps=1) for space in ("box", "tanh")]
    start = box.middle.expand(2, 1, 3)
    ends = torch.stack([one.features for one in moved(specs, start, box)]) - start
    tanh = torch.tanh(torch.tensor(0.1))
    torch.testing.assert_close(ends[:, 0], torch.stack([torch.tensor([0.4, 0.05, 0.0]), tanh * box.half]))


@pytest.mark.parametrize("optimiser", ["sign", "adam", "momentum"])
def test_the_worst_point_and_every_value_are_kept(optimiser: str) -> None:
    spec = SearchSpec(space="box", optimiser=optimiser, rate=0.3, steps=5)
    (found,) = moved([spec], torch.zeros(1, 2, 6), BOX)
    torch.testing.assert_close(found.features, torch.ones(2, 6))
    assert found.curve is not None and found.curve.shape == (6,)
    assert found.damage == float(found.curve.max()) == 12.0 and found.gradient == 1.0


@pytest.mark.parametrize(("field", "value"), [("space", "other"), ("optimiser", "other"), ("steps", -1)])
def test_a_search_is_checked(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=field):
        SearchSpec(**{field: value})
