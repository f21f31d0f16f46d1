"""Means over layers: two models are compared over the same ones, and flat ones are left out and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from experiments import read_grid
from experiments.build import sheet
from experiments.paper_claim import Wins, wins
from experiments.results import Results, by_layer, common, flat_layers, mean_over
from experiments.sheet import Sheet, estimated
from support import bench_cases as cases

WHERE = ("GAT", "coauthor-cs")
KEPT = "overlap_touched.explanation.all"
Change = Callable[[str, int, dict[str, Any]], None]


def results(change: Change, seeds: int = 2) -> Results:
    """Vanilla, AT and FGAI under `ensemble`; `change` is given the method, the seed and the metrics."""
    records = []
    for cell in read_grid("node"):
        known = cell.kind == "attack" and cell.method in ("vanilla", "at", "fgai") and cell.seed < seeds
        if known and (cell.model, cell.dataset) == WHERE:
            body = cases.body_of(cell)
            change(cell.method, cell.seed, body["evaluations"]["ensemble"]["metrics"])
            records.append({"key": cell.key, "cell": cell.to_dict(), **body})
    return Results(records)


def kept(metrics: dict[str, Any], *layers: float | None) -> None:
    """Set what stays of the top 5 at every layer, `all` as an evaluation would store it."""
    known = [value for value in layers if value is not None]
    for attack in ("prediction", "explanation"):
        metrics["overlap_touched"][attack] |= {"layers": list(layers), "all": sum(known) / len(known)}


def few_neighbours(method: str, seed: int, metrics: dict[str, Any]) -> None:
    """FGAI's attackers join nodes with few neighbours: its first layer has nothing to lose on seed 0."""
    if method == "fgai":
        kept(metrics, *((None, 0.8) if seed == 0 else (1.0, 0.9)))
        metrics["overlap_touched"]["chance"]["layers"] = [0.4, 0.2]
    elif method == "vanilla":
        kept(metrics, 1.0, 0.6)
    else:
        kept(metrics, 1.0, 0.7)


def flat(method: str, seed: int, metrics: dict[str, Any]) -> None:
    """The vanilla model says nothing in its first layer."""
    del seed
    metrics["sharpness"]["vanilla"]["layers"] = [1e-10, 0.4]
    metrics["sharpness"]["clean"] |= {"layers": [0.3, 0.38] if method == "fgai" else [1e-10, 0.4], "all": 0.2}
    metrics["similarity"]["overlap"] |= {"layers": [0.1, 0.93], "all": 0.515}


@pytest.fixture(scope="module")
def reached() -> Results:
    return results(few_neighbours)


@pytest.fixture(scope="module")
def silent() -> Results:
    return results(flat)


class TestLayers:
    def test_of_one_record(self) -> None:
        metrics = {"g_jsd": {"layers": [None, 0.5, 0.25], "all": 0.375}, "f1": {"clean": 0.9, "all": 0.9}}
        assert by_layer(metrics, "g_jsd.all") == {1: 0.5, 2: 0.25}
        assert by_layer(metrics, "g_jsd.last") is by_layer(metrics, "f1.clean") is by_layer(metrics, "f1.all")
        assert by_layer(metrics, "f1.clean") is None

    def test_means(self) -> None:
        assert mean_over({0: 1.0, 2: 0.5}) == 0.75 and mean_over({0: 1.0, 2: 0.5}, {2, 3}) == 0.5
        assert mean_over({0: 1.0}, {1}) is None and mean_over({}) is None

    def test_who_has_no_layer_is_not_asked(self) -> None:
        assert common([{0: 1.0, 1: 1.0}, {}, {1: 0.5}]) == {1} and common([{}, {}]) == set()

    def test_flat_ones_matter_to_similarity_and_sharpness_alone(self) -> None:
        metrics = {
            "sharpness": {"vanilla": {"layers": [1e-7, 0.5]}, "clean": {"layers": [0.2, 0.3]}},
            "similarity": {"overlap": {"layers": [0.1, 0.9]}},
            "overlap": {"chance": {"layers": [0.3, 0.4]}},
        }
        assert flat_layers(metrics) == {0}
        assert by_layer(metrics, "similarity.overlap.all") == {1: 0.9}
        assert by_layer(metrics, "sharpness.clean.all") == {1: 0.3}
        assert by_layer(metrics, "overlap.chance.all") == {0: 0.3, 1: 0.4}
        metrics["sharpness"]["vanilla"]["layers"] = [1e-7, 1e-7]
        assert flat_layers(metrics) == set(), "a model that says nothing is measured as it is"


class TestCommonLayers:
    """Over its own layers FGAI keeps .875 on average, vanilla .8: a loss of .125 and of .2."""

    def test_pairs_by_seed(self, reached: Results) -> None:
        ours, base = reached.pair((*WHERE, "fgai"), KEPT, "ensemble")
        assert ours == pytest.approx({0: 0.8, 1: 0.95}) and base == pytest.approx({0: 0.6, 1: 0.8})

    def test_sheet_compares_every_row_with_vanilla_over_the_same_layers(self) -> None:
        made = sheet(results(few_neighbours, seeds=3), "kept", [estimated(KEPT, threat="ensemble")])
        assert isinstance(made, Sheet)
        means = {
            row.labels[1]: row.entries[0].estimate.mean
            for row in made.sections["GAT"]
            if row.entries[0].estimate is not None
        }
        assert means == pytest.approx({"vanilla": 2.2 / 3, "AT": 0.85, "FGAI": 2.7 / 3})
        (entry,) = next(row for row in made.sections["GAT"] if row.labels[1] == "FGAI").entries
        assert entry.interval is not None and entry.interval.mean == pytest.approx(0.5 / 3)
        assert any("over the layers in which both have" in note for note in made.notes)

    def test_wins(self) -> None:
        def hidden(method: str, seed: int, metrics: dict[str, Any]) -> None:
            """By what is stored FGAI loses; over the layer that both have it wins on every seed."""
            kept(metrics, *((None, 0.7 + seed / 1000) if method == "fgai" else (1.0, 0.6)))

        assert wins(results(hidden, seeds=5), "fgai", "vanilla", KEPT) == Wins(1, 0, 1)


class TestFlatLayers:
    def test_tables_name_them(self, silent: Results) -> None:
        made = sheet(silent, "alike", [estimated("similarity.overlap.all", threat="ensemble", own=False)])
        assert any("flat to 1e-6: GAT on coauthor-cs, layer 1." in note for note in made.notes)
        assert "0.930" in made.to_markdown() and "0.515" not in made.to_markdown()
