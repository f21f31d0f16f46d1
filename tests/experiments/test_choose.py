"""Settings chosen from the records of a search: which trials count, and which of them wins."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from experiments import Cell, Store, read_grid
from experiments.choose import best_of_all, presets, trials
from experiments.methods import PRESETS, preset
from experiments.tables import render
from fgai.errors import InputError
from support import bench_cases as cases


class TestChoose:
    def test_best_on_validation(self, whole: Store) -> None:
        found = trials(whole)
        assert len(found) == 6 * 3 * 2 and all(len(held) == 8 for held in found.values())
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
            ("at", 0.1): [(0.8, 0.2), (0.8, 0.4)],
            ("at", 0.2): [(0.7, 0.9), (0.7, 0.0)],  # best on one fold, not on both
            ("at", 0.3): [(0.9, 0.9)],  # best of all, but on one fold alone
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
        assert [trial.settings["lr"] for trial in found["at", "GAT", "mutag"]] == [0.2, 0.1, 0.3]
        best = found["at", "GAT", "mutag"][0]
        assert (best.seeds, best.clean, best.attacked) == (2, 0.7, 0.45)
        assert best.criterion == pytest.approx((0.8 + 0.35) / 2)
        before = tomllib.loads(PRESETS.read_text(encoding="utf-8"))
        made = tomllib.loads(presets(store))
        assert made["graph"]["at"]["GAT"]["mutag"] == {"lr": 0.2}
        assert made["graph"]["vanilla"]["GAT"]["mutag"] == {"lr": 0.1}
        for method, model in (("at", "GAT"), ("vanilla", "GAT")):
            del made["graph"][method][model]["mutag"]
            before["graph"][method].setdefault(model, {}).pop("mutag", None)
            for tables in (made, before):  # an empty table says nothing
                if not tables["graph"][method][model]:
                    del tables["graph"][method][model]
        assert made == before
        assert trials(store) == trials(store, "link") == {}

    def test_sections_of_a_task_stand_together(self, tmp_path: Path) -> None:
        cells = [Cell(kind="search", task="link", method="at", dataset="cora", settings={"lr": 0.3})]
        text = presets(cases.fill(Store(tmp_path), cells))
        assert text.index("[link.at]") < text.index("[link.at.GAT.cora]") < text.index("[graph.vanilla]")
        assert text.count("[link.at.GAT.cora]") == 1

    def searched(self, store: Store, *trials: dict[int, dict[str, Any]]) -> Store:
        """One trial each, by seed what differs from a validation that holds."""
        for rate, seeds in enumerate(trials, 1):
            for seed, changes in seeds.items():
                cell = Cell(
                    kind="search", method="at", dataset="amazon-cs", seed=seed, settings={"lr": rate / 10}
                )
                body = cases.body_of(cell)
                body["validation"] |= {"criterion": 0.5 + rate / 10, **changes}
                store.write(cell, body)
        return store

    def test_what_fails_on_the_second_seed_does_not_ship(self, tmp_path: Path) -> None:
        good: dict[int, dict[str, Any]] = {0: {}, 1: {}}
        failing: list[tuple[str, dict[int, dict[str, Any]], str]] = [
            (
                "fell",
                {0: {"criterion": 0.9}, 1: {"criterion": 0.6}},  # its worst is no better than the good one's
                "seed 1 has 0.600 of `criterion`",
            ),
            ("one", {0: {}}, "run on 1 of 2 seeds"),
        ]
        for name, bad, reason in failing:
            store = self.searched(Store(tmp_path / name), good, bad)
            assert tomllib.loads(presets(store))["at"]["GAT"]["amazon-cs"] == {"lr": 0.1}
            (held,) = trials(store).values()
            found = next(trial for trial in held if trial.settings == {"lr": 0.2})
            assert reason in (found.reason or found.fell)
            with pytest.raises(InputError, match=r"no setting holds on 2 seeds for at\.GAT\.amazon-cs"):
                presets(self.searched(Store(tmp_path / f"{name} alone"), bad))

    def test_a_fall_is_no_reason_where_all_else_is_worse_on_every_seed(self, tmp_path: Path) -> None:
        steady: dict[int, dict[str, Any]] = {0: {}, 1: {}}  # .6 on both seeds
        for low, expected in ((0.62, 0.2), (0.58, 0.1)):
            fell = {0: {"criterion": 0.9}, 1: {"criterion": low}}
            store = self.searched(Store(tmp_path / str(low)), steady, fell)
            assert tomllib.loads(presets(store))["at"]["GAT"]["amazon-cs"] == {"lr": expected}
            assert "does not ship" not in render("search", store)
        with pytest.raises(InputError, match="no setting holds on 2 seeds"):  # nothing to compare it with
            presets(self.searched(Store(tmp_path / "alone"), fell))

    def test_the_preset_in_use_stays_where_it_is_as_good(self, tmp_path: Path) -> None:
        now = {"lr": preset("at", "GAT", "amazon-cs")["lr"]}
        for gain, expected in ((0.009, now), (0.011, {"lr": 0.3})):
            store = Store(tmp_path / str(gain))
            for settings, score in ((now, 0.7), ({"lr": 0.3}, 0.7 + gain)):
                for seed in (0, 1):
                    cell = Cell(kind="search", method="at", dataset="amazon-cs", seed=seed, settings=settings)
                    body = cases.body_of(cell)
                    body["validation"]["criterion"] = score
                    store.write(cell, body)
            assert tomllib.loads(presets(store))["at"]["GAT"]["amazon-cs"] == expected
            assert f"lr {expected['lr']:g}" in render("search", store), "the table shows what is chosen"

    @pytest.mark.parametrize("task", ["", "link"])
    def test_trials_judged_by_an_older_search_are_not_compared(self, tmp_path: Path, task: str) -> None:
        cell = Cell(kind="search", task=task, method="at", dataset="cora", settings={"lr": 0.1})
        store, body = Store(tmp_path), cases.body_of(cell)
        body["fingerprint"]["attacks"] = {"validation": "of before"}
        store.write(cell, body)
        assert trials(store, task) == {}

    def test_trials_that_start_from_what_was_chosen_before_are_not_compared(self, tmp_path: Path) -> None:
        cell = Cell(kind="search", method="at", dataset="cora", settings={"lr": 0.1})
        store, body = Store(tmp_path), cases.body_of(cell)
        body["training"]["parent"]["lr"] = 7.0
        store.write(cell, body)
        assert trials(store) == {}

    def test_methods_with_one_setting_are_passed_over(self, tmp_path: Path) -> None:
        cell = Cell(kind="search", method="fgai", dataset="cora", settings={"lr": 0.1})
        with pytest.raises(InputError, match="no search records"):
            presets(cases.fill(Store(tmp_path), [cell]))

    def test_without_a_search(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="no search records"):
            presets(Store(tmp_path))


def test_one_setting_is_the_best_of_all_graphs(tmp_path: Path) -> None:
    store = Store(tmp_path)
    cells = [cell for cell in read_grid("baselines-search") if cell.method in ("rung", "vanilla")]
    for cell in cells[:-1]:
        body = cases.body_of(cell)
        best = {"cora": 1.0, "planted": 6.0}[cell.dataset]
        gamma = float(cell.settings.get("gamma", 0.0))
        body["validation"]["criterion"] = 1 - (0.1 if cell.dataset == "cora" else 0.01) * abs(gamma - best)
        store.write(cell, body)
    assert best_of_all("baselines-search", store) == {"vanilla": cells[0].settings}
    store.write(cells[-1], cases.body_of(cells[-1]))
    assert best_of_all("baselines-search", store)["rung"]["gamma"] == 1.0
