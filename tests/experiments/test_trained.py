"""Cached models: none outlives the code or the settings that made it."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import grimp
import pytest

import fgai
from experiments import Cell, Store, run_cell, trained
from experiments.methods import preset
from experiments.subjects import Source
from experiments.threats import BOX
from experiments.trained import model_path, settings_of, training_code, training_sources, vanilla_of
from fgai.training import train_method
from support import bench_cases as cases

PACKAGE = Path(fgai.__file__).parent


def test_everything_a_training_imports_is_in_the_fingerprint() -> None:
    graph = grimp.build_graph("fgai")
    for module in graph.find_modules_that_directly_import("fgai"):  # for the version: names, not code
        graph.remove_import(importer=module, imported="fgai")
    needed = graph.find_upstream_modules("fgai.training", as_package=True)
    held = {path.relative_to(PACKAGE).with_suffix("").parts for path in training_sources(PACKAGE)}
    parts = {tuple(name.split(".")[1:]) for name in needed}
    missing = {p for p in parts if p not in held and (*p, "__init__") not in held}
    assert len(needed) > 50 and missing == set()


@pytest.mark.parametrize(
    "changed",
    ["ops/functional.py", "topk/sets.py", "attention/hooks.py", "attacks/base.py", "objectives.py"],
)
def test_other_code_is_another_fingerprint(tmp_path: Path, changed: str) -> None:
    copy = tmp_path / "fgai"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    same = training_code(copy)
    assert same == training_code(PACKAGE)
    text = (copy / changed).read_text()
    words = text.replace('"""', '"""Said otherwise. ', 1) + "\n\n# a comment\n"
    (copy / changed).write_text(words)
    (copy / "reports" / "page.py").write_text("")  # what trains nothing does not count
    training_code.cache_clear()
    assert training_code(copy) == same
    for other in ("CHANGED = 1\n", 'TEXT = """\n\n# part of a text\n"""\n', 'TEXT = """\n"""\n'):
        (copy / changed).write_text(words + other)
        training_code.cache_clear()
        assert training_code(copy) != same
        same = training_code(copy)


def test_a_parent_of_other_code_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, cell = tmp_path / "cache", cases.tiny(settings={}, kind="certify")
    monkeypatch.setattr(trained, "preset", lambda *_: {"epochs": 2})
    for place in ("experiments.trained", "experiments.methods"):
        monkeypatch.setattr(f"{place}.settings_for", lambda *_: {"epochs": 2})
    assert run_cell(cell, Store(tmp_path / "a"), cache=cache)["status"] == "done"
    monkeypatch.setattr(trained, "training_code", lambda: "other")
    assert run_cell(cell, Store(tmp_path / "b"), cache=cache)["status"] == "done"
    assert len(list(cache.glob("*.safetensors"))) == 2


def test_one_process_trains_a_parent_and_the_others_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, graph = cases.tiny(settings={}, method="fgai"), fgai.load_dataset("planted")
    inside, made = threading.Event(), list[str]()

    def slow(method: str, *given: Any, **more: Any) -> Any:
        made.append(method)
        inside.set()
        time.sleep(0.2)  # long enough for the other to come
        return train_method(method, *given, **{**more, "settings": {"epochs": 1}})

    monkeypatch.setattr(trained, "train_method", slow)
    found = list[bool]()
    ask = threading.Thread(target=lambda: found.append(vanilla_of(cell, graph, "cpu", tmp_path)[1]))
    ask.start()
    inside.wait()
    found.append(vanilla_of(cell, graph, "cpu", tmp_path)[1])
    ask.join()
    assert sorted(found) == [False, True] and made == ["vanilla"]


def test_names_hold_what_matters(tmp_path: Path) -> None:
    cell = Cell(method="fgai")
    same = [Cell(method="fgai", kind="certify"), Cell(method="fgai", label="x", threats=("strong",))]
    other = [Cell(), Cell(method="fgai", seed=1), Cell(method="fgai", settings={"lr": 0.1})]
    assert {model_path(tmp_path, c) for c in same} == {model_path(tmp_path, cell)}
    assert len({model_path(tmp_path, c) for c in (cell, *other)}) == 4
    assert model_path(tmp_path, cell, parent_settings={"epochs": 2}) != model_path(tmp_path, cell)
    assert model_path(None, cell) is None


def test_records_tell_what_the_papers_methods_start_from() -> None:
    printed, released = (
        settings_of(Cell(method=name))["defaults"] for name in ("fgai-paper", "fgai-injection")
    )
    assert (printed["divergence"], printed["similarity"]) == ("logits", 1e5)
    assert released["limits"] is False and released["explanation_stability"] == 1.0


def test_figures_take_models_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(cache=tmp_path, epochs=2)
    graph = source.graph()
    first = source.trained("vanilla", graph)
    monkeypatch.setattr(trained, "train_method", lambda *_, **__: pytest.fail("trained again"))
    again = source.trained("vanilla", graph)
    for ours, theirs in zip(first.parameters(), again.parameters(), strict=True):
        assert ours.equal(theirs)


class TestTrials:
    def test_what_was_chosen_before_has_no_say(self) -> None:
        """A table sets `weight_decay` on Photo; a trial that leaves it open trains with the general one."""
        cell = Cell(method="at", model="GAT", dataset="amazon-photo")
        assert settings_of(cell)["settings"]["weight_decay"] == 0.005
        trial = settings_of(replace(cell, kind="search", settings={"lr": 0.1}))["settings"]
        assert trial["weight_decay"] == 0.0005 and trial["lr"] == 0.1

    def test_a_variant_stands_on_what_was_chosen_for_its_parent(self) -> None:
        where = ("GAT", "coauthor-cs")
        chosen = preset("at", *where)["lr"]
        assert chosen not in (preset("at-limits", *where)["lr"], preset("at", "GAT", "")["lr"])
        trial = Cell(kind="search", method="at-limits", model="GAT", dataset="coauthor-cs")
        assert settings_of(trial)["settings"]["lr"] == chosen

    def test_it_is_trained_as_it_is_recorded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given: dict[str, Any] = {}
        monkeypatch.setattr(trained, "train_method", lambda *_, **options: given.update(options))
        graph = fgai.load_dataset("planted")
        trial = Cell(
            kind="search", method="fgai", dataset="amazon-photo", settings={"cut": 0.1}
        )  # as old records have it
        trained.trained(trial, graph, None, "cpu", None)
        recorded = settings_of(trial)
        assert tuple(recorded["defaults"]["box"]) == BOX
        assert given["settings"] == {"box": BOX, **recorded["settings"]} == {"box": BOX, "clip_share": 0.1}
        vanilla_of(trial, graph, "cpu", None)
        chosen = preset("vanilla", "GAT", "amazon-photo")
        assert given["settings"] == chosen != preset("vanilla", "GAT", ""), "its parent is today's"
