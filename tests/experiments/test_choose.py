"""Settings chosen from the records of a search: which trials count, and which of them wins."""

from __future__ import annotations

import itertools
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from experiments import Cell, Store
from experiments.choose import least_regret, presets, trials
from experiments.results import SHARING
from experiments.tables import render
from fgai.errors import InputError
from fgai.training import preset
from support import bench_cases as cases


class TestGeneralPreset:
    """Settings for graphs nobody searched."""

    def test_the_smallest_worst_loss_wins(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        scores = {"amazon-photo": (0.9, 0.85, 0.7), "amazon-cs": (0.6, 0.75, 0.8)}  # losses: .2, .05, .2
        for dataset, found in scores.items():
            for rate, score in zip((0.1, 0.2, 0.3), found, strict=True):
                cell = Cell(kind="search", method="fgai", dataset=dataset, settings={"lr": rate}, threats=())
                body = cases.body_of(cell)
                store.write(cell, {**body, "validation": {"clean": 1.0, "attacked": 0.0, "criterion": score}})
        assert least_regret(store, "fgai", ("GAT",)) == {"lr": 0.2}
        with pytest.raises(InputError, match="no trials of 'at'"):
            least_regret(store, "at", ("GAT",))

    def test_the_presets_are_what_the_recorded_search_says(self) -> None:
        store = Store(Path(__file__).parents[2] / "results")
        for name, models in (("none", ("GAT", "GATv2")), ("GT", ("GT",))):
            chosen = least_regret(store, "fgai", models, older=True)
            assert chosen.items() <= preset("fgai-features", name, "no graph that was searched").items()


class TestChoose:
    def test_best_on_validation(self, whole: Store) -> None:
        found = trials(whole)
        assert len(found) == 7 * 3 * 2 and all(len(held) == 8 for held in found.values())
        assert {trial.reason for held in found.values() for trial in held} == {""}
        best = found["ln", "GT", "amazon-cs"][0]
        assert best.settings["lr"] == 0.003  # the synthetic score grows with lr
        assert best.settings["dropout"] == 0.3  # among equals the first by text

    def test_presets_keep_what_was_not_searched(self, whole: Store) -> None:
        made = tomllib.loads(presets(whole))
        assert made["vanilla"]["GAT"]["amazon-photo"]["lr"] == 0.01 and made["vanilla"]["epochs"] == 200
        assert made["at"]["GT"]["lr"] == 0.001

    def test_tasks_by_the_mean_over_folds(self, tmp_path: Path) -> None:
        store = Store(tmp_path)
        scores = {  # (method, lr): (clean, attacked) of each fold
            ("fgai", 0.1): [(0.8, 0.2), (0.8, 0.4)],
            ("fgai", 0.2): [(0.7, 0.9), (0.7, 0.0)],  # best on one fold, not on both
            ("fgai", 0.3): [(0.9, 0.9)],  # best of all, but on one fold alone
            ("vanilla", 0.1): [(0.8, 0.1), (0.9, 0.1)],
            ("vanilla", 0.2): [(0.7, 0.6), (0.8, 0.6)],  # vanilla is chosen by its clean score
        }
        for (method, lr), folds in scores.items():
            for seed, (clean, attacked) in enumerate(folds):
                cell = Cell(
                    kind="search",
                    task="graph",
                    method=method,
                    dataset="mutag",
                    seed=seed,
                    settings={"lr": lr},
                )
                part = {"clean": clean, "attacked": attacked, "criterion": (clean + attacked) / 2}
                store.write(cell, {**cases.body_of(cell), "validation": part})
        found = trials(store, "graph")
        assert [trial.settings["lr"] for trial in found["fgai", "GAT", "mutag"]] == [0.2, 0.1, 0.3]
        best = found["fgai", "GAT", "mutag"][0]
        assert (best.seeds, best.clean, best.attacked) == (2, 0.7, 0.45)
        assert best.criterion == pytest.approx((0.8 + 0.35) / 2)
        before = tomllib.loads(files("fgai.training").joinpath("presets.toml").read_text(encoding="utf-8"))
        made = tomllib.loads(presets(store))
        assert made["graph"]["fgai"]["GAT"]["mutag"] == {"lr": 0.2}
        assert made["graph"]["vanilla"]["GAT"]["mutag"] == {"lr": 0.1}
        for method, model in (("fgai", "GAT"), ("vanilla", "GAT")):
            del made["graph"][method][model]["mutag"]
            before["graph"][method].setdefault(model, {}).pop("mutag", None)
            for tables in (made, before):  # an empty table says nothing
                if not tables["graph"][method][model]:
                    del tables["graph"][method][model]
        assert made == before
        assert trials(store) == trials(store, "link") == {}

    def test_sections_of_a_task_stand_together(self, tmp_path: Path) -> None:
        cells = [Cell(kind="search", task="link", method="fgai", dataset="cora", settings={"steps": 3})]
        text = presets(cases.fill(Store(tmp_path), cells))
        assert text.index("[link.fgai]") < text.index("[link.fgai.GAT.cora]") < text.index("[graph.vanilla]")
        assert text.count("[link.fgai.GAT.cora]") == 1

    def searched(self, store: Store, *trials: dict[int, dict[str, Any]]) -> Store:
        """One trial each, by seed what differs from a validation that holds."""
        for rate, seeds in enumerate(trials, 1):
            for seed, changes in seeds.items():
                cell = Cell(
                    kind="search", method="fgai", dataset="amazon-cs", seed=seed, settings={"lr": rate / 10}
                )
                body = cases.body_of(cell)
                body["validation"] |= {"criterion": 0.5 + rate / 10, **changes}
                store.write(cell, body)
        return store

    def test_what_fails_on_the_second_seed_does_not_ship(self, tmp_path: Path) -> None:
        good: dict[int, dict[str, Any]] = {0: {}, 1: {}}
        flat = {"sharpness": {"all": 0.7, "sharpest": 0.95}}
        other = {"similarity": {"all": 0.95, "sharpest": 0.88}}
        uneven = [{"similarity": {"all": 0.95, "sharpest": value}} for value in (0.99, 0.86)]
        failing: list[tuple[str, dict[int, dict[str, Any]], str]] = [
            ("flat", {0: {}, 1: flat}, "of `sharpness.all`, 0.9 are wanted"),
            ("other", {0: other, 1: other}, "keeps 0.880 of `similarity.sharpest`, 0.9 are wanted"),
            ("uneven", dict(enumerate(uneven)), "seed 1 has 0.860 of `similarity.sharpest`"),
            (
                "fell",
                {0: {"criterion": 0.9}, 1: {"criterion": 0.6}},  # its worst is no better than the good one's
                "seed 1 has 0.600 of `criterion`",
            ),
            ("one", {0: {}}, "run on 1 of 2 seeds"),
        ]
        for name, bad, reason in failing:
            store = self.searched(Store(tmp_path / name), good, bad)
            assert tomllib.loads(presets(store))["fgai"]["GAT"]["amazon-cs"] == {"lr": 0.1}
            (held,) = trials(store).values()
            found = next(trial for trial in held if trial.settings == {"lr": 0.2})
            assert reason in (found.reason or found.fell)
            with pytest.raises(InputError, match=r"no setting holds on 2 seeds for fgai\.GAT\.amazon-cs"):
                presets(self.searched(Store(tmp_path / f"{name} alone"), bad))

    def test_a_fall_is_no_reason_where_all_else_is_worse_on_every_seed(self, tmp_path: Path) -> None:
        steady: dict[int, dict[str, Any]] = {0: {}, 1: {}}  # .6 on both seeds
        for low, expected in ((0.62, 0.2), (0.58, 0.1)):
            fell = {0: {"criterion": 0.9}, 1: {"criterion": low}}
            store = self.searched(Store(tmp_path / str(low)), steady, fell)
            assert tomllib.loads(presets(store))["fgai"]["GAT"]["amazon-cs"] == {"lr": expected}
            assert "does not ship" not in render("search", store)
        with pytest.raises(InputError, match="no setting holds on 2 seeds"):  # nothing to compare it with
            presets(self.searched(Store(tmp_path / "alone"), fell))

    def test_more_than_enough_on_one_seed_is_no_reason(self, tmp_path: Path) -> None:
        much = {seed: {"sharpness": {"all": size, "sharpest": size}} for seed, size in ((0, 0.95), (1, 1.3))}
        store = self.searched(Store(tmp_path), much)
        assert tomllib.loads(presets(store))["fgai"]["GAT"]["amazon-cs"] == {"lr": 0.1}
        assert "1 of these settings are not in use yet" in render("search", store)

    def test_the_preset_in_use_stays_where_it_is_as_good(self, tmp_path: Path) -> None:
        now = {"lr": preset("fgai", "GAT", "amazon-cs")["lr"]}
        for gain, expected in ((0.009, now), (0.011, {"lr": 0.3})):
            store = Store(tmp_path / str(gain))
            for settings, score in ((now, 0.7), ({"lr": 0.3}, 0.7 + gain)):
                for seed in (0, 1):
                    cell = Cell(
                        kind="search", method="fgai", dataset="amazon-cs", seed=seed, settings=settings
                    )
                    body = cases.body_of(cell)
                    body["validation"]["criterion"] = score
                    store.write(cell, body)
            assert tomllib.loads(presets(store))["fgai"]["GAT"]["amazon-cs"] == expected
            assert f"lr {expected['lr']:g}" in render("search", store), "the table shows what is chosen"

    def shared(self, store: Store, skip: str = "", **scores: float) -> Store:
        """Trials on graphs that share a preset: criterion by learning rate, one left out on one graph."""
        for model, dataset, seed in itertools.product(("GAT", "GATv2"), SHARING, (0, 1)):
            for name, score in scores.items():
                rate = float(name.removeprefix("lr")) / 1000
                cell = Cell(
                    kind="search",
                    method="fgai",
                    model=model,
                    dataset=dataset,
                    seed=seed,
                    settings={"lr": rate},
                )
                body = cases.body_of(cell)
                body["validation"]["criterion"] = score - 0.1 * (dataset == "cora")
                if name != skip or dataset != "planted":
                    store.write(cell, body)
        return store

    def test_graphs_that_share_a_preset_choose_it_together(self, tmp_path: Path) -> None:
        store = self.shared(Store(tmp_path / "a"), lr5=0.7, lr6=0.8, lr7=0.9, skip="lr7")
        ((case, held),) = trials(store).items()
        assert case == ("fgai", "", "") and [trial.settings["lr"] for trial in held] == [0.007, 0.006, 0.005]
        assert held[1].criterion == pytest.approx(0.775) and held[1].least == pytest.approx(0.775)
        assert held[0].reason == "run on 6 of 8 pairs of model and graph"
        before = files("fgai.training").joinpath("presets.toml").read_text(encoding="utf-8")
        text = presets(store)
        made, was = tomllib.loads(text), tomllib.loads(before)
        general = {name: value for name, value in made["fgai"].items() if not isinstance(value, dict)}
        assert general == {"lr": 0.006}
        for tables in (made, was):
            tables["fgai"] = {
                name: value for name, value in tables["fgai"].items() if isinstance(value, dict)
            }
        assert made == was
        assert text.count("#") == before.count("#"), "comments stay"
        assert "cora, citeseer, pubmed, planted" in render("search", store)

    def test_a_shared_preset_must_hold_on_every_graph(self, tmp_path: Path) -> None:
        store = self.shared(Store(tmp_path), lr5=0.7, lr6=0.8)
        cell = Cell(kind="search", method="fgai", dataset="pubmed", seed=1, settings={"lr": 0.006})
        body = cases.body_of(cell)
        body["validation"] |= {"criterion": 0.8, "sharpness": {"all": 0.7, "sharpest": 0.7}}
        store.write(cell, body)
        assert tomllib.loads(presets(store))["fgai"]["lr"] == 0.005

    @pytest.mark.parametrize(("graphs", "expected"), [(("cora",), 0.006), (SHARING, 0.005)])
    def test_a_shared_preset_falls_where_the_mean_over_its_graphs_does(
        self, tmp_path: Path, graphs: tuple[str, ...], expected: float
    ) -> None:
        store = self.shared(Store(tmp_path), lr5=0.7, lr6=0.8)
        for model, dataset in itertools.product(("GAT", "GATv2"), graphs):
            cell = Cell(
                kind="search", method="fgai", model=model, dataset=dataset, seed=1, settings={"lr": 0.006}
            )
            body = cases.body_of(cell)
            body["validation"]["criterion"] = 0.6
            store.write(cell, body)
        assert tomllib.loads(presets(store))["fgai"]["lr"] == expected

    @pytest.mark.parametrize("task", ["", "link"])
    def test_trials_judged_by_an_older_search_are_not_compared(self, tmp_path: Path, task: str) -> None:
        cell = Cell(kind="search", task=task, method="fgai", dataset="cora", settings={"lr": 0.1})
        store, body = Store(tmp_path), cases.body_of(cell)
        body["fingerprint"]["attacks"] = {"validation": "of before"}
        store.write(cell, body)
        assert trials(store, task) == {} and len(trials(store, task, older=True)) == 1

    def test_trials_that_start_from_what_was_chosen_before_are_not_compared(self, tmp_path: Path) -> None:
        cell = Cell(kind="search", method="fgai", dataset="cora", settings={"lr": 0.1})
        store, body = Store(tmp_path), cases.body_of(cell)
        body["training"]["parent"]["lr"] = 7.0
        store.write(cell, body)
        assert trials(store) == trials(store, older=True) == {}

    def test_without_a_search(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no search records"):
            presets(Store(tmp_path))
